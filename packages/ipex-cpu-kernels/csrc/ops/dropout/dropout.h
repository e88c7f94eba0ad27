// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "ipex/drop.h"
#include "ipex/kernel.h"

// y = dropout(x) for the rows [begin, end).
//   x  [rows, cols], rows x_stride elements apart
//   y  [rows, cols], row-major
IPEX_KERNEL_API void ipex_k_dropout_f32(const float* x, int64_t x_stride, const ipex::Drop* drop,
                                        float* y, int64_t cols, int64_t begin, int64_t end);
IPEX_KERNEL_API void ipex_k_dropout_bf16(const ipex::BFloat16* x, int64_t x_stride,
                                         const ipex::Drop* drop, ipex::BFloat16* y, int64_t cols,
                                         int64_t begin, int64_t end);
IPEX_KERNEL_API void ipex_k_dropout_f16(const ipex::Half* x, int64_t x_stride,
                                        const ipex::Drop* drop, ipex::Half* y, int64_t cols,
                                        int64_t begin, int64_t end);
