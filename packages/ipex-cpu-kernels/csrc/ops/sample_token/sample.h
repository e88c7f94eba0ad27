// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "ipex/kernel.h"

namespace ipex {
inline constexpr int64_t kSampleBlock = 512;
inline constexpr int kSampleBounds = 7;
// Kernels store whole vectors.
inline constexpr int64_t kSampleRoom = 16;
}  // namespace ipex

// blocks:  for the blocks [begin, end) of kSampleBlock logits of a row of n: the largest logit and
//          the sum of exp((x - largest) * inverse_temperature), which is NaN if a logit is NaN or
//          +infinity.
// collect: the logits >= least, in order, and their indices; returns how many. `largest` has the
//          largest of each block: the others are not read. There is room for kSampleRoom more.
#define IPEX_DECLARE_SAMPLE(suffix, T)                                                          \
  IPEX_KERNEL_API void ipex_k_sample_blocks_##suffix(const T* x, int64_t n,                     \
                                                     float inverse_temperature, float* largest, \
                                                     float* sums, int64_t begin, int64_t end);  \
  IPEX_KERNEL_API int64_t ipex_k_sample_collect_##suffix(                                       \
      const T* x, int64_t n, float least, const float* largest, float* values, int32_t* indices);
IPEX_DECLARE_SAMPLE(f32, float)
IPEX_DECLARE_SAMPLE(bf16, ipex::BFloat16)
IPEX_DECLARE_SAMPLE(f16, ipex::Half)
#undef IPEX_DECLARE_SAMPLE

// weights[i] = exp((values[i] - largest) * inverse_temperature), values[i] <= largest.
IPEX_KERNEL_API void ipex_k_sample_weights(const float* values, int64_t n, float largest,
                                           float inverse_temperature, float* weights);

// For each block of kSampleBlock values: the sum of the weights of those that are >= least.
IPEX_KERNEL_API void ipex_k_sample_sums(const float* values, const float* weights, int64_t n,
                                        float least, float* sums);

// For each bound: the sum of the weights of the values that are >= it.
IPEX_KERNEL_API void ipex_k_sample_above(const float* values, const float* weights, int64_t n,
                                         const float* bounds, double* above);

// The values in [low, high) and their weights, in order; returns how many. `kept_values` and
// `kept_weights` have room for kSampleRoom more than there are, and may be the inputs.
IPEX_KERNEL_API int64_t ipex_k_sample_between(const float* values, const float* weights, int64_t n,
                                              float low, float high, float* kept_values,
                                              float* kept_weights);
