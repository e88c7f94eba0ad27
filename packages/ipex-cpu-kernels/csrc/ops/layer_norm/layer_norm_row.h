// SPDX-License-Identifier: Apache-2.0
// The sweeps over one row that layer_norm and add_layer_norm share. All but the first read the cache.
#pragma once

#include "ipex/vec_loops.h"

namespace ipex {
namespace {

template <typename T>
IPEX_INLINE float sum_of(const T* x, int64_t n) {
  Sum sum;
  for_vectors(
      n,
      [&](int64_t i, int k) IPEX_LAMBDA { sum.part[k] = sum.part[k] + load(x + i); },
      [&](int64_t i, int64_t count) IPEX_LAMBDA {
        sum.part[0] = sum.part[0] + load_n(x + i, count);
      });
  return sum.total();
}

// Around the mean, in a sweep of its own: mean(x^2) - mean^2 would cancel for a large mean.
template <typename T>
IPEX_INLINE float sum_of_squared_differences(const T* x, float mean, int64_t n) {
  const f32v m = set1(mean);
  Sum sum;
  for_vectors(
      n,
      [&](int64_t i, int k) IPEX_LAMBDA {
        const f32v a = load(x + i) - m;
        sum.part[k] = fma(a, a, sum.part[k]);
      },
      [&](int64_t i, int64_t count) IPEX_LAMBDA {
        const f32v a = keep_n(load_n(x + i, count) - m, count, zero());
        sum.part[0] = fma(a, a, sum.part[0]);
      });
  return sum.total();
}

// y = (x - mean) * factor * weight + bias
template <typename T, typename W, typename B>
__attribute__((noinline)) void normalise_row(const T* x, const W* weight, const B* bias, float mean,
                                             float factor, T* y, int64_t n) {
  const f32v m = set1(mean);
  const f32v f = set1(factor);
  for_vectors(
      n,
      [&](int64_t i, int) IPEX_LAMBDA {
        const f32v w = f * load_or(weight, i, set1(1.0f));
        store(y + i, fma(load(x + i) - m, w, load_or(bias, i, zero())));
      },
      [&](int64_t i, int64_t count) IPEX_LAMBDA {
        const f32v w = f * load_n_or(weight, i, count, set1(1.0f));
        const f32v b = load_n_or(bias, i, count, zero());
        store_n(y + i, fma(load_n(x + i, count) - m, w, b), count);
      });
}

template <typename T, typename P>
IPEX_INLINE void normalise_with(const T* x, const void* weight, const void* bias, float mean,
                                float factor, T* y, int64_t n) {
  const P* w = static_cast<const P*>(weight);
  const P* b = static_cast<const P*>(bias);
  const None* none = nullptr;
  if (w != nullptr && b != nullptr) return normalise_row(x, w, b, mean, factor, y, n);
  if (w != nullptr) return normalise_row(x, w, none, mean, factor, y, n);
  if (b != nullptr) return normalise_row(x, none, b, mean, factor, y, n);
  normalise_row(x, none, none, mean, factor, y, n);
}

template <typename T>
IPEX_INLINE void finish_layer_norm(const T* x, float sum, const void* weight, const void* bias,
                                   bool params_are_f32, float eps, T* y, int64_t n) {
  const float count = static_cast<float>(n);
  const float mean = sum / count;
  const float variance = sum_of_squared_differences(x, mean, n) / count;
  const float factor = 1.0f / sqrt_of(variance + eps);
  if (params_are_f32) return normalise_with<T, float>(x, weight, bias, mean, factor, y, n);
  normalise_with<T, T>(x, weight, bias, mean, factor, y, n);
}

}  // namespace
}  // namespace ipex
