// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "ipex/kernel.h"

// out[c] = sum over the blocks of partial[block * stride + c], which a kernel of the type that the
// first argument names (it is not read) has filled; see column_sums.h.
IPEX_KERNEL_API void ipex_k_column_sums_f32(const float*, const float* partial, int64_t blocks,
                                            int64_t stride, float* out, int64_t cols);
IPEX_KERNEL_API void ipex_k_column_sums_bf16(const ipex::BFloat16*, const float* partial,
                                             int64_t blocks, int64_t stride, float* out,
                                             int64_t cols);
IPEX_KERNEL_API void ipex_k_column_sums_f16(const ipex::Half*, const float* partial, int64_t blocks,
                                            int64_t stride, float* out, int64_t cols);
