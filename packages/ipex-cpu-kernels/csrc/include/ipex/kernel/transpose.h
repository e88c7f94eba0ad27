// SPDX-License-Identifier: Apache-2.0
// Transposes a square of vectors, at every level.
#pragma once

#include <cstdint>

#include "ipex/kernel/vec.h"

namespace ipex {
namespace {

// One exchange: of two rows whose numbers differ in the bit kBit, the first gets the columns
// without that bit, the second those with it.
template <int kBit>
IPEX_INLINE void exchange(f32v& a, f32v& b) {
  i32v low, high;
#pragma GCC unroll 16
  for (int i = 0; i < static_cast<int>(kLanes); ++i) {
    low[i] = i & kBit ? i - kBit + static_cast<int>(kLanes) : i;
    high[i] = i & kBit ? i + static_cast<int>(kLanes) : i + kBit;
  }
  const f32v first = __builtin_shuffle(a, b, low);
  b = __builtin_shuffle(a, b, high);
  a = first;
}

template <int kBit>
IPEX_INLINE void exchange_all(f32v (&r)[kLanes]) {
#pragma GCC unroll 16
  for (int i = 0; i < static_cast<int>(kLanes); ++i)
    if (!(i & kBit)) exchange<kBit>(r[i], r[i + kBit]);
}

// Row i of the result is column i of the rows.
IPEX_INLINE void transpose(f32v (&r)[kLanes]) {
  exchange_all<1>(r);
  exchange_all<2>(r);
  if constexpr (kLanes >= 8) exchange_all<4>(r);
  if constexpr (kLanes >= 16) exchange_all<8>(r);
}

}  // namespace
}  // namespace ipex
