// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "ipex/kernel.h"

// sum = x + residual, rounded to the type, and y = layer_norm(sum) for the rows [begin, end).
//   x, residual   [rows, cols], rows x_stride and residual_stride elements apart
//   weight, bias  as in layer_norm.h
//   y, sum        [rows, cols], row-major
IPEX_KERNEL_API void ipex_k_add_layer_norm_f32(const float* x, int64_t x_stride,
                                               const float* residual, int64_t residual_stride,
                                               const void* weight, const void* bias,
                                               bool params_are_f32, float eps, float* y, float* sum,
                                               int64_t cols, int64_t begin, int64_t end);
IPEX_KERNEL_API void ipex_k_add_layer_norm_bf16(const ipex::BFloat16* x, int64_t x_stride,
                                                const ipex::BFloat16* residual,
                                                int64_t residual_stride, const void* weight,
                                                const void* bias, bool params_are_f32, float eps,
                                                ipex::BFloat16* y, ipex::BFloat16* sum,
                                                int64_t cols, int64_t begin, int64_t end);
IPEX_KERNEL_API void ipex_k_add_layer_norm_f16(const ipex::Half* x, int64_t x_stride,
                                               const ipex::Half* residual, int64_t residual_stride,
                                               const void* weight, const void* bias,
                                               bool params_are_f32, float eps, ipex::Half* y,
                                               ipex::Half* sum, int64_t cols, int64_t begin,
                                               int64_t end);
