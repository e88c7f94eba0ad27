// SPDX-License-Identifier: Apache-2.0
#include "gelu_backward.h"

#include "ipex/kernel/column_blocks.h"
#include "ipex/kernel/column_sums.h"
#include "ipex/kernel/vec_math.h"

namespace ipex {
namespace {

// Phi(x) + x phi(x), with the normal distribution Phi and its density phi.
template <bool kFast>
IPEX_INLINE f32v slope_of_gelu(f32v x) {
  constexpr float kDensity = 0.398942280f;  // 1 / sqrt(2 pi)
  if constexpr (kFast) {
    const f32v density = set1(kDensity) * exp2_fast(x * x * set1(-0.5f * kLog2E));
    return fma(x, density, normal_cdf_fast(x));
  }
  const f32v density = set1(kDensity) * exp_nonpositive(x * x * set1(-0.5f));
  return fma(x, density, normal_cdf(x));
}

// s + x s (1 - s) t' with s = sigmoid(t) and t = 2 sqrt(2 / pi) (x + 0.044715 x^3).
template <bool kFast>
IPEX_INLINE f32v slope_of_gelu_tanh(f32v x) {
  const f32v u = x * x;
  const f32v t = x * fma(u, set1(kGeluTanhCubic), set1(kGeluTanh));
  f32v s;
  if constexpr (kFast) {
    s = sigmoid_fast(t);
  } else {
    s = sigmoid(t);
  }
  const f32v slope = fma(u, set1(3.0f * kGeluTanhCubic), set1(kGeluTanh));
  return fma(x * slope, s * (set1(1.0f) - s), s);
}

template <typename T, bool kTanh>
IPEX_INLINE f32v times_slope(f32v g, f32v x) {
  constexpr bool kFast = kReducedPrecision<T>;
  if constexpr (kTanh) return g * slope_of_gelu_tanh<kFast>(x);
  return g * slope_of_gelu<kFast>(x);
}

template <typename T, bool kTanh>
__attribute__((noinline)) void run_row(const T* grad, const T* x, T* dx, float* sums, int64_t n) {
  for_pairs(
      n,
      [&](int64_t i, int) IPEX_LAMBDA {
        const f32v2 g = load2(grad + i);
        const f32v2 v = load2(x + i);
        const f32v2 d = {times_slope<T, kTanh>(g.a, v.a), times_slope<T, kTanh>(g.b, v.b)};
        store2(dx + i, d);
        add_pair(sums, i, d);
      },
      [&](int64_t i, int64_t count) IPEX_LAMBDA {
        const f32v d = times_slope<T, kTanh>(load_n(grad + i, count), load_n(x + i, count));
        store_n(dx + i, d, count);
        add_some(sums, i, d, count);
      });
}

template <typename T>
IPEX_INLINE void run(const T* grad, int64_t grad_stride, const T* x, int64_t x_stride,
                     bool tanh_form, T* dx, float* partial, int64_t rows, int64_t cols,
                     int64_t begin, int64_t end) {
  for (int64_t block = begin; block < end; ++block) {
    float* sums = partial + block * cols;
    for (int64_t i = 0; i < cols; ++i) sums[i] = 0.0f;
    const int64_t first = block * kRowsOfBlock;
    const int64_t last = first + kRowsOfBlock < rows ? first + kRowsOfBlock : rows;
    for (int64_t r = first; r < last; ++r) {
      const auto row = tanh_form ? run_row<T, true> : run_row<T, false>;
      row(grad + r * grad_stride, x + r * x_stride, dx + r * cols, sums, cols);
    }
  }
}

}  // namespace
}  // namespace ipex

void ipex_k_gelu_backward_f32(const float* grad, int64_t grad_stride, const float* x,
                              int64_t x_stride, bool tanh_form, float* dx, float* partial,
                              int64_t rows, int64_t cols, int64_t begin, int64_t end) {
  ipex::run(grad, grad_stride, x, x_stride, tanh_form, dx, partial, rows, cols, begin, end);
}
void ipex_k_gelu_backward_bf16(const ipex::BFloat16* grad, int64_t grad_stride,
                               const ipex::BFloat16* x, int64_t x_stride, bool tanh_form,
                               ipex::BFloat16* dx, float* partial, int64_t rows, int64_t cols,
                               int64_t begin, int64_t end) {
  ipex::run(grad, grad_stride, x, x_stride, tanh_form, dx, partial, rows, cols, begin, end);
}
void ipex_k_gelu_backward_f16(const ipex::Half* grad, int64_t grad_stride, const ipex::Half* x,
                              int64_t x_stride, bool tanh_form, ipex::Half* dx, float* partial,
                              int64_t rows, int64_t cols, int64_t begin, int64_t end) {
  ipex::run(grad, grad_stride, x, x_stride, tanh_form, dx, partial, rows, cols, begin, end);
}
