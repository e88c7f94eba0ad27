// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "ipex/kernel.h"

// y[i] = gelu(gate[i]) * up[i] for n contiguous elements; y may be gate or up. tanh_form: the tanh
// approximation instead of the exact (erf) definition.
IPEX_KERNEL_API void ipex_k_gelu_mul_f32(const float* gate, const float* up, float* y, int64_t n,
                                         bool tanh_form);
IPEX_KERNEL_API void ipex_k_gelu_mul_bf16(const ipex::BFloat16* gate, const ipex::BFloat16* up,
                                          ipex::BFloat16* y, int64_t n, bool tanh_form);
IPEX_KERNEL_API void ipex_k_gelu_mul_f16(const ipex::Half* gate, const ipex::Half* up,
                                         ipex::Half* y, int64_t n, bool tanh_form);
