// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "ipex/drop.h"
#include "ipex/kernel.h"

// sum = dropout(x) + residual, rounded to the type, and y = layer_norm(sum) for the rows
// [begin, end).
//   x, residual   [rows, cols], rows x_stride and residual_stride elements apart
//   weight, bias  [cols] in the type or float32
//   y, sum        [rows, cols], row-major
IPEX_KERNEL_API void ipex_k_dropout_add_layer_norm_f32(
    const float* x, int64_t x_stride, const float* residual, int64_t residual_stride,
    const void* weight, const void* bias, bool params_are_f32, float eps, const ipex::Drop* drop,
    float* y, float* sum, int64_t cols, int64_t begin, int64_t end);
IPEX_KERNEL_API void ipex_k_dropout_add_layer_norm_bf16(const ipex::BFloat16* x, int64_t x_stride,
                                                        const ipex::BFloat16* residual,
                                                        int64_t residual_stride, const void* weight,
                                                        const void* bias, bool params_are_f32,
                                                        float eps, const ipex::Drop* drop,
                                                        ipex::BFloat16* y, ipex::BFloat16* sum,
                                                        int64_t cols, int64_t begin, int64_t end);
IPEX_KERNEL_API void ipex_k_dropout_add_layer_norm_f16(
    const ipex::Half* x, int64_t x_stride, const ipex::Half* residual, int64_t residual_stride,
    const void* weight, const void* bias, bool params_are_f32, float eps, const ipex::Drop* drop,
    ipex::Half* y, ipex::Half* sum, int64_t cols, int64_t begin, int64_t end);

// The gradients for blocks [begin, end) of kRowsOfBlock rows each.
//   grad, sum  [rows, cols], rows grad_stride and sum_stride elements apart
//   dsum       gradient of the sum = gradient of the residual; row-major
//   dx         gradient of x; row-major
//   partial    [blocks, 3, cols]: sums over the rows of a block for the gradients of weight and
//   bias
//              and of dx; see column_sums.h
IPEX_KERNEL_API void ipex_k_dropout_add_layer_norm_backward_f32(
    const float* grad, int64_t grad_stride, const float* sum, int64_t sum_stride,
    const void* weight, bool weight_is_f32, float eps, const ipex::Drop* drop, float* dsum,
    float* dx, float* partial, int64_t rows, int64_t cols, int64_t begin, int64_t end);
IPEX_KERNEL_API void ipex_k_dropout_add_layer_norm_backward_bf16(
    const ipex::BFloat16* grad, int64_t grad_stride, const ipex::BFloat16* sum, int64_t sum_stride,
    const void* weight, bool weight_is_f32, float eps, const ipex::Drop* drop, ipex::BFloat16* dsum,
    ipex::BFloat16* dx, float* partial, int64_t rows, int64_t cols, int64_t begin, int64_t end);
IPEX_KERNEL_API void ipex_k_dropout_add_layer_norm_backward_f16(
    const ipex::Half* grad, int64_t grad_stride, const ipex::Half* sum, int64_t sum_stride,
    const void* weight, bool weight_is_f32, float eps, const ipex::Drop* drop, ipex::Half* dsum,
    ipex::Half* dx, float* partial, int64_t rows, int64_t cols, int64_t begin, int64_t end);
