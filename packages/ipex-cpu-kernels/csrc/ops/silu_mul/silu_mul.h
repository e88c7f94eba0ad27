// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "ipex/kernel.h"

// y[i] = silu(gate[i]) * up[i] for n contiguous elements; y may be gate or up.
IPEX_KERNEL_API void ipex_k_silu_mul_f32(const float* gate, const float* up, float* y, int64_t n);
IPEX_KERNEL_API void ipex_k_silu_mul_bf16(const ipex::BFloat16* gate, const ipex::BFloat16* up,
                                          ipex::BFloat16* y, int64_t n);
IPEX_KERNEL_API void ipex_k_silu_mul_f16(const ipex::Half* gate, const ipex::Half* up,
                                         ipex::Half* y, int64_t n);
