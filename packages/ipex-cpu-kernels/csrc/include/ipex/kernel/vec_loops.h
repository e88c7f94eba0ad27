// SPDX-License-Identifier: Apache-2.0
// Loops over contiguous arrays: y[i] = f(a[i]), y[i] = f(a[i], b[i]), and reductions of one row.
#pragma once

#include <cstdint>

#include "ipex/kernel/vec.h"

namespace ipex {
namespace {

// Pairs of vectors per iteration of an element-wise loop. Independent chains hide the latency of a
// polynomial; with 16 registers (AVX2, SSE2) one pair already fills the register file.
inline constexpr int kMapPairs = kLanes == 16 ? 2 : 1;

// Tells the cores that have AMX what is read 4 KiB later: a tenth faster where a polynomial keeps
// the loads of an iteration from running far enough ahead. Other cores were not faster by it.
template <typename T>
IPEX_INLINE void fetch_pair_ahead([[maybe_unused]] const T* a) {
#if IPEX_HAVE_AMX
  constexpr int64_t kAhead = 4096;
  const char* place = reinterpret_cast<const char*>(a) + kAhead;
#pragma GCC unroll 2
  for (int64_t line = 0; line < 2 * kLanes * static_cast<int64_t>(sizeof(T)); line += 64)
    __builtin_prefetch(place + line);
#endif
}

// The inputs of one group are all read before its outputs are written, so y may be an input.
template <typename T, typename F>
IPEX_INLINE void map(const T* a, T* y, int64_t n, const F& f) {
  constexpr int64_t kStep = 2 * kLanes;
  int64_t i = 0;
  for (; i + kMapPairs * kStep <= n; i += kMapPairs * kStep) {
    f32v2 r[kMapPairs];
#pragma GCC unroll 2
    for (int k = 0; k < kMapPairs; ++k) {
      const f32v2 u = load2(a + i + k * kStep);
      fetch_pair_ahead(a + i + k * kStep);
      r[k] = {f(u.a), f(u.b)};
    }
#pragma GCC unroll 2
    for (int k = 0; k < kMapPairs; ++k) store2(y + i + k * kStep, r[k]);
  }
  for (; i + kLanes <= n; i += kLanes) store(y + i, f(load(a + i)));
  if (i < n) store_n(y + i, f(load_n(a + i, n - i)), n - i);
}

template <typename T, typename F>
IPEX_INLINE void map(const T* a, const T* b, T* y, int64_t n, const F& f) {
  constexpr int64_t kStep = 2 * kLanes;
  int64_t i = 0;
  for (; i + kMapPairs * kStep <= n; i += kMapPairs * kStep) {
    f32v2 r[kMapPairs];
#pragma GCC unroll 2
    for (int k = 0; k < kMapPairs; ++k) {
      const f32v2 u = load2(a + i + k * kStep);
      const f32v2 v = load2(b + i + k * kStep);
      r[k] = {f(u.a, v.a), f(u.b, v.b)};
    }
#pragma GCC unroll 2
    for (int k = 0; k < kMapPairs; ++k) store2(y + i + k * kStep, r[k]);
  }
  for (; i + kLanes <= n; i += kLanes) store(y + i, f(load(a + i), load(b + i)));
  if (i < n) store_n(y + i, f(load_n(a + i, n - i), load_n(b + i, n - i)), n - i);
}

// Accumulators of a reduction: enough to hide the latency of an addition.
inline constexpr int kParts = 4;

// Calls pair(i, k) for each two full vectors at element i and tail(i, count), count <= kLanes, for
// what is left (up to two times). k is 0 or 2: the first of two accumulators to use.
template <typename Pair, typename Tail>
IPEX_INLINE void for_pairs(int64_t n, const Pair& pair, const Tail& tail) {
  constexpr int64_t kStep = 2 * kLanes;
  int64_t i = 0;
  for (; i + 2 * kStep <= n; i += 2 * kStep) {
    pair(i, 0);
    pair(i + kStep, 2);
  }
  if (i + kStep <= n) {
    pair(i, 0);
    i += kStep;
  }
  for (; i < n; i += kLanes) tail(i, n - i < kLanes ? n - i : kLanes);
}

struct Sum {
  f32v part[kParts];

  IPEX_INLINE Sum() {
#pragma GCC unroll 4
    for (int k = 0; k < kParts; ++k) part[k] = zero();
  }
  IPEX_INLINE void add(f32v2 v, int k) {
    part[k] = part[k] + v.a;
    part[k + 1] = part[k + 1] + v.b;
  }
  IPEX_INLINE void add_squares(f32v2 v, int k) {
    part[k] = fma(v.a, v.a, part[k]);
    part[k + 1] = fma(v.b, v.b, part[k + 1]);
  }
  IPEX_INLINE float total() const { return reduce_add((part[0] + part[1]) + (part[2] + part[3])); }
};

struct Maximum {
  f32v part[kParts];

  IPEX_INLINE Maximum() {
#pragma GCC unroll 4
    for (int k = 0; k < kParts; ++k) part[k] = set1(-__builtin_inff());
  }
  IPEX_INLINE void add(f32v2 v, int k) {
    part[k] = max(part[k], v.a);
    part[k + 1] = max(part[k + 1], v.b);
  }
  IPEX_INLINE float total() const {
    return reduce_max(max(max(part[0], part[1]), max(part[2], part[3])));
  }
};

// Tag for an absent row of weights, of biases or of a mask.
struct None {};

// The pair at element i of p in the lane order of T, or `absent`.
template <typename T>
IPEX_INLINE f32v2 load2_or(const None*, int64_t, f32v absent) {
  return {absent, absent};
}
template <typename T, typename P>
IPEX_INLINE f32v2 load2_or(const P* p, int64_t i, f32v) {
  return load2_as<T>(p + i);
}
IPEX_INLINE f32v load_n_or(const None*, int64_t, int64_t, f32v absent) { return absent; }
template <typename P>
IPEX_INLINE f32v load_n_or(const P* p, int64_t i, int64_t n, f32v) {
  return load_n(p + i, n);
}

IPEX_INLINE float sqrt_of(float a) { return _mm_cvtss_f32(_mm_sqrt_ss(_mm_set_ss(a))); }

}  // namespace
}  // namespace ipex
