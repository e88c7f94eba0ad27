// SPDX-License-Identifier: Apache-2.0
#include "add_layer_norm.h"

#include "../layer_norm/layer_norm_row.h"

namespace ipex {
namespace {

// Writes sum = x + residual and returns the moments of the rounded values.
template <typename T>
IPEX_INLINE Moments add_rows(const T* x, const T* residual, T* sum, int64_t n) {
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

template <typename T>
IPEX_INLINE void run(const T* x, int64_t x_stride, const T* residual, int64_t residual_stride,
                     const void* weight, const void* bias, bool params_are_f32, float eps, T* y,
                     T* sum, int64_t cols, int64_t begin, int64_t end) {
  for (int64_t r = begin; r < end; ++r) {
    T* s = sum + r * cols;
    Moments moments = add_rows(x + r * x_stride, residual + r * residual_stride, s, cols);
    finish_layer_norm(s, moments, weight, bias, params_are_f32, eps, y + r * cols, cols);
  }
}

}  // namespace
}  // namespace ipex

void ipex_k_add_layer_norm_f32(const float* x, int64_t x_stride, const float* residual,
                               int64_t residual_stride, const void* weight, const void* bias,
                               bool params_are_f32, float eps, float* y, float* sum, int64_t cols,
                               int64_t begin, int64_t end) {
  ipex::run(x, x_stride, residual, residual_stride, weight, bias, params_are_f32, eps, y, sum, cols,
            begin, end);
}

void ipex_k_add_layer_norm_bf16(const ipex::BFloat16* x, int64_t x_stride,
                                const ipex::BFloat16* residual, int64_t residual_stride,
                                const void* weight, const void* bias, bool params_are_f32,
                                float eps, ipex::BFloat16* y, ipex::BFloat16* sum, int64_t cols,
                                int64_t begin, int64_t end) {
  ipex::run(x, x_stride, residual, residual_stride, weight, bias, params_are_f32, eps, y, sum, cols,
            begin, end);
}

void ipex_k_add_layer_norm_f16(const ipex::Half* x, int64_t x_stride, const ipex::Half* residual,
                               int64_t residual_stride, const void* weight, const void* bias,
                               bool params_are_f32, float eps, ipex::Half* y, ipex::Half* sum,
                               int64_t cols, int64_t begin, int64_t end) {
  ipex::run(x, x_stride, residual, residual_stride, weight, bias, params_are_f32, eps, y, sum, cols,
            begin, end);
}
