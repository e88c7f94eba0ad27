// SPDX-License-Identifier: Apache-2.0
// Decode attention with a latent cache that all heads share (multi-head latent attention).
#pragma once

#include "ipex/kernel.h"

namespace ipex {

struct MlaItem {
  int32_t sequence, head, heads;  // first head and how many
  int64_t first, last;            // keys
  int32_t part, parts;            // which part of how many: combined in this order
};

// Distances in elements.
struct MlaArgs {
  const void* query;  // [sequences, heads, width]
  const void* cache;  // rows of `width`; their first `rank` elements are the values
  void* out;          // [sequences, heads, rank]
  float* partial;     // results of items with several parts: [item][head][stride]
  const MlaItem* items;
  const int32_t* table;  // block numbers, or nullptr: sequence s is block s
  int64_t table_stride, block_size;
  int64_t block_stride, row_stride;
  int64_t query_sequence, query_head, out_sequence, out_head;
  int64_t width, rank;
  float scale;
};

// Heads of an item: the columns of the scores.
inline constexpr int64_t kMlaHeads = 64;
// Keys that are scored and summed at a time.
inline constexpr int64_t kMlaBlock = 128;
// Keys of a part.
inline constexpr int64_t kMlaSplit = 512;

inline int64_t mla_round_up(int64_t value, int64_t to) { return (value + to - 1) / to * to; }

inline int64_t mla_partial_stride(const MlaArgs& args) { return 16 + mla_round_up(args.rank, 32); }

// Bytes of working memory of one item; every element counts as a float.
inline int64_t mla_scratch_bytes(const MlaArgs& args) {
  const int64_t rank = mla_round_up(args.rank, 32), width = mla_round_up(args.width, 32);
  return 4 * (kMlaHeads * (width + rank) + 2 * kMlaBlock * kMlaHeads + kMlaBlock * (width + rank) +
              4 * kMlaHeads + rank) +
         1024;
}

}  // namespace ipex

// run: items [begin, end). combine: the items with the numbers first[begin .. end), whose part is
// 0.
#define IPEX_DECLARE_MLA(suffix)                                                            \
  IPEX_KERNEL_API void ipex_k_mla_decode_##suffix(const ipex::MlaArgs* args, int64_t begin, \
                                                  int64_t end, char* scratch);              \
  IPEX_KERNEL_API void ipex_k_mla_combine_##suffix(                                         \
      const ipex::MlaArgs* args, const int32_t* first, int64_t begin, int64_t end, char* scratch)
IPEX_DECLARE_MLA(f32);
IPEX_DECLARE_MLA(bf16);
IPEX_DECLARE_MLA(f16);
#undef IPEX_DECLARE_MLA
