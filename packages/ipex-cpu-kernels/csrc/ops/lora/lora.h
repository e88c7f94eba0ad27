// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "ipex/kernel.h"

namespace ipex {

// Rows that one adapter is applied to: `count` numbers of LoraArgs::rows from `first` on.
struct LoraGroup {
  int64_t adapter, first, count;
};

// out[row] = scale * weights[adapter] input[row], or that added to out[row].
struct LoraArgs {
  const void* input;    // rows of `inputs` numbers, consecutive
  const void* weights;  // per adapter `outputs` rows of `inputs` numbers, consecutive
  void* out;            // rows of `outputs` numbers, consecutive
  int64_t input_row, adapter, weight_row, out_row;  // distances in elements
  bool input_is_f32, out_is_f32;                    // otherwise in the dtype of the weights
  int64_t inputs, outputs;
  const LoraGroup* groups;
  const int64_t* rows;
  float scale;
  bool add;
};

// Largest groups, and outputs of one task: of shrink, where sums are long and outputs few, and of
// expand, where it is the other way round.
inline constexpr int64_t kShrinkRows = 4;
inline constexpr int64_t kShrinkOutputs = 4;
inline constexpr int64_t kExpandRows = 32;
inline constexpr int64_t kExpandOutputs = 256;

// Bytes of working memory of one task of expand.
inline int64_t lora_expand_scratch_bytes(int64_t inputs) {
  return static_cast<int64_t>(sizeof(float)) * inputs * (kExpandRows + 16);
}

}  // namespace ipex

// Tasks [begin, end): a block of outputs of a group each, the blocks of a group one after the
// other.
#define IPEX_DECLARE_LORA(suffix)                                                             \
  IPEX_KERNEL_API void ipex_k_lora_shrink_##suffix(const ipex::LoraArgs* args, int64_t begin, \
                                                   int64_t end);                              \
  IPEX_KERNEL_API void ipex_k_lora_expand_##suffix(const ipex::LoraArgs* args, int64_t begin, \
                                                   int64_t end, char* scratch)
IPEX_DECLARE_LORA(f32);
IPEX_DECLARE_LORA(bf16);
IPEX_DECLARE_LORA(f16);
#undef IPEX_DECLARE_LORA
