// SPDX-License-Identifier: Apache-2.0
// Floating-point numbers of 8 bits. Conversion rounds to nearest even.
#pragma once

#include "names.h"

// Magnitude bits of |value| with `kMantissa` bits of fraction and exponents from `kLeast` on; what
// is too large is left to the caller.
template <int kMantissa, int kLeast>
inline unsigned int small_float_bits(float magnitude) {
  constexpr int kDropped = 23 - kMantissa;
  // Below the normal numbers all lie a fixed step apart: an addition rounds to it.
  constexpr unsigned int kFirst = static_cast<unsigned int>(127 + kLeast) << 23;
  constexpr unsigned int kStep = static_cast<unsigned int>(127 + kLeast + kDropped) << 23;
  const unsigned int x = sycl::bit_cast<unsigned int>(magnitude);
  if (x < kFirst)
    return sycl::bit_cast<unsigned int>(magnitude + sycl::bit_cast<float>(kStep)) - kStep;
  const unsigned int rounded = x + ((1u << (kDropped - 1)) - 1) + ((x >> kDropped) & 1);
  return (rounded >> kDropped) - (static_cast<unsigned int>(126 + kLeast) << kMantissa);
}

// 5 bits of exponent, 2 of fraction, with infinities: the upper half of a float16.
struct e5m2 {
  unsigned char bits;
  e5m2() = default;
  explicit e5m2(float value) {
    const unsigned int sign = sycl::bit_cast<unsigned int>(value) >> 24 & 0x80;
    const unsigned int x = small_float_bits<2, -14>(sycl::fabs(value));
    bits = static_cast<unsigned char>(sign | (value != value ? 0x7f : x > 0x7c ? 0x7c : x));
  }
  explicit operator float() const {
    return static_cast<float>(sycl::bit_cast<half>(static_cast<unsigned short>(bits << 8)));
  }
};

// 4 bits of exponent, 3 of fraction, without infinities: the largest number is 448, to which larger
// ones are limited; infinity becomes NaN.
struct e4m3 {
  unsigned char bits;
  e4m3() = default;
  explicit e4m3(float value) {
    const unsigned int sign = sycl::bit_cast<unsigned int>(value) >> 24 & 0x80;
    const float magnitude = sycl::fabs(value);
    const unsigned int x = small_float_bits<3, -6>(sycl::fmin(magnitude, 448.f));
    bits = static_cast<unsigned char>(sign | (magnitude < __builtin_inff() ? x : 0x7f));
  }
  explicit operator float() const {
    const float magnitude =
        static_cast<float>(sycl::bit_cast<half>(static_cast<unsigned short>((bits & 0x7f) << 7))) *
        256.f;
    const float value = (bits & 0x7f) == 0x7f ? __builtin_nanf("") : magnitude;
    return (bits & 0x80) != 0 ? -value : value;
  }
};
