// SPDX-License-Identifier: Apache-2.0
#include "dropout.h"

#include "ipex/kernel/keep_mask.h"

namespace ipex {
namespace {

template <typename T>
IPEX_INLINE void run(const T* x, int64_t x_stride, const Drop& drop, T* y, int64_t cols,
                     int64_t begin, int64_t end) {
  KeepMask mask(drop.key, drop.threshold, drop.factor);
  for (int64_t r = begin; r < end; ++r) {
    const T* from = x + r * x_stride;
    T* to = y + r * cols;
    mask.set_row(r);
    for_pairs(
        cols,
        [&](int64_t i, int)
            IPEX_LAMBDA { store2(to + i, mask.template pair<T>(load2(from + i), i)); },
        [&](int64_t i, int64_t count)
            IPEX_LAMBDA { store_n(to + i, mask.one(load_n(from + i, count), i), count); });
  }
}

}  // namespace
}  // namespace ipex

void ipex_k_dropout_f32(const float* x, int64_t x_stride, const ipex::Drop* drop, float* y,
                        int64_t cols, int64_t begin, int64_t end) {
  ipex::run(x, x_stride, *drop, y, cols, begin, end);
}
void ipex_k_dropout_bf16(const ipex::BFloat16* x, int64_t x_stride, const ipex::Drop* drop,
                         ipex::BFloat16* y, int64_t cols, int64_t begin, int64_t end) {
  ipex::run(x, x_stride, *drop, y, cols, begin, end);
}
void ipex_k_dropout_f16(const ipex::Half* x, int64_t x_stride, const ipex::Drop* drop,
                        ipex::Half* y, int64_t cols, int64_t begin, int64_t end) {
  ipex::run(x, x_stride, *drop, y, cols, begin, end);
}
