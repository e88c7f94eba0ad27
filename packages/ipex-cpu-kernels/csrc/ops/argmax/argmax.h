// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "ipex/kernel.h"

// Index of the first NaN of n > 0 elements or, without one, of the first of the largest, which is
// stored in `largest`.
IPEX_KERNEL_API int64_t ipex_k_argmax_f32(const float* x, int64_t n, float* largest);
IPEX_KERNEL_API int64_t ipex_k_argmax_bf16(const ipex::BFloat16* x, int64_t n, float* largest);
IPEX_KERNEL_API int64_t ipex_k_argmax_f16(const ipex::Half* x, int64_t n, float* largest);
