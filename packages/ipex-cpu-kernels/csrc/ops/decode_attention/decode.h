// SPDX-License-Identifier: Apache-2.0
// Attention of a few queries per sequence over cached keys and values: arguments of the one kernel
// behind all decode ops.
#pragma once

#include "ipex/kv_view.h"

namespace ipex {

enum class DecodeMask : int32_t { kNone, kBool, kFloat, kSame };

// Distances in elements; the last dimension is contiguous. A distance of 0 broadcasts.
struct DecodeStrides {
  int64_t sequence, head, row;
};

// A part of the keys of some heads of one unit. Units are what shares keys: a sequence, or the
// beams of a prompt.
struct DecodeItem {
  int32_t unit, head;   // head: first key-value head
  int64_t first, last;  // keys
  int32_t part, parts;  // which part of how many: their results are combined in this order
};

struct DecodeArgs {
  const void* query;
  void* out;
  const void* mask;
  const float* alibi;  // slope of each query head, or nullptr
  const void* near;  // [sequences, heads, near_keys]: added to scores of the last keys, or nullptr
  const float* sinks;  // logit of each query head that joins the denominator, or nullptr
  float* partial;      // results of items with several parts: [item][row][2 + padded size]
  const DecodeItem* items;
  const int64_t* lengths;  // keys of each sequence, with keys of the queries
  KvView kv;
  DecodeStrides query_strides, out_strides, mask_strides;
  int64_t mask_key_stride;  // 0 or 1
  int64_t beams;            // sequences of a unit
  int64_t heads, kv_heads, item_heads, queries, size;
  int64_t near_keys;
  int64_t window;  // keys that a query sees, itself included; 0: all
  float scale, softcap;
  DecodeMask mask_kind;
  bool sees_all;  // queries see each other's keys, later ones too
};

// Keys that are scored and summed at a time: their rows stay in L1 for all queries that share them.
inline constexpr int64_t kDecodeBlock = 64;

inline int64_t decode_round_up(int64_t value, int64_t to) { return (value + to - 1) / to * to; }

// Rows are padded to whole pairs of the widest vectors.
inline int64_t decode_padded(int64_t size) { return decode_round_up(size, 64); }

inline int64_t decode_head_rows(const DecodeArgs& args) {
  return args.beams * (args.heads / args.kv_heads) * args.queries;
}

// Floats of the result of one row of a part: its maximum, its sum and its weighted values.
inline int64_t decode_partial_stride(const DecodeArgs& args) {
  return 16 + decode_padded(args.size);
}

// Bytes of working memory of one item.
inline int64_t decode_scratch_bytes(const DecodeArgs& args) {
  const int64_t head_rows = decode_head_rows(args), rows = head_rows * args.item_heads;
  const int64_t padded = decode_padded(args.size);
  return rows * (padded * 8 + 40) + head_rows * (kDecodeBlock * 8 + 24) +
         kDecodeBlock * (padded * 8 + 32) + padded * 4 + 2048;
}

}  // namespace ipex

// run: items [begin, end). combine: units of heads [begin, end), counted through the items whose
// part is 0; `first` holds the number of each of these items.
#define IPEX_DECLARE_DECODE(suffix)                                                        \
  IPEX_KERNEL_API void ipex_k_decode_attention_##suffix(                                   \
      const ipex::DecodeArgs* args, int64_t begin, int64_t end, char* scratch);            \
  IPEX_KERNEL_API void ipex_k_decode_combine_##suffix(const ipex::DecodeArgs* args,        \
                                                      const int32_t* first, int64_t begin, \
                                                      int64_t end, char* scratch)
IPEX_DECLARE_DECODE(f32);
IPEX_DECLARE_DECODE(bf16);
IPEX_DECLARE_DECODE(f16);
#undef IPEX_DECLARE_DECODE
