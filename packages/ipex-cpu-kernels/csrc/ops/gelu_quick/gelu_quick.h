// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "ipex/kernel.h"

// y = x * sigmoid(1.702 x)
IPEX_KERNEL_API void ipex_k_gelu_quick_f32(const float* x, float* y, int64_t n);
IPEX_KERNEL_API void ipex_k_gelu_quick_bf16(const ipex::BFloat16* x, ipex::BFloat16* y, int64_t n);
IPEX_KERNEL_API void ipex_k_gelu_quick_f16(const ipex::Half* x, ipex::Half* y, int64_t n);
