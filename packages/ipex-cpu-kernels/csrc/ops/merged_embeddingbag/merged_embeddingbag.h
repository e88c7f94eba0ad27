// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "ipex/kernel.h"

namespace ipex {

struct BagTable {
  const void* weight;  // rows of dim numbers
  int64_t stride;      // between them, in elements
  const void* indices;
  const void* offsets;
  const void* factors;  // of each lookup, in the dtype of the table; or nullptr
  int64_t lookups;      // number of indices
  const float* scales;  // of each row of an int8 table
};

struct BagArgs {
  const BagTable* tables;
  int64_t dim, bags;
  void* out;  // bag b of table t is at t * table_stride + b * bag_stride
  int64_t table_stride, bag_stride;
  bool wide;  // indices and offsets are int64, else int32
  bool mean;
  bool include_last;  // offsets have the end of the last bag
};

// One lookup, for the update of the tables.
struct Lookup {
  uint64_t row;
  uint32_t bag;
  float scale;
};

struct UpdateTable {
  void* weight;     // [rows][dim]
  uint16_t* trail;  // lower halves of the numbers of a bfloat16 table, or nullptr
  float* hessian;
  const void* grad;  // rows of dim numbers
  int64_t grad_stride;
  int64_t end;  // of the lookups of the table, counted through all tables
};

struct UpdateArgs {
  const UpdateTable* tables;
  const Lookup* lookups;  // sorted by table, then by row, stable within a row
  int64_t dim;
  float lr, weight_decay, eps;
};

}  // namespace ipex

// forward and int8: bags [begin, end) of a table, int8 with results in the type of the name. The
// others: the rows whose first lookup is in [begin, end).
#define IPEX_DECLARE_BAGS(suffix)                                                                \
  IPEX_KERNEL_API void ipex_k_merged_embeddingbag_##suffix(                                      \
      const ipex::BagArgs* args, int64_t table, int64_t begin, int64_t end);                     \
  IPEX_KERNEL_API void ipex_k_merged_embeddingbag_int8_##suffix(                                 \
      const ipex::BagArgs* args, int64_t table, int64_t begin, int64_t end);                     \
  IPEX_KERNEL_API void ipex_k_merged_embeddingbag_sgd_##suffix(const ipex::UpdateArgs* args,     \
                                                               int64_t begin, int64_t end);      \
  IPEX_KERNEL_API void ipex_k_merged_embeddingbag_adagrad_##suffix(const ipex::UpdateArgs* args, \
                                                                   int64_t begin, int64_t end)
IPEX_DECLARE_BAGS(f32);
IPEX_DECLARE_BAGS(bf16);
IPEX_DECLARE_BAGS(f16);
#undef IPEX_DECLARE_BAGS
