// SPDX-License-Identifier: Apache-2.0
// What short convolutions have in common whose lanes are channels.
#pragma once

#include "ipex/kernel/vec_math.h"

namespace ipex {
namespace {

// The first `n` of kLanes elements of a filter or a bias, in the dtype of the kernel or float.
template <class T>
IPEX_INLINE f32v load_either(const void* data, bool is_f32, int64_t at, int64_t n) {
  return is_f32 ? load_n(static_cast<const float*>(data) + at, n)
                : load_n(static_cast<const T*>(data) + at, n);
}

// v + sum over w of weight[w] * x[row - before + w], before = taps - 1, of `count` channels. Rows
// below 0 are the last of history[before][kLanes].
template <class T>
IPEX_INLINE f32v add_taps(f32v v, const T* x, int64_t step, int64_t row, int64_t taps,
                          const float* weight, const float* history, int64_t count) {
  const int64_t before = taps - 1;
#pragma GCC unroll 4
  for (int64_t w = 0; w < taps; ++w) {
    const int64_t at = row - before + w;
    const T* from = x + at * step;
    const f32v value = at < 0            ? load(history + (at + before) * kLanes)
                       : count == kLanes ? load(from)
                                         : load_n(from, count);
    v = fma(value, load(weight + w * kLanes), v);
  }
  return v;
}

// silu(v), or v.
template <class T>
IPEX_INLINE f32v activated(f32v v, bool apply_silu) {
  return apply_silu ? silu<kReducedPrecision<T>>(v) : v;
}

}  // namespace
}  // namespace ipex
