// Scalar types: Metal's names, and a bfloat with Metal's conversion rules.
#pragma once

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef _Float16 half;

// A bfloat becomes a float by itself; nothing becomes a bfloat by itself. Two bfloats combine in float and round once;
// a bfloat with a float is plain float arithmetic, which the compiler may contract as Metal's does.
struct bfloat {
  uint16_t bits;

  static constexpr uint16_t rounded(float value) {
    const uint32_t word = __builtin_bit_cast(uint32_t, value);
    const bool is_nan = (word & 0x7fffffff) > 0x7f800000;
    return is_nan ? uint16_t((word >> 16) | 64) : uint16_t((word + 0x7fff + ((word >> 16) & 1)) >> 16);
  }

  bfloat() = default;
  template <class T, class = std::enable_if_t<std::is_arithmetic_v<T> || std::is_same_v<T, half>>>
  explicit constexpr bfloat(T value) : bits(rounded(float(value))) {}
  constexpr operator float() const { return __builtin_bit_cast(float, uint32_t(bits) << 16); }

  friend constexpr bfloat operator+(bfloat a, bfloat b) { return bfloat(float(a) + float(b)); }
  friend constexpr bfloat operator-(bfloat a, bfloat b) { return bfloat(float(a) - float(b)); }
  friend constexpr bfloat operator*(bfloat a, bfloat b) { return bfloat(float(a) * float(b)); }
  friend constexpr bfloat operator/(bfloat a, bfloat b) { return bfloat(float(a) / float(b)); }
  friend constexpr bfloat operator-(bfloat a) { return bfloat(-float(a)); }
  bfloat& operator+=(bfloat b) { return *this = *this + b; }
  bfloat& operator-=(bfloat b) { return *this = *this - b; }
  bfloat& operator*=(bfloat b) { return *this = *this * b; }
  bfloat& operator/=(bfloat b) { return *this = *this / b; }
};

constexpr half operator""h(long double value) { return half(value); }
