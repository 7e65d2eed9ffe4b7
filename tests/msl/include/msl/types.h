// Type traits, limits and reinterpretation under Metal's names.
#pragma once

namespace metal {

using std::bool_constant, std::conditional_t, std::declval, std::enable_if, std::enable_if_t, std::false_type;
using std::integral_constant, std::is_convertible_v, std::is_empty, std::is_empty_v, std::is_floating_point;
using std::is_floating_point_v, std::is_integral, std::is_integral_v, std::is_pointer_v, std::is_same, std::is_same_v;
using std::remove_cv_t, std::remove_reference_t, std::true_type, std::void_t;
template <class T> using remove_addrspace_t = std::remove_cv_t<T>;

template <class T> struct numeric_limits : std::numeric_limits<T> {};
template <class T> struct float_limits {
  static constexpr T infinity() { return T(__builtin_inff()); }
  static constexpr T quiet_NaN() { return T(__builtin_nanf("")); }
};
template <> struct numeric_limits<half> : float_limits<half> {
  static constexpr half max() { return half(65504.f); }
  static constexpr half min() { return half(6.103515625e-05f); }
  static constexpr half lowest() { return half(-65504.f); }
};
template <> struct numeric_limits<bfloat> : float_limits<bfloat> {
  static constexpr bfloat max() { return bfloat(3.38953139e38f); }
  static constexpr bfloat min() { return bfloat(1.17549435e-38f); }
  static constexpr bfloat lowest() { return bfloat(-3.38953139e38f); }
};

template <class T> using uniform = T;
template <class T> constexpr T make_uniform(T value) { return value; }

enum class mem_flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4 };
constexpr mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(int(a) | int(b)); }

}  // namespace metal

template <class T, class U> inline T as_type(U value) {
  static_assert(sizeof(T) == sizeof(U), "as_type between sizes");
  T result;
  memcpy(&result, &value, sizeof result);
  return result;
}
