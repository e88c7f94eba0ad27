// SPDX-License-Identifier: Apache-2.0
// Element-wise loops over contiguous arrays: y[i] = f(a[i]) and y[i] = f(a[i], b[i]).
#pragma once

#include <cstdint>

#include "ipex/vec.h"

namespace ipex {
namespace {

// Vectors per iteration. Four independent chains hide the latency of a polynomial; with 16 registers
// (AVX2, SSE2) two already fill the register file.
inline constexpr int kUnroll = kLanes == 16 ? 4 : 2;

// The inputs of one group are all read before its outputs are written, so y may be an input.
template <typename T, typename F>
IPEX_INLINE void map(const T* a, T* y, int64_t n, const F& f) {
  int64_t i = 0;
  for (; i + kUnroll * kLanes <= n; i += kUnroll * kLanes) {
    f32v r[kUnroll];
#pragma GCC unroll 4
    for (int k = 0; k < kUnroll; ++k) r[k] = f(load(a + i + k * kLanes));
#pragma GCC unroll 4
    for (int k = 0; k < kUnroll; ++k) store(y + i + k * kLanes, r[k]);
  }
  for (; i + kLanes <= n; i += kLanes) store(y + i, f(load(a + i)));
  if (i < n) store_n(y + i, f(load_n(a + i, n - i)), n - i);
}

template <typename T, typename F>
IPEX_INLINE void map(const T* a, const T* b, T* y, int64_t n, const F& f) {
  int64_t i = 0;
  for (; i + kUnroll * kLanes <= n; i += kUnroll * kLanes) {
    f32v r[kUnroll];
#pragma GCC unroll 4
    for (int k = 0; k < kUnroll; ++k) r[k] = f(load(a + i + k * kLanes), load(b + i + k * kLanes));
#pragma GCC unroll 4
    for (int k = 0; k < kUnroll; ++k) store(y + i + k * kLanes, r[k]);
  }
  for (; i + kLanes <= n; i += kLanes) store(y + i, f(load(a + i), load(b + i)));
  if (i < n) store_n(y + i, f(load_n(a + i, n - i), load_n(b + i, n - i)), n - i);
}

}  // namespace
}  // namespace ipex
