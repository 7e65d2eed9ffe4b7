// Metal's math functions. The last bits of exp, log, rsqrt and the trigonometric functions are the hardware's own;
// these are the host library's.
#pragma once

namespace metal {

template <class T, class U> constexpr auto min(T a, U b) {
  using C = std::common_type_t<T, U>;
  return C(b) < C(a) ? C(b) : C(a);
}
template <class T, class U> constexpr auto max(T a, U b) {
  using C = std::common_type_t<T, U>;
  return C(a) < C(b) ? C(b) : C(a);
}
inline float min(float a, float b) { return std::fmin(a, b); }
inline float max(float a, float b) { return std::fmax(a, b); }
inline half min(half a, half b) { return half(std::fmin(float(a), float(b))); }
inline half max(half a, half b) { return half(std::fmax(float(a), float(b))); }
template <class T> constexpr T clamp(T x, T low, T high) { return min(max(x, low), high); }
template <class T> constexpr T select(T a, T b, bool second) { return second ? b : a; }
template <class T> constexpr T abs(T x) { return x < T(0) ? T(-x) : x; }
inline float abs(float x) { return std::fabs(x); }
inline bool isnan(float x) { return x != x; }
inline bool isinf(float x) { return std::fabs(x) == __builtin_inff(); }
inline bool isfinite(float x) { return std::fabs(x) < __builtin_inff(); }
inline bool signbit(float x) { return std::signbit(x); }

template <class T> using unsigned_of = std::make_unsigned_t<T>;
template <class T> constexpr int bits_of = 8 * sizeof(T);
template <class T> inline int popcount(T x) { return __builtin_popcountll(unsigned_of<T>(x)); }
template <class T> inline T clz(T x) {
  return x ? T(__builtin_clzll(static_cast<unsigned long long>(unsigned_of<T>(x))) - (64 - bits_of<T>)) : T(bits_of<T>);
}
template <class T> inline T ctz(T x) {
  return x ? T(__builtin_ctzll(static_cast<unsigned long long>(unsigned_of<T>(x)))) : T(bits_of<T>);
}
template <class T> inline T mulhi(T a, T b) { return T((static_cast<__int128>(a) * b) >> bits_of<T>); }
template <class T> inline T rotate(T x, T count) {
  count &= bits_of<T> - 1;
  return count ? T(x << count) | T(x >> (bits_of<T> - count)) : x;
}

#define MSL_UNARY(name, expression)                    \
  inline float name(float x) { return expression; }    \
  inline half name(half given) {                       \
    const float x = float(given);                      \
    return half(expression);                           \
  }
#define MSL_STANDARD(name) MSL_UNARY(name, std::name(x))
#define MSL_MATH                                                                                              \
  MSL_STANDARD(exp) MSL_STANDARD(exp2) MSL_UNARY(exp10, std::pow(10.0f, x)) MSL_STANDARD(log)                 \
  MSL_STANDARD(log2) MSL_STANDARD(log10) MSL_STANDARD(sin) MSL_STANDARD(cos) MSL_STANDARD(tan)                \
  MSL_STANDARD(sinh) MSL_STANDARD(cosh) MSL_STANDARD(tanh) MSL_STANDARD(asin) MSL_STANDARD(acos)              \
  MSL_STANDARD(atan) MSL_STANDARD(asinh) MSL_STANDARD(acosh) MSL_STANDARD(atanh) MSL_STANDARD(sqrt)           \
  MSL_UNARY(rsqrt, 1.0f / std::sqrt(x)) MSL_STANDARD(floor) MSL_STANDARD(ceil) MSL_STANDARD(trunc)            \
  MSL_STANDARD(rint) MSL_STANDARD(round) MSL_STANDARD(fabs) MSL_UNARY(fract, x - std::floor(x))               \
  MSL_UNARY(sign, x > 0 ? 1.f : x < 0 ? -1.f : x)                                                             \
  inline float pow(float a, float b) { return std::pow(a, b); }                                               \
  inline float powr(float a, float b) { return std::pow(a, b); }                                              \
  inline float fmod(float a, float b) { return std::fmod(a, b); }                                             \
  inline float atan2(float a, float b) { return std::atan2(a, b); }                                           \
  inline float fmin(float a, float b) { return std::fmin(a, b); }                                             \
  inline float fmax(float a, float b) { return std::fmax(a, b); }                                             \
  inline float fma(float a, float b, float c) { return std::fma(a, b, c); }                                   \
  inline float ldexp(float a, int k) { return std::ldexp(a, k); }                                             \
  inline float divide(float a, float b) { return a / b; }

MSL_MATH
inline float erf(float x) { return std::erf(x); }
namespace fast {
MSL_MATH
}
namespace precise {
MSL_MATH
}

}  // namespace metal
