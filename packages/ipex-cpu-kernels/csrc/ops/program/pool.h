// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "ipex/kernel.h"

namespace ipex {

// Pooling of images; places of a window outside of the image count nowhere.
struct PoolCall {
  int64_t channels, height, width;  // of x
  int64_t rows, columns;            // of the result
  int64_t window[2], step[2], pad[2], spread[2];
  bool average;  // else the maximum
  // Of an average: 0 for the number of elements, with or without the padding.
  int64_t divisor;
  bool count_padding;
};

}  // namespace ipex

// The rows [begin, end) of the result, numbered n * rows + row: channels side by side.
IPEX_KERNEL_API void ipex_k_pool_channels_f32(const ipex::PoolCall* call, const float* x, float* y,
                                              int64_t begin, int64_t end);
IPEX_KERNEL_API void ipex_k_pool_channels_bf16(const ipex::PoolCall* call, const ipex::BFloat16* x,
                                               ipex::BFloat16* y, int64_t begin, int64_t end);
IPEX_KERNEL_API void ipex_k_pool_channels_f16(const ipex::PoolCall* call, const ipex::Half* x,
                                              ipex::Half* y, int64_t begin, int64_t end);
// The rows [begin, end) of the result, numbered (n * channels + channel) * rows + row: contiguous.
IPEX_KERNEL_API void ipex_k_pool_planes_f32(const ipex::PoolCall* call, const float* x, float* y,
                                            int64_t begin, int64_t end);
IPEX_KERNEL_API void ipex_k_pool_planes_bf16(const ipex::PoolCall* call, const ipex::BFloat16* x,
                                             ipex::BFloat16* y, int64_t begin, int64_t end);
IPEX_KERNEL_API void ipex_k_pool_planes_f16(const ipex::PoolCall* call, const ipex::Half* x,
                                            ipex::Half* y, int64_t begin, int64_t end);
