// SPDX-License-Identifier: Apache-2.0
// Tiles [steps][kLanes channels] of a sequence [channels, steps] that is stored either way round.
#pragma once

#include <cstdint>

#include "ipex/kernel/transpose.h"

namespace ipex {
namespace {

// Whether a few elements of 16 bits take a loop to load or store: short steps then go one by one.
template <typename T>
inline constexpr bool kSlowParts = !IPEX_HAVE_AVX512 && sizeof(T) == 2;

// Reads `count` channels, 0 < count <= kLanes; the other lanes become 0. One of the two distances
// (in elements) is 1.
template <typename T>
void load_tile(const T* from, int64_t channel, int64_t step, int64_t count, int64_t steps,
               float* to) {
  if (channel == 1) {
    for (int64_t l = 0; l < steps; ++l, from += step)
      store(to + l * kLanes, count == kLanes ? load(from) : load_n(from, count));
    return;
  }
  if (kSlowParts<T> && steps < kLanes) {
    for (int64_t l = 0; l < steps; ++l) {
      T column[kLanes] = {};
      for (int64_t i = 0; i < count; ++i) column[i] = from[i * channel + l];
      store(to + l * kLanes, load(column));
    }
    return;
  }
  for (int64_t l = 0; l < steps; l += kLanes) {
    const int64_t n = steps - l < kLanes ? steps - l : kLanes;
    f32v rows[kLanes];
#pragma GCC unroll 16
    for (int64_t i = 0; i < kLanes; ++i) {
      const T* row = from + i * channel + l;
      rows[i] = i >= count ? zero() : n == kLanes ? load(row) : load_n(row, n);
    }
    transpose(rows);
#pragma GCC unroll 16
    for (int64_t i = 0; i < kLanes; ++i)
      if (i < n) store(to + (l + i) * kLanes, rows[i]);
  }
}

// Writes what load_tile reads.
template <typename T>
void store_tile(T* to, int64_t channel, int64_t step, int64_t count, int64_t steps,
                const float* from) {
  if (channel == 1) {
    for (int64_t l = 0; l < steps; ++l, to += step) {
      const f32v v = load(from + l * kLanes);
      if (count == kLanes)
        store(to, v);
      else
        store_n(to, v, count);
    }
    return;
  }
  if (kSlowParts<T> && steps < kLanes) {
    for (int64_t l = 0; l < steps; ++l) {
      T column[kLanes];
      store(column, load(from + l * kLanes));
      for (int64_t i = 0; i < count; ++i) to[i * channel + l] = column[i];
    }
    return;
  }
  for (int64_t l = 0; l < steps; l += kLanes) {
    const int64_t n = steps - l < kLanes ? steps - l : kLanes;
    f32v rows[kLanes];
#pragma GCC unroll 16
    for (int64_t i = 0; i < kLanes; ++i) rows[i] = i < n ? load(from + (l + i) * kLanes) : zero();
    transpose(rows);
#pragma GCC unroll 16
    for (int64_t i = 0; i < kLanes; ++i) {
      if (i >= count) break;
      T* row = to + i * channel + l;
      if (n == kLanes)
        store(row, rows[i]);
      else
        store_n(row, rows[i], n);
    }
  }
}

}  // namespace
}  // namespace ipex
