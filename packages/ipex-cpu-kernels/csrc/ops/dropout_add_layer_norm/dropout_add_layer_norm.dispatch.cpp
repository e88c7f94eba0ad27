// SPDX-License-Identifier: Apache-2.0
#include "dropout_add_layer_norm.h"

#include "../layer_norm/layer_norm_row.h"
#include "ipex/kernel/column_blocks.h"
#include "ipex/kernel/column_sums.h"
#include "ipex/kernel/keep_mask.h"

namespace ipex {
namespace {

template <typename T, typename Mask>
IPEX_INLINE void add_row(const T* x, const T* residual, const Mask& mask, T* sum, int64_t n) {
  for_pairs(
      n,
      [&](int64_t i, int) IPEX_LAMBDA {
        const f32v2 a = mask.template pair<T>(load2(x + i), i);
        const f32v2 b = load2(residual + i);
        store2(sum + i, {a.a + b.a, a.b + b.b});
      },
      [&](int64_t i, int64_t count) IPEX_LAMBDA {
        const f32v a = mask.one(load_n(x + i, count), i);
        store_n(sum + i, a + load_n(residual + i, count), count);
      });
}

template <typename T>
IPEX_INLINE void forward(const T* x, int64_t x_stride, const T* residual, int64_t residual_stride,
                         const void* weight, const void* bias, bool params_are_f32, float eps,
                         const Drop& drop, T* y, T* sum, int64_t cols, int64_t begin, int64_t end) {
  KeepMask mask(drop.key, drop.threshold, drop.factor);
  for (int64_t r = begin; r < end; ++r) {
    T* s = sum + r * cols;
    if (drop.threshold != 0) {
      mask.set_row(r);
      add_row(x + r * x_stride, residual + r * residual_stride, mask, s, cols);
    } else {
      add_row(x + r * x_stride, residual + r * residual_stride, KeepAll(), s, cols);
    }
    Moments moments = measure(s, cols);
    finish_layer_norm(s, moments, weight, bias, params_are_f32, eps, y + r * cols, cols);
  }
}

template <typename T, typename W, typename Mask>
__attribute__((noinline)) void backward_row(const T* grad, const T* sum, const W* weight, float eps,
                                            const Mask& mask, T* dsum, T* dx, float* partial,
                                            int64_t n) {
  Moments moments = measure(sum, n);
  moments.finish();
  const f32v mean = set1(moments.mean());
  const f32v factor = set1(1.0f / sqrt_of(moments.variance() + eps));
  Sum of_grads, of_products;
  for_pairs(
      n,
      [&](int64_t i, int k) IPEX_LAMBDA {
        const f32v2 g = load2(grad + i), s = load2(sum + i), w = load2_as<T>(weight + i);
        const f32v2 a = {g.a * w.a, g.b * w.b};
        of_grads.add(a, k);
        of_products.add({a.a * (s.a - mean), a.b * (s.b - mean)}, k);
      },
      [&](int64_t i, int64_t count) IPEX_LAMBDA {
        const f32v a = load_n(grad + i, count) * load_n(weight + i, count);
        of_grads.part[0] = of_grads.part[0] + a;
        // The lanes behind the end of a have 0, or NaN if the mean is infinite.
        const f32v p = keep_n(a * (load_n(sum + i, count) - mean), count, zero());
        of_products.part[0] = of_products.part[0] + p;
      });
  const float size = static_cast<float>(n);
  const f32v m1 = set1(of_grads.total() / size);
  const f32v m2 = set1(of_products.total() / size) * factor;
  float* dweight = partial;
  float* dbias = partial + n;
  float* dcolumns = partial + 2 * n;
  for_pairs(
      n,
      [&](int64_t i, int) IPEX_LAMBDA {
        const f32v2 g = load2(grad + i), s = load2(sum + i), w = load2_as<T>(weight + i);
        const f32v2 h = {(s.a - mean) * factor, (s.b - mean) * factor};
        const f32v2 d = {factor * (fnma(h.a, m2, g.a * w.a) - m1),
                         factor * (fnma(h.b, m2, g.b * w.b) - m1)};
        const f32v2 kept = mask.template pair<T>(d, i);
        store2(dsum + i, d);
        store2(dx + i, kept);
        add_pair(dweight, i, {g.a * h.a, g.b * h.b});
        add_pair(dbias, i, g);
        add_pair(dcolumns, i, kept);
      },
      [&](int64_t i, int64_t count) IPEX_LAMBDA {
        const f32v g = load_n(grad + i, count);
        const f32v h = (load_n(sum + i, count) - mean) * factor;
        const f32v d = factor * (fnma(h, m2, g * load_n(weight + i, count)) - m1);
        const f32v kept = mask.one(d, i);
        store_n(dsum + i, d, count);
        store_n(dx + i, kept, count);
        add_some(dweight, i, g * h, count);
        add_some(dbias, i, g, count);
        add_some(dcolumns, i, kept, count);
      });
}

template <typename T, typename W>
IPEX_INLINE void backward_as(const T* grad, int64_t grad_stride, const T* sum, int64_t sum_stride,
                             const W* weight, float eps, const Drop& drop, T* dsum, T* dx,
                             float* partial, int64_t rows, int64_t cols, int64_t begin,
                             int64_t end) {
  KeepMask mask(drop.key, drop.threshold, drop.factor);
  for (int64_t block = begin; block < end; ++block) {
    float* sums = partial + block * 3 * cols;
    for (int64_t i = 0; i < 3 * cols; ++i) sums[i] = 0.0f;
    const int64_t first = block * kRowsOfBlock;
    const int64_t last = first + kRowsOfBlock < rows ? first + kRowsOfBlock : rows;
    for (int64_t r = first; r < last; ++r) {
      const T* g = grad + r * grad_stride;
      const T* s = sum + r * sum_stride;
      if (drop.threshold != 0) {
        mask.set_row(r);
        backward_row(g, s, weight, eps, mask, dsum + r * cols, dx + r * cols, sums, cols);
      } else {
        backward_row(g, s, weight, eps, KeepAll(), dsum + r * cols, dx + r * cols, sums, cols);
      }
    }
  }
}

template <typename T>
IPEX_INLINE void backward(const T* grad, int64_t grad_stride, const T* sum, int64_t sum_stride,
                          const void* weight, bool weight_is_f32, float eps, const Drop& drop,
                          T* dsum, T* dx, float* partial, int64_t rows, int64_t cols, int64_t begin,
                          int64_t end) {
  if (weight_is_f32) {
    backward_as(grad, grad_stride, sum, sum_stride, static_cast<const float*>(weight), eps, drop,
                dsum, dx, partial, rows, cols, begin, end);
  } else {
    backward_as(grad, grad_stride, sum, sum_stride, static_cast<const T*>(weight), eps, drop, dsum,
                dx, partial, rows, cols, begin, end);
  }
}

}  // namespace
}  // namespace ipex

