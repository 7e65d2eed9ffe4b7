// The names Apple's standard library spells with __metal_, from which MLX's headers build their bfloat overloads.
// The SIMD-group ones are wrappers, so lanes must meet at the wrapper's caller: they are forced inline.
#pragma once

#define __METAL_MAYBE_FAST_MATH__ 0
#define __METAL_FAST_MATH__ 1
#define __METAL_PRECISE_MATH__ 0

#define MSL_INNER(name) inline float __metal_##name(float x, bool) { return metal::name(x); }
MSL_INNER(fabs) MSL_INNER(acos) MSL_INNER(acosh) MSL_INNER(asin) MSL_INNER(asinh) MSL_INNER(atan) MSL_INNER(atanh)
MSL_INNER(ceil) MSL_INNER(cos) MSL_INNER(cosh) MSL_INNER(exp) MSL_INNER(exp10) MSL_INNER(exp2) MSL_INNER(floor)
MSL_INNER(fract) MSL_INNER(log) MSL_INNER(log10) MSL_INNER(log2) MSL_INNER(rint) MSL_INNER(round) MSL_INNER(rsqrt)
MSL_INNER(sin) MSL_INNER(sinh) MSL_INNER(sqrt) MSL_INNER(tan) MSL_INNER(tanh) MSL_INNER(trunc)

constexpr float MSL_PI = 3.14159265358979f;
inline float __metal_cospi(float x, bool) { return std::cos(x * MSL_PI); }
inline float __metal_sinpi(float x, bool) { return std::sin(x * MSL_PI); }
inline float __metal_tanpi(float x, bool) { return std::tan(x * MSL_PI); }

#define MSL_INNER_OF_TWO(name) inline float __metal_##name(float x, float y, bool) { return metal::name(x, y); }
MSL_INNER_OF_TWO(atan2) MSL_INNER_OF_TWO(divide) MSL_INNER_OF_TWO(fmax) MSL_INNER_OF_TWO(fmin)
MSL_INNER_OF_TWO(fmod) MSL_INNER_OF_TWO(pow) MSL_INNER_OF_TWO(powr)

inline float __metal_fma(float x, float y, float z) { return std::fma(x, y, z); }
inline float __metal_nextafter(float x, float y) { return std::nextafter(x, y); }
inline float __metal_ldexp(float x, int k, bool) { return std::ldexp(x, k); }
inline float __metal_frexp(float x, int* e) { return std::frexp(x, e); }
inline float __metal_fmax3(float x, float y, float z, bool) { return std::fmax(x, std::fmax(y, z)); }
inline float __metal_fmin3(float x, float y, float z, bool) { return std::fmin(x, std::fmin(y, z)); }
inline float __metal_fmedian3(float x, float y, float z, bool) {
  return std::fmax(std::fmin(x, y), std::fmin(std::fmax(x, y), z));
}
inline ushort __metal_get_simdgroup_size(ushort) { return 32; }

#define MSL_INNER_SHUFFLE(name) \
  template <class T> METAL_FUNC T __metal_##name(T x, ushort p) { return metal::name(x, p); }
MSL_INNER_SHUFFLE(simd_broadcast)
MSL_INNER_SHUFFLE(simd_shuffle)
MSL_INNER_SHUFFLE(simd_shuffle_down)
MSL_INNER_SHUFFLE(simd_shuffle_up)
MSL_INNER_SHUFFLE(simd_shuffle_xor)
MSL_INNER_SHUFFLE(simd_shuffle_rotate_down)
MSL_INNER_SHUFFLE(simd_shuffle_rotate_up)

#define MSL_INNER_REDUCTION(name) \
  template <class T> METAL_FUNC T __metal_##name(T x) { return metal::name(x); }
MSL_INNER_REDUCTION(simd_max)
MSL_INNER_REDUCTION(simd_min)
MSL_INNER_REDUCTION(simd_sum)
MSL_INNER_REDUCTION(simd_product)
MSL_INNER_REDUCTION(simd_prefix_inclusive_sum)
MSL_INNER_REDUCTION(simd_prefix_exclusive_sum)

#define MSL_NOT_EMULATED(name) \
  template <class T> T __metal_##name(T) { msl::fail(#name " is not emulated"); }
MSL_NOT_EMULATED(simd_xor)
MSL_NOT_EMULATED(simd_prefix_inclusive_product)
MSL_NOT_EMULATED(simd_prefix_exclusive_product)

template <class T> METAL_FUNC T __metal_simd_shuffle_and_fill_up(T x, T fill, ushort distance, ushort = 32) {
  const T moved = metal::simd_shuffle_up(x, distance);
  return msl::current->lane < distance ? fill : moved;
}
template <class T> METAL_FUNC T __metal_simd_shuffle_and_fill_down(T x, T fill, ushort distance, ushort = 32) {
  const T moved = metal::simd_shuffle_down(x, distance);
  return msl::current->lane + distance > 31 ? fill : moved;
}
namespace metal {
template <class T> METAL_FUNC T simd_shuffle_and_fill_up(T x, T fill, ushort distance) {
  return __metal_simd_shuffle_and_fill_up(x, fill, distance);
}
template <class T> METAL_FUNC T simd_shuffle_and_fill_down(T x, T fill, ushort distance) {
  return __metal_simd_shuffle_and_fill_down(x, fill, distance);
}
}  // namespace metal
