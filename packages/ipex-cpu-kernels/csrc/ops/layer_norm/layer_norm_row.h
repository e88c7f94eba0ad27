// SPDX-License-Identifier: Apache-2.0
// The two sweeps over one row that all layer norms share. The second reads the cache.
#pragma once

#include "ipex/kernel/vec_loops.h"

namespace ipex {
namespace {

// Mean and variance in one sweep, from the sums of d and d^2 with d = x - pivot. The pivot is the
// mean of the first m >= n / 32 elements of the row. As they are part of it, (mean - pivot)^2 <=
// n / m * variance whatever the data: the subtraction in finish() costs at most a factor 32 of
// float's precision, and almost nothing unless a row goes on quite unlike it begins.
class Moments {
 public:
  // at(i) is the vector at element i, tail(i, count) the incomplete one there.
  template <typename At, typename Tail>
  IPEX_INLINE Moments(int64_t n, const At& at, const Tail& tail) : n_(static_cast<float>(n)) {
    f32v sum = n < kLanes ? keep_n(tail(int64_t{0}, n), n, zero()) : at(int64_t{0});
    int64_t count = n < kLanes ? n : kLanes;
    const int64_t enough = n / 32 > 128 ? n / 32 : 128;
    for (; count + kLanes <= n && count < enough; count += kLanes) sum = sum + at(count);
    pivot_ = reduce_add(sum) / static_cast<float>(count);
    shift_ = set1(pivot_);
  }
  IPEX_INLINE void add(f32v2 v, int k) {
    const f32v2 d = {v.a - shift_, v.b - shift_};
    first_.add(d, k);
    second_.add_squares(d, k);
  }
  IPEX_INLINE void add_tail(f32v a, int64_t count) {
    const f32v d = keep_n(a - shift_, count, zero());
    first_.part[0] = first_.part[0] + d;
    second_.part[0] = fma(d, d, second_.part[0]);
  }
  IPEX_INLINE void finish() {
    const float mean = first_.total() / n_;
    const float variance = second_.total() / n_ - mean * mean;
    mean_ = pivot_ + mean;
    variance_ = variance < 0.0f ? 0.0f : variance;  // rounding; NaN stays NaN
  }
  float mean() const { return mean_; }
  float variance() const { return variance_; }

 private:
  Sum first_;
  Sum second_;
  f32v shift_;
  float n_;
  float pivot_;
  float mean_ = 0.0f;
  float variance_ = 0.0f;
};

// Moments of one row.
template <typename T>
IPEX_INLINE Moments measure(const T* x, int64_t n) {
  const auto at = [&](int64_t i) IPEX_LAMBDA { return load(x + i); };
  const auto tail = [&](int64_t i, int64_t count) IPEX_LAMBDA { return load_n(x + i, count); };
  Moments moments(n, at, tail);
  for_pairs(
      n, [&](int64_t i, int k) IPEX_LAMBDA { moments.add(load2(x + i), k); },
      [&](int64_t i, int64_t count) IPEX_LAMBDA { moments.add_tail(tail(i, count), count); });
  return moments;
}

// Writes sum = x + residual and returns the moments of the rounded values.
template <typename T>
IPEX_INLINE Moments add_and_measure(const T* x, const T* residual, T* sum, int64_t n) {
  const auto at = [&](int64_t i) IPEX_LAMBDA { return load(x + i) + load(residual + i); };
  const auto tail = [&](int64_t i, int64_t count)
                        IPEX_LAMBDA { return load_n(x + i, count) + load_n(residual + i, count); };
  Moments moments(n, at, tail);
  for_pairs(
      n,
      [&](int64_t i, int k) IPEX_LAMBDA {
        const f32v2 a = load2(x + i);
        const f32v2 b = load2(residual + i);
        moments.add(store2(sum + i, {a.a + b.a, a.b + b.b}), k);
      },
      [&](int64_t i, int64_t count) IPEX_LAMBDA {
        const f32v a = tail(i, count);
        store_n(sum + i, a, count);
        moments.add_tail(round_to(sum, a), count);
      });
  return moments;
}

// y = (x - mean) * factor * weight + bias
template <typename T, typename W, typename B>
__attribute__((noinline)) void normalize_row(const T* x, const W* weight, const B* bias, float mean,
                                             float factor, T* y, int64_t n) {
  const f32v m = set1(mean);
  const f32v f = set1(factor);
  const f32v one = set1(1.0f);
  for_pairs(
      n,
      [&](int64_t i, int) IPEX_LAMBDA {
        const f32v2 a = load2(x + i);
        const f32v2 w = load2_or<T>(weight, i, one);
        const f32v2 b = load2_or<T>(bias, i, zero());
        store2(y + i, {fma(a.a - m, f * w.a, b.a), fma(a.b - m, f * w.b, b.b)});
      },
      [&](int64_t i, int64_t count) IPEX_LAMBDA {
        const f32v w = f * load_n_or(weight, i, count, one);
        const f32v b = load_n_or(bias, i, count, zero());
        store_n(y + i, fma(load_n(x + i, count) - m, w, b), count);
      });
}

template <typename T, typename P>
IPEX_INLINE void normalize_with(const T* x, const void* weight, const void* bias, float mean,
                                float factor, T* y, int64_t n) {
  const P* w = static_cast<const P*>(weight);
  const P* b = static_cast<const P*>(bias);
  const None* none = nullptr;
  if (w != nullptr && b != nullptr) return normalize_row(x, w, b, mean, factor, y, n);
  if (w != nullptr) return normalize_row(x, w, none, mean, factor, y, n);
  if (b != nullptr) return normalize_row(x, none, b, mean, factor, y, n);
  normalize_row(x, none, none, mean, factor, y, n);
}

template <typename T>
IPEX_INLINE void finish_layer_norm(const T* x, Moments& moments, const void* weight,
                                   const void* bias, bool params_are_f32, float eps, T* y,
                                   int64_t n) {
  moments.finish();
  const float mean = moments.mean();
  const float factor = 1.0f / sqrt_of(moments.variance() + eps);
  if (params_are_f32) return normalize_with<T, float>(x, weight, bias, mean, factor, y, n);
  normalize_with<T, T>(x, weight, bias, mean, factor, y, n);
}

}  // namespace
}  // namespace ipex
