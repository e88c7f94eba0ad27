// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "ipex/kernel.h"

// y = softmax(x * scale + mask) over each of the rows [begin, end).
//   x     [rows, cols], rows x_stride elements apart
//   mask  null, or [dims..., cols] of the type of x, or of float if mask_is_f32; the last dimension
//   is
//         contiguous. The other `dims` dimensions (at most 8) have sizes[] and strides[] (elements;
//         0 broadcasts), and the product of the sizes is the number of rows
//   y     [rows, cols], row-major
// NaN and a row of -infinity give a row of NaN.
IPEX_KERNEL_API void ipex_k_softmax_f32(const float* x, int64_t x_stride, const void* mask,
                                        bool mask_is_f32, const int64_t* sizes,
                                        const int64_t* strides, int64_t dims, float scale, float* y,
                                        int64_t cols, int64_t begin, int64_t end);
IPEX_KERNEL_API void ipex_k_softmax_bf16(const ipex::BFloat16* x, int64_t x_stride,
                                         const void* mask, bool mask_is_f32, const int64_t* sizes,
                                         const int64_t* strides, int64_t dims, float scale,
                                         ipex::BFloat16* y, int64_t cols, int64_t begin,
                                         int64_t end);
IPEX_KERNEL_API void ipex_k_softmax_f16(const ipex::Half* x, int64_t x_stride, const void* mask,
                                        bool mask_is_f32, const int64_t* sizes,
                                        const int64_t* strides, int64_t dims, float scale,
                                        ipex::Half* y, int64_t cols, int64_t begin, int64_t end);
