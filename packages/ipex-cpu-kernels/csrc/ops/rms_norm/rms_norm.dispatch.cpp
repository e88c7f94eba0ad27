// SPDX-License-Identifier: Apache-2.0
#include "rms_norm.h"

#include "rms_norm_row.h"

namespace ipex {
namespace {

template <typename T>
IPEX_INLINE void run(const T* x, int64_t x_stride, const void* weight, bool weight_is_f32,
                     float eps, float weight_offset, T* y, int64_t cols, int64_t begin,
                     int64_t end) {
  for (int64_t r = begin; r < end; ++r) {
    const T* row = x + r * x_stride;
    finish_rms_norm(row, sum_of_squares(row, cols), weight, weight_is_f32, eps, weight_offset,
                    y + r * cols, cols);
  }
}

}  // namespace
}  // namespace ipex

void ipex_k_rms_norm_f32(const float* x, int64_t x_stride, const void* weight, bool weight_is_f32,
                         float eps, float weight_offset, float* y, int64_t cols, int64_t begin,
                         int64_t end) {
  ipex::run(x, x_stride, weight, weight_is_f32, eps, weight_offset, y, cols, begin, end);
}

void ipex_k_rms_norm_bf16(const ipex::BFloat16* x, int64_t x_stride, const void* weight,
                          bool weight_is_f32, float eps, float weight_offset, ipex::BFloat16* y,
                          int64_t cols, int64_t begin, int64_t end) {
  ipex::run(x, x_stride, weight, weight_is_f32, eps, weight_offset, y, cols, begin, end);
}

void ipex_k_rms_norm_f16(const ipex::Half* x, int64_t x_stride, const void* weight,
                         bool weight_is_f32, float eps, float weight_offset, ipex::Half* y,
                         int64_t cols, int64_t begin, int64_t end) {
  ipex::run(x, x_stride, weight, weight_is_f32, eps, weight_offset, y, cols, begin, end);
}
