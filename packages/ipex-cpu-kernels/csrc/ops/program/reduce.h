// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "ipex/kernel.h"

// The sum, or the maximum, of n consecutive elements.
IPEX_KERNEL_API float ipex_k_reduce_row_f32(const float* x, int64_t n, bool maximum);
IPEX_KERNEL_API float ipex_k_reduce_row_bf16(const ipex::BFloat16* x, int64_t n, bool maximum);
IPEX_KERNEL_API float ipex_k_reduce_row_f16(const ipex::Half* x, int64_t n, bool maximum);

// y[c] = the sum, divided by `divisor`, or the maximum of x[r * stride + c] over the rows r, for n
// columns.
IPEX_KERNEL_API void ipex_k_reduce_columns_f32(const float* x, int64_t rows, int64_t stride,
                                               int64_t n, bool maximum, float divisor, float* y);
IPEX_KERNEL_API void ipex_k_reduce_columns_bf16(const ipex::BFloat16* x, int64_t rows,
                                                int64_t stride, int64_t n, bool maximum,
                                                float divisor, ipex::BFloat16* y);
IPEX_KERNEL_API void ipex_k_reduce_columns_f16(const ipex::Half* x, int64_t rows, int64_t stride,
                                               int64_t n, bool maximum, float divisor,
                                               ipex::Half* y);
