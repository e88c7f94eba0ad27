// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "ipex/epilogue_args.h"
#include "ipex/kernel.h"

namespace ipex {

// A convolution of each channel alone, of images whose channels lie side by side.
struct DepthwiseCall {
  int64_t channels, height, width;  // of x
  int64_t rows, columns;            // of the result
  int64_t window[2], step[2], pad[2], spread[2];
  Epilogue epilogue;  // bias and activation only
};

}  // namespace ipex

// The rows [begin, end) of the result, numbered n * rows + row. `weight`: [window][channels].
#define IPEX_DECLARE_DEPTHWISE(suffix, type)                                                     \
  IPEX_KERNEL_API void ipex_k_depthwise_##suffix(const ipex::DepthwiseCall* call, const type* x, \
                                                 const type* weight, type* y, int64_t begin,     \
                                                 int64_t end)
IPEX_DECLARE_DEPTHWISE(f32, float);
IPEX_DECLARE_DEPTHWISE(bf16, ipex::BFloat16);
IPEX_DECLARE_DEPTHWISE(f16, ipex::Half);
#undef IPEX_DECLARE_DEPTHWISE
