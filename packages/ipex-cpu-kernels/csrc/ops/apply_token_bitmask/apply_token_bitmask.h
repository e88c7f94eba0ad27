// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "ipex/kernel.h"

// Adds minus infinity to each of n elements whose bit is 0: bit i % 32 of bits[i / 32].
IPEX_KERNEL_API void ipex_k_apply_token_bitmask_f32(float* x, const int32_t* bits, int64_t n);
IPEX_KERNEL_API void ipex_k_apply_token_bitmask_bf16(ipex::BFloat16* x, const int32_t* bits,
                                                     int64_t n);
IPEX_KERNEL_API void ipex_k_apply_token_bitmask_f16(ipex::Half* x, const int32_t* bits, int64_t n);
