// SPDX-License-Identifier: Apache-2.0
// Dropout without a stored mask: whether an element is kept follows from a key, its row and its
// column, so that a backward pass finds the same elements again, on any CPU and with any number of
// threads. ipex_core/ops/softmax.py is the same in Python.
#pragma once

#include <cstdint>

#include "ipex/kernel/vec_loops.h"

namespace ipex {
namespace {

typedef uint32_t u32v __attribute__((vector_size(sizeof(f32v))));

// The finisher of SplitMix64 (Steele, Lea and Flood, 2014).
IPEX_INLINE uint64_t mix64(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

IPEX_INLINE u32v columns_from(int64_t i, uint32_t step) {
  u32v v;
  for (int64_t lane = 0; lane < kLanes; ++lane)
    v[lane] = static_cast<uint32_t>(i) + static_cast<uint32_t>(lane) * step;
  return v;
}

// Dropped elements become 0, the others are multiplied by 1 / (1 - p).
class KeepMask {
 public:
  // threshold: p * 2^32.
  IPEX_INLINE KeepMask(uint64_t key, uint32_t threshold, float factor)
      : threshold_(u32v{} + threshold), factor_(set1(factor)), key_(key) {}

  IPEX_INLINE void set_row(int64_t row) {
    const uint64_t k = mix64(key_ + 0x9E3779B97F4A7C15u * (static_cast<uint64_t>(row) + 1));
    first_ = u32v{} + static_cast<uint32_t>(k);
    second_ = u32v{} + static_cast<uint32_t>(k >> 32);
  }

  // The pair of vectors at column i, in the order of load2(const T*).
  template <typename T>
  IPEX_INLINE f32v2 pair(f32v2 v, int64_t i) const {
    constexpr bool kPairs = kIsBFloat16<T>;
    const u32v a = columns_from(0, kPairs ? 2 : 1) + static_cast<uint32_t>(i);
    return {keep(v.a, a), keep(v.b, a + static_cast<uint32_t>(kPairs ? 1 : kLanes))};
  }
  IPEX_INLINE f32v one(f32v v, int64_t i) const {
    return keep(v, columns_from(0, 1) + static_cast<uint32_t>(i));
  }

 private:
  // Two rounds of the 32-bit hash with the least bias of Wellons' "hash prospector" (2018).
  IPEX_INLINE f32v keep(f32v v, u32v column) const {
    u32v x = column ^ first_;
    x ^= x >> 16;
    x *= 0x7feb352du;
    x += second_;
    x ^= x >> 15;
    x *= 0x846ca68bu;
    x ^= x >> 16;
    const i32v kept = reinterpret_cast<i32v>(x >= threshold_);
    return as_float(as_int(v * factor_) & kept);
  }

  u32v threshold_;
  f32v factor_;
  uint64_t key_;
  u32v first_{};
  u32v second_{};
};

// Stands for KeepMask where nothing is dropped.
struct KeepAll {
  IPEX_INLINE void set_row(int64_t) {}
  template <typename T>
  IPEX_INLINE f32v2 pair(f32v2 v, int64_t) const {
    return v;
  }
  IPEX_INLINE f32v one(f32v v, int64_t) const { return v; }
};

}  // namespace
}  // namespace ipex
