// SPDX-License-Identifier: Apache-2.0
#include "softmax_dropout_backward.h"

#include "ipex/kernel/keep_mask.h"

namespace ipex {
namespace {

template <typename T, typename Mask>
__attribute__((noinline)) void run_row(const T* grad, const T* probs, float scale, const Mask& mask,
                                       T* dx, T* dropped, int64_t n) {
  Sum sum;
  for_pairs(
      n,
      [&](int64_t i, int k) IPEX_LAMBDA {
        const f32v2 q = mask.template pair<T>(load2(probs + i), i);
        const f32v2 g = load2(grad + i);
        store2(dropped + i, q);
        sum.add({q.a * g.a, q.b * g.b}, k);
      },
      [&](int64_t i, int64_t count) IPEX_LAMBDA {
        const f32v q = mask.one(load_n(probs + i, count), i);
        store_n(dropped + i, q, count);
        sum.part[0] = fma(q, load_n(grad + i, count), sum.part[0]);
      });
  const f32v total = set1(sum.total());
  const f32v factor = set1(scale);
  for_pairs(
      n,
      [&](int64_t i, int) IPEX_LAMBDA {
        const f32v2 g = mask.template pair<T>(load2(grad + i), i);
        const f32v2 p = load2(probs + i);
        store2(dx + i, {factor * p.a * (g.a - total), factor * p.b * (g.b - total)});
      },
      [&](int64_t i, int64_t count) IPEX_LAMBDA {
        const f32v g = mask.one(load_n(grad + i, count), i);
        store_n(dx + i, factor * load_n(probs + i, count) * (g - total), count);
      });
}

template <typename T>
IPEX_INLINE void run(const T* grad, int64_t grad_stride, const T* probs, int64_t probs_stride,
                     float scale, const Drop& drop, T* dx, T* dropped, int64_t cols, int64_t begin,
                     int64_t end) {
  KeepMask mask(drop.key, drop.threshold, drop.factor);
  for (int64_t r = begin; r < end; ++r) {
    const T* g = grad + r * grad_stride;
    const T* p = probs + r * probs_stride;
    if (drop.threshold != 0) {
      mask.set_row(r);
      run_row(g, p, scale, mask, dx + r * cols, dropped + r * cols, cols);
    } else {
      run_row(g, p, scale, KeepAll(), dx + r * cols, dropped + r * cols, cols);
    }
  }
}

}  // namespace
}  // namespace ipex

void ipex_k_softmax_dropout_backward_f32(const float* grad, int64_t grad_stride, const float* probs,
                                         int64_t probs_stride, float scale, const ipex::Drop* drop,
                                         float* dx, float* dropped, int64_t cols, int64_t begin,
                                         int64_t end) {
  ipex::run(grad, grad_stride, probs, probs_stride, scale, *drop, dx, dropped, cols, begin, end);
}
void ipex_k_softmax_dropout_backward_bf16(const ipex::BFloat16* grad, int64_t grad_stride,
                                          const ipex::BFloat16* probs, int64_t probs_stride,
                                          float scale, const ipex::Drop* drop, ipex::BFloat16* dx,
                                          ipex::BFloat16* dropped, int64_t cols, int64_t begin,
                                          int64_t end) {
  ipex::run(grad, grad_stride, probs, probs_stride, scale, *drop, dx, dropped, cols, begin, end);
}
void ipex_k_softmax_dropout_backward_f16(const ipex::Half* grad, int64_t grad_stride,
                                         const ipex::Half* probs, int64_t probs_stride, float scale,
                                         const ipex::Drop* drop, ipex::Half* dx,
                                         ipex::Half* dropped, int64_t cols, int64_t begin,
                                         int64_t end) {
  ipex::run(grad, grad_stride, probs, probs_stride, scale, *drop, dx, dropped, cols, begin, end);
}
