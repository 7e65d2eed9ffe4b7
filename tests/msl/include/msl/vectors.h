// vec<T, 2..4> and the names Metal gives them.
#pragma once

namespace metal {

template <class T, int N> struct vec;

#define MSL_VEC_OPERATOR(N, sign)                                        \
  friend vec operator sign(vec a, vec b) {                               \
    for (int i = 0; i < N; i++) a.v[i] = T(a.v[i] sign b.v[i]);          \
    return a;                                                            \
  }                                                                      \
  vec& operator sign##=(vec b) { return *this = *this sign b; }

#define MSL_VEC_BODY(N)                                                  \
  vec() = default;                                                       \
  template <class U> explicit constexpr vec(const vec<U, N>& other) {    \
    for (int i = 0; i < N; i++) v[i] = T(other.v[i]);                    \
  }                                                                      \
  constexpr T& operator[](int i) { return v[i]; }                        \
  constexpr const T& operator[](int i) const { return v[i]; }            \
  MSL_VEC_OPERATOR(N, +)                                                 \
  MSL_VEC_OPERATOR(N, -)                                                 \
  MSL_VEC_OPERATOR(N, *)                                                 \
  MSL_VEC_OPERATOR(N, /)

template <class T> struct alignas(2 * sizeof(T)) vec<T, 2> {
  union {
    struct { T x, y; };
    T v[2];
  };
  constexpr vec(T a) : v{a, a} {}
  constexpr vec(T a, T b) : v{a, b} {}
  MSL_VEC_BODY(2)
};

template <class T> struct alignas(4 * sizeof(T)) vec<T, 3> {
  union {
    struct { T x, y, z; };
    T v[3];
  };
  constexpr vec(T a) : v{a, a, a} {}
  constexpr vec(T a, T b, T c) : v{a, b, c} {}
  MSL_VEC_BODY(3)
};

template <class T> struct alignas(4 * sizeof(T)) vec<T, 4> {
  union {
    struct { T x, y, z, w; };
    T v[4];
  };
  constexpr vec(T a) : v{a, a, a, a} {}
  constexpr vec(T a, T b, T c, T d) : v{a, b, c, d} {}
  MSL_VEC_BODY(4)
};

// The order inside dot() is the hardware's own; this one goes x, y, z, w with one rounding a step.
template <class T, int N> inline T dot(vec<T, N> a, vec<T, N> b) {
  T sum = a.v[0] * b.v[0];
  for (int i = 1; i < N; i++) sum = std::fma(a.v[i], b.v[i], sum);
  return sum;
}

#define MSL_VECTORS(name, T)  \
  typedef vec<T, 2> name##2;  \
  typedef vec<T, 3> name##3;  \
  typedef vec<T, 4> name##4;
MSL_VECTORS(float, float)
MSL_VECTORS(half, half)
MSL_VECTORS(bfloat, bfloat)
MSL_VECTORS(int, int)
MSL_VECTORS(uint, uint)
MSL_VECTORS(short, short)
MSL_VECTORS(ushort, ushort)
MSL_VECTORS(char, signed char)
MSL_VECTORS(uchar, uchar)
MSL_VECTORS(long, long)
MSL_VECTORS(ulong, ulong)
MSL_VECTORS(bool, bool)

}  // namespace metal
