// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "ipex/kernel.h"

namespace ipex {

enum class MaskKind : int32_t { kNone, kBool, kFloat, kSame };

// Distances in elements; the last dimension is contiguous. A distance of 0 broadcasts.
struct HeadStrides {
  int64_t batch, head, row;
};

struct AttentionArgs {
  const void* query;
  const void* key;
  const void* value;
  const void* mask;
  void* out;
  char* packed;  // the packed keys and values of the heads from packed_first on
  int64_t packed_first;
  HeadStrides query_strides, key_strides, value_strides, out_strides, mask_strides;
  int64_t mask_key_stride;  // 0 or 1
  int64_t batch, heads, kv_heads, queries, keys, size;
  float scale;
  MaskKind mask_kind;
  bool is_causal;
};

// Keys that are packed, scored and summed at a time. Scores of a block of queries then stay in L1
// or L2.
inline constexpr int64_t kKeyBlock = 256;
// Most queries of one task.
inline constexpr int64_t kQueryBlock = 32;

inline int64_t round_up(int64_t value, int64_t to) { return (value + to - 1) / to * to; }

// Elements of the packed keys and of the packed values of one head. Both are padded to whole
// panels, values also to whole AMX tiles along the keys.
inline int64_t packed_keys(int64_t keys, int64_t size) {
  return round_up(keys, 32) * round_up(size, 2);
}
inline int64_t packed_values(int64_t keys, int64_t size) {
  return round_up(size, 32) * round_up(keys, 32);
}

// Bytes of working memory of one task: scores, weights, accumulators.
inline int64_t attention_scratch_bytes(int64_t size) {
  return kQueryBlock * (kKeyBlock * 8 + round_up(size, 32) * 4) + kKeyBlock * 4 + 64;
}

}  // namespace ipex

// pack: keys and values of the key blocks [begin, end), counted through all batches and heads.
// run: query blocks [begin, end), counted likewise, `rows` queries each.
#define IPEX_DECLARE_ATTENTION(suffix)                                                          \
  IPEX_KERNEL_API void ipex_k_attention_pack_##suffix(const ipex::AttentionArgs* args,          \
                                                      int64_t begin, int64_t end);              \
  IPEX_KERNEL_API void ipex_k_attention_##suffix(const ipex::AttentionArgs* args, int64_t rows, \
                                                 int64_t begin, int64_t end, char* scratch)
IPEX_DECLARE_ATTENTION(f32);
IPEX_DECLARE_ATTENTION(bf16);
IPEX_DECLARE_ATTENTION(f16);
#undef IPEX_DECLARE_ATTENTION
