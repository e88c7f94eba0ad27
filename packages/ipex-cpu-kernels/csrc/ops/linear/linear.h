// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "ipex/epilogue_args.h"
#include "ipex/kernel.h"

namespace ipex {

struct LinearArgs {
  const void* x;       // [rows, k], rows x_stride elements apart
  const void* weight;  // panels of 32 columns, see packed.h
  void* y;             // [rows, n], rows y_stride elements apart
  int64_t x_stride, y_stride;
  int64_t n, k;  // n columns of y; if gated the weight has two panels for 32 of them
  Epilogue epilogue;
};

}  // namespace ipex

// Computes the rows [row_begin, row_end) of what the panels [panel_begin, panel_end) give.
// `scratch`: see run_gemm.
#define IPEX_DECLARE_LINEAR(suffix)                                                            \
  IPEX_KERNEL_API void ipex_k_linear_##suffix(const ipex::LinearArgs* args, int64_t row_begin, \
                                              int64_t row_end, int64_t panel_begin,            \
                                              int64_t panel_end, char* scratch)
IPEX_DECLARE_LINEAR(f32);
IPEX_DECLARE_LINEAR(bf16);
IPEX_DECLARE_LINEAR(f16);
#undef IPEX_DECLARE_LINEAR
