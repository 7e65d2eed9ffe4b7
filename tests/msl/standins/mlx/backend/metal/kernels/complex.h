// Stands in for MLX's header of this name, whose overloads differ only by address space.
#pragma once

template <typename T> struct complex_t {
  T real, imag;
  complex_t() = default;
  constexpr complex_t(T real) : real(real), imag(0) {}
  constexpr complex_t(T real, T imag) : real(real), imag(imag) {}
};
typedef complex_t<float> complex64_t;
