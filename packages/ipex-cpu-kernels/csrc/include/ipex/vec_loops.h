// SPDX-License-Identifier: Apache-2.0
// Loops over contiguous arrays: y[i] = f(a[i]), y[i] = f(a[i], b[i]), and reductions of one row.
#pragma once

#include <cstdint>

#include "ipex/vec.h"

namespace ipex {
namespace {

// Vectors per iteration. Four independent chains hide the latency of a polynomial; with 16
// registers (AVX2, SSE2) two already fill the register file.
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

// Calls body(i, k) for each full vector at element i and tail(i, count) for the rest, if any. k
// counts 0 .. kUnroll - 1 so that a reduction can keep that many independent accumulators.
template <typename Body, typename Tail>
IPEX_INLINE void for_vectors(int64_t n, const Body& body, const Tail& tail) {
  int64_t i = 0;
  for (; i + kUnroll * kLanes <= n; i += kUnroll * kLanes) {
#pragma GCC unroll 4
    for (int k = 0; k < kUnroll; ++k) body(i + k * kLanes, k);
  }
  for (; i + kLanes <= n; i += kLanes) body(i, 0);
  if (i < n) tail(i, n - i);
}

// kUnroll accumulators of a sum.
struct Sum {
  f32v part[kUnroll];

  IPEX_INLINE Sum() {
#pragma GCC unroll 4
    for (int k = 0; k < kUnroll; ++k) part[k] = zero();
  }
  IPEX_INLINE float total() const {
    f32v sum = part[0];
#pragma GCC unroll 4
    for (int k = 1; k < kUnroll; ++k) sum = sum + part[k];
    return reduce_add(sum);
  }
};

// Tag for an absent weight or bias row.
struct None {};
IPEX_INLINE f32v load_or(const None*, int64_t, f32v absent) { return absent; }
IPEX_INLINE f32v load_n_or(const None*, int64_t, int64_t, f32v absent) { return absent; }
template <typename T>
IPEX_INLINE f32v load_or(const T* p, int64_t i, f32v) {
  return load(p + i);
}
template <typename T>
IPEX_INLINE f32v load_n_or(const T* p, int64_t i, int64_t n, f32v) {
  return load_n(p + i, n);
}

IPEX_INLINE float sqrt_of(float a) { return _mm_cvtss_f32(_mm_sqrt_ss(_mm_set_ss(a))); }

}  // namespace
}  // namespace ipex
