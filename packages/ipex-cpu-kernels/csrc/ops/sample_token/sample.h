// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "ipex/kernel.h"

namespace ipex {
inline constexpr int64_t kSampleBlock = 512;
}

// blocks:  for the blocks [begin, end) of kSampleBlock logits of a row of n: the largest logit and
//          the sum of exp((x - largest) * inverse_temperature), which is NaN if a logit is NaN or
//          +infinity.
// collect: the logits >= least, in order, and their indices; returns how many. `largest` has the
//          largest of each block: the others are not read.
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
