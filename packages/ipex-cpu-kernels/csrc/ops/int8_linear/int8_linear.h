// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "ipex/epilogue_args.h"
#include "ipex/kernel.h"

namespace ipex {

// The product of row r and column j is
//   x_scale[r] * weight_scale[j] * (sum over k of x[r][k] * w[j][k] - x_zero[r] * sums[j])
// and then follows the epilogue.
struct Int8LinearArgs {
  const uint8_t* x;  // [rows, k], rows x_stride apart
  const float* x_scale;
  const int32_t* x_zero;
  const int8_t* weight;  // panels of 32 columns, see int8_panels.h
  const int32_t* sums;   // of the columns of the weight
  const float* weight_scale;
  void* y;  // [rows, n], contiguous
  int64_t x_stride;
  int64_t x_step;       // from one x_scale and x_zero to the next row, 0 or 1
  int64_t weight_step;  // from one weight_scale to the next, 0 or 1
  int64_t n, k;         // n columns of y, k padded to 4
  int64_t weight_rows;  // columns of the product; if gated two panels for 32 columns of y
  Epilogue epilogue;
  float y_scale;  // of int8 and uint8 results
  int32_t y_zero;
  bool y_signed;
};

}  // namespace ipex

// Computes the rows [row_begin, row_end) of what the panels [panel_begin, panel_end) give. `codes`
// gives int8 or uint8 and reads the operands of the epilogue as float.
#define IPEX_DECLARE_INT8_LINEAR(suffix)                                               \
  IPEX_KERNEL_API void ipex_k_int8_linear_##suffix(const ipex::Int8LinearArgs* args,   \
                                                   int64_t row_begin, int64_t row_end, \
                                                   int64_t panel_begin, int64_t panel_end)
IPEX_DECLARE_INT8_LINEAR(f32);
IPEX_DECLARE_INT8_LINEAR(bf16);
IPEX_DECLARE_INT8_LINEAR(f16);
IPEX_DECLARE_INT8_LINEAR(codes);
#undef IPEX_DECLARE_INT8_LINEAR

// Activations as the kernels above read them: uint8 rows q_stride apart, 0 behind the columns.
// Symmetric codes get 128 added, which `zero` tells. `copy`: codes that exist already, int8 ones if
// is_signed.
#define IPEX_DECLARE_INT8_ROWS(suffix, T)                                                    \
  IPEX_KERNEL_API void ipex_k_int8_linear_rows_##suffix(                                     \
      const T* x, int64_t stride, int64_t rows, int64_t columns, bool symmetric, uint8_t* q, \
      int64_t q_stride, float* scale, int32_t* zero);                                        \
  IPEX_KERNEL_API void ipex_k_int8_linear_static_rows_##suffix(                              \
      const T* x, int64_t stride, int64_t rows, int64_t columns, float scale, int32_t zero,  \
      bool symmetric, uint8_t* q, int64_t q_stride);
IPEX_DECLARE_INT8_ROWS(f32, float)
IPEX_DECLARE_INT8_ROWS(bf16, ipex::BFloat16)
IPEX_DECLARE_INT8_ROWS(f16, ipex::Half)
#undef IPEX_DECLARE_INT8_ROWS
IPEX_KERNEL_API void ipex_k_int8_linear_copy_rows(const uint8_t* x, int64_t stride, int64_t rows,
                                                  int64_t columns, bool is_signed, uint8_t* q,
                                                  int64_t q_stride);
