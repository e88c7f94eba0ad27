// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "ipex/kernel.h"

// y[i] = gelu(x[i]) for n contiguous elements; y may be x. tanh_form: the tanh approximation
// instead of the exact (erf) definition.
IPEX_KERNEL_API void ipex_k_gelu_f32(const float* x, float* y, int64_t n, bool tanh_form);
IPEX_KERNEL_API void ipex_k_gelu_bf16(const ipex::BFloat16* x, ipex::BFloat16* y, int64_t n,
                                      bool tanh_form);
IPEX_KERNEL_API void ipex_k_gelu_f16(const ipex::Half* x, ipex::Half* y, int64_t n, bool tanh_form);
