// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "ipex/kernel.h"

namespace ipex {

// Group normalization of [N, channels, places].
struct GroupNormCall {
  int64_t channels, groups, places;
  float eps;
  const float* weight;  // [channels] or nullptr: 1
  const float* bias;    // [channels] or nullptr: 0
};

}  // namespace ipex

// Places side by side: the groups [begin, end), numbered n * groups + group.
IPEX_KERNEL_API void ipex_k_group_norm_f32(const ipex::GroupNormCall* call, const float* x,
                                           float* y, int64_t begin, int64_t end);
IPEX_KERNEL_API void ipex_k_group_norm_bf16(const ipex::GroupNormCall* call,
                                            const ipex::BFloat16* x, ipex::BFloat16* y,
                                            int64_t begin, int64_t end);
IPEX_KERNEL_API void ipex_k_group_norm_f16(const ipex::GroupNormCall* call, const ipex::Half* x,
                                           ipex::Half* y, int64_t begin, int64_t end);

// Channels side by side: of `count` places, the sums of x - pivot of each channel, and of its
// squares, into sums[2][channels].
IPEX_KERNEL_API void ipex_k_group_norm_sums_f32(const float* x, const float* pivot, int64_t count,
                                                int64_t channels, float* sums);
IPEX_KERNEL_API void ipex_k_group_norm_sums_bf16(const ipex::BFloat16* x,
                                                 const ipex::BFloat16* pivot, int64_t count,
                                                 int64_t channels, float* sums);
IPEX_KERNEL_API void ipex_k_group_norm_sums_f16(const ipex::Half* x, const ipex::Half* pivot,
                                                int64_t count, int64_t channels, float* sums);

// Channels side by side: y = x * factors[0][channel] + factors[1][channel].
IPEX_KERNEL_API void ipex_k_group_norm_scale_f32(const float* x, const float* factors,
                                                 int64_t count, int64_t channels, float* y);
IPEX_KERNEL_API void ipex_k_group_norm_scale_bf16(const ipex::BFloat16* x, const float* factors,
                                                  int64_t count, int64_t channels,
                                                  ipex::BFloat16* y);
IPEX_KERNEL_API void ipex_k_group_norm_scale_f16(const ipex::Half* x, const float* factors,
                                                 int64_t count, int64_t channels, ipex::Half* y);
