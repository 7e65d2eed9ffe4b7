// Stands in for MLX's header of this name, whose specialisations differ only by address space.
#pragma once

namespace metal {
template <typename T> struct is_static : bool_constant<is_empty<remove_cv_t<T>>::value> {};
template <typename T> struct pointer_element {};
template <typename T> struct pointer_element<T*> {
  using type = remove_cv_t<T>;
};
template <typename T> using pointer_element_t = typename pointer_element<remove_cv_t<T>>::type;
}  // namespace metal
