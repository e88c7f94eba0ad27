// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "ipex/kernel.h"

// y = x * rsqrt(mean(x^2) + eps) * (weight + weight_offset) for the rows [begin, end).
//   x       [rows, cols], rows x_stride elements apart
//   weight  [cols] of the type of x, or of float if weight_is_f32; null ignores the offset, too
//   y       [rows, cols], row-major
IPEX_KERNEL_API void ipex_k_rms_norm_f32(const float* x, int64_t x_stride, const void* weight,
                                         bool weight_is_f32, float eps, float weight_offset,
                                         float* y, int64_t cols, int64_t begin, int64_t end);
IPEX_KERNEL_API void ipex_k_rms_norm_bf16(const ipex::BFloat16* x, int64_t x_stride,
                                          const void* weight, bool weight_is_f32, float eps,
                                          float weight_offset, ipex::BFloat16* y, int64_t cols,
                                          int64_t begin, int64_t end);
IPEX_KERNEL_API void ipex_k_rms_norm_f16(const ipex::Half* x, int64_t x_stride, const void* weight,
                                         bool weight_is_f32, float eps, float weight_offset,
                                         ipex::Half* y, int64_t cols, int64_t begin, int64_t end);
