// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "ipex/kernel.h"

namespace ipex {

// Columns that a call computes at most.
inline constexpr int64_t kFewRowsColumns = 1024;

// One product of a batch with few rows: y = alpha * (a b) + add.
struct FewRowsArgs {
  const void* a;    // [m, k], rows a_stride elements apart
  const void* b;    // [k, n], or [n, k] if by_column; its rows b_stride elements apart
  const void* add;  // [m, n], rows add_stride elements apart, or null
  void* y;          // [m, n], rows y_stride elements apart
  int64_t a_stride, b_stride, add_stride, y_stride;
  int64_t m, k;
  float alpha;
  bool by_column;
};

}  // namespace ipex

// Computes the columns [begin, end) of y, at most kFewRowsColumns.
#define IPEX_DECLARE_FEW_ROWS(suffix)                                                             \
  IPEX_KERNEL_API void ipex_k_bmm_few_rows_##suffix(const ipex::FewRowsArgs* args, int64_t begin, \
                                                    int64_t end)
IPEX_DECLARE_FEW_ROWS(f32);
IPEX_DECLARE_FEW_ROWS(bf16);
IPEX_DECLARE_FEW_ROWS(f16);
#undef IPEX_DECLARE_FEW_ROWS
