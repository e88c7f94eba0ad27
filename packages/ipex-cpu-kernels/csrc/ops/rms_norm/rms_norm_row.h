// SPDX-License-Identifier: Apache-2.0
// The two sweeps over one row that all RMS norms share. The second reads the cache.
#pragma once

#include "ipex/kernel/vec_loops.h"

namespace ipex {
namespace {

template <typename T>
IPEX_INLINE float sum_of_squares(const T* x, int64_t n) {
  Sum sum;
  for_pairs(
      n, [&](int64_t i, int k) IPEX_LAMBDA { sum.add_squares(load2(x + i), k); },
      [&](int64_t i, int64_t count) IPEX_LAMBDA {
        const f32v a = load_n(x + i, count);
        sum.part[0] = fma(a, a, sum.part[0]);
      });
  return sum.total();
}

// Writes sum = x + residual and returns the sum of squares of the rounded values.
template <typename T>
IPEX_INLINE float add_and_square(const T* x, const T* residual, T* sum, int64_t n) {
  Sum squares;
  for_pairs(
      n,
      [&](int64_t i, int k) IPEX_LAMBDA {
        const f32v2 a = load2(x + i);
        const f32v2 b = load2(residual + i);
        squares.add_squares(store2(sum + i, {a.a + b.a, a.b + b.b}), k);
      },
      [&](int64_t i, int64_t count) IPEX_LAMBDA {
        const f32v a = load_n(x + i, count) + load_n(residual + i, count);
        store_n(sum + i, a, count);
        const f32v rounded = round_to(sum, a);
        squares.part[0] = fma(rounded, rounded, squares.part[0]);
      });
  return squares.total();
}

// y = x * factor * (weight + offset)
template <typename T, typename W>
__attribute__((noinline)) void scale_row(const T* x, const W* weight, float factor, float offset,
                                         T* y, int64_t n) {
  const f32v f = set1(factor);
  const f32v shift = set1(offset);
  const f32v one = set1(1.0f);
  for_pairs(
      n,
      [&](int64_t i, int) IPEX_LAMBDA {
        const f32v2 a = load2(x + i);
        const f32v2 w = load2_or<T>(weight, i, one);
        store2(y + i, {a.a * (f * (w.a + shift)), a.b * (f * (w.b + shift))});
      },
      [&](int64_t i, int64_t count) IPEX_LAMBDA {
        const f32v w = load_n_or(weight, i, count, one) + shift;
        store_n(y + i, load_n(x + i, count) * (f * w), count);
      });
}

template <typename T>
IPEX_INLINE void finish_rms_norm(const T* x, float squares, const void* weight, bool weight_is_f32,
                                 float eps, float weight_offset, T* y, int64_t n) {
  const float factor = 1.0f / sqrt_of(squares / static_cast<float>(n) + eps);
  if (weight == nullptr) {
    scale_row(x, static_cast<const None*>(nullptr), factor, 0.0f, y, n);
  } else if (weight_is_f32) {
    scale_row(x, static_cast<const float*>(weight), factor, weight_offset, y, n);
  } else {
    scale_row(x, static_cast<const T*>(weight), factor, weight_offset, y, n);
  }
}

}  // namespace
}  // namespace ipex
