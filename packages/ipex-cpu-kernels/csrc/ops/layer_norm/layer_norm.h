// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "ipex/kernel.h"

// y = (x - mean) * rsqrt(variance + eps) * weight + bias for the rows [begin, end); the variance is
// the biased one, taken around the mean.
//   x             [rows, cols], rows x_stride elements apart
//   weight, bias  [cols] of the type of x, or of float if params_are_f32; each may be null
//   y             [rows, cols], row-major
IPEX_KERNEL_API void ipex_k_layer_norm_f32(const float* x, int64_t x_stride, const void* weight,
                                           const void* bias, bool params_are_f32, float eps,
                                           float* y, int64_t cols, int64_t begin, int64_t end);
IPEX_KERNEL_API void ipex_k_layer_norm_bf16(const ipex::BFloat16* x, int64_t x_stride,
                                            const void* weight, const void* bias,
                                            bool params_are_f32, float eps, ipex::BFloat16* y,
                                            int64_t cols, int64_t begin, int64_t end);
IPEX_KERNEL_API void ipex_k_layer_norm_f16(const ipex::Half* x, int64_t x_stride,
                                           const void* weight, const void* bias,
                                           bool params_are_f32, float eps, ipex::Half* y,
                                           int64_t cols, int64_t begin, int64_t end);
