// SPDX-License-Identifier: Apache-2.0
// Single elements of the storage types as numbers, for glue.
#pragma once

#include <bit>
#include <cstdint>

#include <torch/headeronly/util/Half.h>

#include "ipex/kernel.h"

namespace ipex::program {

inline float load(float x) { return x; }
inline float load(BFloat16 x) { return std::bit_cast<float>(uint32_t{x.bits} << 16); }
inline float load(Half x) { return static_cast<float>(c10::Half(x.bits, c10::Half::from_bits())); }
inline int64_t load(int64_t x) { return x; }
inline int32_t load(int32_t x) { return x; }

inline void store(float& to, float x) { to = x; }
inline void store(BFloat16& to, float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  to.bits = static_cast<uint16_t>(x != x ? 0x7fc0 : rounded);
}
inline void store(Half& to, float x) { to.bits = c10::Half(x).x; }
inline void store(int64_t& to, int64_t x) { to = x; }
inline void store(int32_t& to, int32_t x) { to = x; }

}  // namespace ipex::program
