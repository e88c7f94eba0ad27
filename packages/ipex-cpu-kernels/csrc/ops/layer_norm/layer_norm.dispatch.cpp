// SPDX-License-Identifier: Apache-2.0
#include "layer_norm.h"

#include "layer_norm_row.h"

namespace ipex {
namespace {

template <typename T>
IPEX_INLINE void run(const T* x, int64_t x_stride, const void* weight, const void* bias,
                     bool params_are_f32, float eps, T* y, int64_t cols, int64_t begin,
                     int64_t end) {
  for (int64_t r = begin; r < end; ++r) {
    const T* row = x + r * x_stride;
    Moments moments = measure(row, cols);
    finish_layer_norm(row, moments, weight, bias, params_are_f32, eps, y + r * cols, cols);
  }
}

}  // namespace
}  // namespace ipex

void ipex_k_layer_norm_f32(const float* x, int64_t x_stride, const void* weight, const void* bias,
                           bool params_are_f32, float eps, float* y, int64_t cols, int64_t begin,
                           int64_t end) {
  ipex::run(x, x_stride, weight, bias, params_are_f32, eps, y, cols, begin, end);
}

void ipex_k_layer_norm_bf16(const ipex::BFloat16* x, int64_t x_stride, const void* weight,
                            const void* bias, bool params_are_f32, float eps, ipex::BFloat16* y,
                            int64_t cols, int64_t begin, int64_t end) {
  ipex::run(x, x_stride, weight, bias, params_are_f32, eps, y, cols, begin, end);
}

void ipex_k_layer_norm_f16(const ipex::Half* x, int64_t x_stride, const void* weight,
                           const void* bias, bool params_are_f32, float eps, ipex::Half* y,
                           int64_t cols, int64_t begin, int64_t end) {
  ipex::run(x, x_stride, weight, bias, params_are_f32, eps, y, cols, begin, end);
}
