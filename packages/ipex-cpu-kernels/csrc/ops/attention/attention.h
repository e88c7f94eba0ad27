// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "ipex/kernel.h"
#include "ipex/kv_view.h"

namespace ipex {

enum class MaskKind : int32_t { kNone, kBool, kFloat, kSame };

// Distances in elements; the last dimension is contiguous. A distance of 0 broadcasts.
struct HeadStrides {
  int64_t head, row;
};

// One sequence. Pointers are at its first row and at head 0.
struct AttentionSequence {
  const void* query;
  void* out;
  const void* mask;
  const float* alibi;  // a slope per head of the query, or nullptr
  const void* near;    // [queries, heads, near_keys]: added to scores of the last keys, or nullptr
  int64_t queries, keys;
  int64_t kv, kv_first;  // which sequence of the cache, and the position of the first key in it
  int64_t shift;         // the query i stands at the key i + shift
  int64_t begin, end;    // the keys that any query sees; begin is a multiple of kKeyBlock
};

struct AttentionArgs {
  const AttentionSequence* sequences;
  const float* sinks;  // a score per head of the query that takes part in the sum only, or nullptr
  KvView kv;
  HeadStrides query_strides, out_strides, mask_strides;
  int64_t mask_key_stride;  // 0 or 1
  int64_t heads, kv_heads, size;
  int64_t left, right;  // keys seen on both sides of the place of a query
  int64_t near_keys;
  float scale, out_scale;
  float softcap;  // 0: none
  MaskKind mask_kind;
};

// Keys and values of one head to pack: [first, first + kKeyBlock) of a sequence.
struct AttentionPack {
  int32_t sequence, kv_head;
  int64_t first;
  int64_t packed;  // where the packed head begins, in bytes
};

// A block of queries: `queries` of each of `heads` heads that share their keys and values.
struct AttentionItem {
  int32_t sequence, head, heads, queries;
  int64_t query;
  int64_t packed;  // where the packed keys and values of the head begin, in bytes
};

// Keys that are packed, scored and summed at a time. Scores of a block of queries then stay in L1
// or L2.
inline constexpr int64_t kKeyBlock = 256;
// Most rows of one item at any level.
inline constexpr int64_t kMostRows = 64;
// Distances of two rows of scores and of weights: no power of two, so that rows use all sets of a
// cache.
inline constexpr int64_t kScoreStride = kKeyBlock + 16, kWeightStride = kKeyBlock + 32;

inline int64_t round_up(int64_t value, int64_t to) { return (value + to - 1) / to * to; }

// Elements of the packed keys and of the packed values of one head. Both are padded to whole panels
// and to whole AMX tiles along what they are summed over.
inline int64_t packed_keys(int64_t keys, int64_t size) {
  return round_up(keys, 32) * round_up(size, 32);
}
inline int64_t packed_values(int64_t keys, int64_t size) { return packed_keys(keys, size); }

// Working memory of one item: scores, weights, accumulators, queries, a row of the mask.
inline int64_t attention_scratch_bytes(int64_t size) {
  return 4 * (kMostRows * (kScoreStride + kWeightStride + 2 * round_up(size, 32) + 32) + kKeyBlock);
}

struct KeyRange {
  int64_t begin, end;
};

// The keys that the queries [first, last] see, of which there are `keys`.
inline KeyRange visible(const AttentionArgs& args, int64_t keys, int64_t shift, int64_t first,
                        int64_t last) {
  const int64_t begin = first + shift - args.left, end = last + shift + args.right + 1;
  return {begin > 0 ? begin : 0, end < keys ? end : keys};
}

// A window without a limit: larger than any distance, small enough to add.
inline constexpr int64_t kUnlimited = int64_t{1} << 40;

}  // namespace ipex

// rows: how many rows an item should have. `packed` is the memory that the items' offsets count in.
#define IPEX_DECLARE_ATTENTION(suffix)                                                            \
  IPEX_KERNEL_API int64_t ipex_k_attention_rows_##suffix();                                       \
  IPEX_KERNEL_API void ipex_k_attention_pack_##suffix(const ipex::AttentionArgs* args,            \
                                                      const ipex::AttentionPack* items,           \
                                                      int64_t count, char* packed);               \
  IPEX_KERNEL_API void ipex_k_attention_##suffix(const ipex::AttentionArgs* args,                 \
                                                 const ipex::AttentionItem* items, int64_t count, \
                                                 char* packed, char* scratch)
IPEX_DECLARE_ATTENTION(f32);
IPEX_DECLARE_ATTENTION(bf16);
IPEX_DECLARE_ATTENTION(f16);
#undef IPEX_DECLARE_ATTENTION
