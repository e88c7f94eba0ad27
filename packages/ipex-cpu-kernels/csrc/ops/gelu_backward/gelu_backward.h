// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "ipex/kernel.h"

// dx = grad * gelu'(x) for blocks [begin, end) of kRowsOfBlock rows each.
//   grad, x  [rows, cols], rows grad_stride and x_stride elements apart
//   dx       [rows, cols], row-major
//   partial  [blocks, cols]: sums of dx over the rows of a block; see column_sums.h
IPEX_KERNEL_API void ipex_k_gelu_backward_f32(const float* grad, int64_t grad_stride,
                                              const float* x, int64_t x_stride, bool tanh_form,
                                              float* dx, float* partial, int64_t rows, int64_t cols,
                                              int64_t begin, int64_t end);
IPEX_KERNEL_API void ipex_k_gelu_backward_bf16(const ipex::BFloat16* grad, int64_t grad_stride,
                                               const ipex::BFloat16* x, int64_t x_stride,
                                               bool tanh_form, ipex::BFloat16* dx, float* partial,
                                               int64_t rows, int64_t cols, int64_t begin,
                                               int64_t end);
IPEX_KERNEL_API void ipex_k_gelu_backward_f16(const ipex::Half* grad, int64_t grad_stride,
                                              const ipex::Half* x, int64_t x_stride, bool tanh_form,
                                              ipex::Half* dx, float* partial, int64_t rows,
                                              int64_t cols, int64_t begin, int64_t end);
