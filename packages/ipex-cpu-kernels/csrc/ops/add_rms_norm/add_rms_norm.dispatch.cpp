// SPDX-License-Identifier: Apache-2.0
#include "add_rms_norm.h"

#include "../rms_norm/rms_norm_row.h"

namespace ipex {
namespace {

template <typename T>
IPEX_INLINE void run(const T* x, int64_t x_stride, const T* residual, int64_t residual_stride,
                     const void* weight, bool weight_is_f32, float eps, float weight_offset, T* y,
                     T* sum, int64_t cols, int64_t begin, int64_t end) {
  for (int64_t r = begin; r < end; ++r) {
    T* s = sum + r * cols;
    const float squares = add_and_square(x + r * x_stride, residual + r * residual_stride, s, cols);
    finish_rms_norm(s, squares, weight, weight_is_f32, eps, weight_offset, y + r * cols, cols);
  }
}

}  // namespace
}  // namespace ipex

void ipex_k_add_rms_norm_f32(const float* x, int64_t x_stride, const float* residual,
                             int64_t residual_stride, const void* weight, bool weight_is_f32,
                             float eps, float weight_offset, float* y, float* sum, int64_t cols,
                             int64_t begin, int64_t end) {
  ipex::run(x, x_stride, residual, residual_stride, weight, weight_is_f32, eps, weight_offset, y,
            sum, cols, begin, end);
}

void ipex_k_add_rms_norm_bf16(const ipex::BFloat16* x, int64_t x_stride,
                              const ipex::BFloat16* residual, int64_t residual_stride,
                              const void* weight, bool weight_is_f32, float eps,
                              float weight_offset, ipex::BFloat16* y, ipex::BFloat16* sum,
                              int64_t cols, int64_t begin, int64_t end) {
  ipex::run(x, x_stride, residual, residual_stride, weight, weight_is_f32, eps, weight_offset, y,
            sum, cols, begin, end);
}

void ipex_k_add_rms_norm_f16(const ipex::Half* x, int64_t x_stride, const ipex::Half* residual,
                             int64_t residual_stride, const void* weight, bool weight_is_f32,
                             float eps, float weight_offset, ipex::Half* y, ipex::Half* sum,
                             int64_t cols, int64_t begin, int64_t end) {
  ipex::run(x, x_stride, residual, residual_stride, weight, weight_is_f32, eps, weight_offset, y,
            sum, cols, begin, end);
}
