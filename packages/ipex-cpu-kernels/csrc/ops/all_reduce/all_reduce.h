// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "ipex/kernel.h"

// y[i] = sources[0][i] + sources[1][i] + ... for n elements, added in float in this order and
// rounded once. y is not one of the sources.
IPEX_KERNEL_API void ipex_k_sum_sources_f32(const float* const* sources, int64_t count, float* y,
                                            int64_t n);
IPEX_KERNEL_API void ipex_k_sum_sources_bf16(const ipex::BFloat16* const* sources, int64_t count,
                                             ipex::BFloat16* y, int64_t n);
IPEX_KERNEL_API void ipex_k_sum_sources_f16(const ipex::Half* const* sources, int64_t count,
                                            ipex::Half* y, int64_t n);
