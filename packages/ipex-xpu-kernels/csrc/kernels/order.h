// SPDX-License-Identifier: Apache-2.0
// Numbers in order, as whole numbers.
#pragma once

#include "names.h"

// Larger for a larger number; zeros are equal, and NaN is the largest.
inline unsigned int ordered_bits(float x) {
  const unsigned int bits = sycl::bit_cast<unsigned int>(x == 0.f ? 0.f : x);
  return x != x ? 0xffffffffu : bits >> 31 != 0 ? ~bits : bits | 0x80000000u;
}
