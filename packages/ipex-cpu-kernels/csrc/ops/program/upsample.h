// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "ipex/kernel.h"

namespace ipex {

// For each place of a dimension of the result, the two of x that it lies between, and how much of
// each it takes.
struct Between {
  const int32_t *low, *high;
  const float *of_low, *of_high;
};

// Bilinear interpolation of images.
struct UpsampleCall {
  int64_t channels, height, width;  // of x
  int64_t rows, columns;            // of the result
  Between down, right;
};

}  // namespace ipex

// The rows [begin, end) of the result. `channels`: channels side by side, rows numbered
// n * rows + row. `planes`: contiguous, rows numbered (n * channels + channel) * rows + row;
// `scratch` has room for width + columns numbers.
#define IPEX_DECLARE_UPSAMPLE(suffix, type)                                                     \
  IPEX_KERNEL_API void ipex_k_upsample_channels_##suffix(const ipex::UpsampleCall* call,        \
                                                         const type* x, type* y, int64_t begin, \
                                                         int64_t end, float* scratch);          \
  IPEX_KERNEL_API void ipex_k_upsample_planes_##suffix(const ipex::UpsampleCall* call,          \
                                                       const type* x, type* y, int64_t begin,   \
                                                       int64_t end, float* scratch)
IPEX_DECLARE_UPSAMPLE(f32, float);
IPEX_DECLARE_UPSAMPLE(bf16, ipex::BFloat16);
IPEX_DECLARE_UPSAMPLE(f16, ipex::Half);
#undef IPEX_DECLARE_UPSAMPLE
