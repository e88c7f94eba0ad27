// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "ipex/kernel.h"

// per_token: codes, scales and zero points of the rows [0, rows) of x, `stride` elements apart; the
// rows of q are consecutive.
// range: low and high end of n elements, 0 included; for symmetric codes {-max|x|, max|x|}.
// with: codes of n elements for one scale and zero point; values outside are saturated, NaN gets
// the code of 0, and with a scale that is not finite all elements do.
#define IPEX_DECLARE_QUANTIZE(suffix, T)                                                     \
  IPEX_KERNEL_API void ipex_k_quantize_per_token_##suffix(                                   \
      const T* x, int64_t stride, int64_t rows, int64_t columns, bool symmetric, uint8_t* q, \
      float* scale, int32_t* zero);                                                          \
  IPEX_KERNEL_API void ipex_k_quantize_range_##suffix(const T* x, int64_t n, bool symmetric, \
                                                      float* low_high);                      \
  IPEX_KERNEL_API void ipex_k_quantize_with_##suffix(const T* x, int64_t n, float scale,     \
                                                     int32_t zero, bool symmetric, uint8_t* q);
IPEX_DECLARE_QUANTIZE(f32, float)
IPEX_DECLARE_QUANTIZE(bf16, ipex::BFloat16)
IPEX_DECLARE_QUANTIZE(f16, ipex::Half)
#undef IPEX_DECLARE_QUANTIZE