void ipex_k_dropout_add_layer_norm_f32(const float* x, int64_t x_stride, const float* residual,
                                       int64_t residual_stride, const void* weight,
                                       const void* bias, bool params_are_f32, float eps,
                                       const ipex::Drop* drop, float* y, float* sum, int64_t cols,
                                       int64_t begin, int64_t end) {
  ipex::forward(x, x_stride, residual, residual_stride, weight, bias, params_are_f32, eps, *drop, y,
                sum, cols, begin, end);
}
void ipex_k_dropout_add_layer_norm_bf16(const ipex::BFloat16* x, int64_t x_stride,
                                        const ipex::BFloat16* residual, int64_t residual_stride,
                                        const void* weight, const void* bias, bool params_are_f32,
                                        float eps, const ipex::Drop* drop, ipex::BFloat16* y,
                                        ipex::BFloat16* sum, int64_t cols, int64_t begin,
                                        int64_t end) {
  ipex::forward(x, x_stride, residual, residual_stride, weight, bias, params_are_f32, eps, *drop, y,
                sum, cols, begin, end);
}
void ipex_k_dropout_add_layer_norm_f16(const ipex::Half* x, int64_t x_stride,
                                       const ipex::Half* residual, int64_t residual_stride,
                                       const void* weight, const void* bias, bool params_are_f32,
                                       float eps, const ipex::Drop* drop, ipex::Half* y,
                                       ipex::Half* sum, int64_t cols, int64_t begin, int64_t end) {
  ipex::forward(x, x_stride, residual, residual_stride, weight, bias, params_are_f32, eps, *drop, y,
                sum, cols, begin, end);
}
void ipex_k_dropout_add_layer_norm_backward_f32(const float* grad, int64_t grad_stride,
                                                const float* sum, int64_t sum_stride,
                                                const void* weight, bool weight_is_f32, float eps,
                                                const ipex::Drop* drop, float* dsum, float* dx,
                                                float* partial, int64_t rows, int64_t cols,
                                                int64_t begin, int64_t end) {
  ipex::backward(grad, grad_stride, sum, sum_stride, weight, weight_is_f32, eps, *drop, dsum, dx,
                 partial, rows, cols, begin, end);
}
void ipex_k_dropout_add_layer_norm_backward_bf16(const ipex::BFloat16* grad, int64_t grad_stride,
                                                 const ipex::BFloat16* sum, int64_t sum_stride,
                                                 const void* weight, bool weight_is_f32, float eps,
                                                 const ipex::Drop* drop, ipex::BFloat16* dsum,
                                                 ipex::BFloat16* dx, float* partial, int64_t rows,
                                                 int64_t cols, int64_t begin, int64_t end) {
  ipex::backward(grad, grad_stride, sum, sum_stride, weight, weight_is_f32, eps, *drop, dsum, dx,
                 partial, rows, cols, begin, end);
}
void ipex_k_dropout_add_layer_norm_backward_f16(const ipex::Half* grad, int64_t grad_stride,
                                                const ipex::Half* sum, int64_t sum_stride,
                                                const void* weight, bool weight_is_f32, float eps,
                                                const ipex::Drop* drop, ipex::Half* dsum,
                                                ipex::Half* dx, float* partial, int64_t rows,
                                                int64_t cols, int64_t begin, int64_t end) {
  ipex::backward(grad, grad_stride, sum, sum_stride, weight, weight_is_f32, eps, *drop, dsum, dx,
                 partial, rows, cols, begin, end);
}
