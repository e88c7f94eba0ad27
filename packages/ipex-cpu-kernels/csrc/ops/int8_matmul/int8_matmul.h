// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "ipex/kernel.h"

namespace ipex {

// y = dequantize(codes(a)) * dequantize(codes(b)) for one pair of matrices; strides in elements.
struct Int8MatmulArgs {
  const void* a;  // [m, k], consecutive along k
  const void* b;  // [k, n], consecutive along n, or along k if by_column
  void* y;        // [m, n], contiguous
  int64_t a_stride, b_stride;
  int64_t n, k;
  float a_scale, b_scale;
  int32_t a_zero, b_zero;  // uint8 codes
  bool by_column;
};

// Panels of b that are packed at a time.
inline constexpr int64_t kInt8MatmulPanels = 16;

// Bytes from one row of codes to the next: whole lines, an odd number of them.
inline int64_t int8_matmul_stride(int64_t k) { return ((k + 63) / 64 | 1) * 64; }

// Bytes of working memory for `rows` rows: their codes, a row of ones, a number for each row, and
// panels.
inline int64_t int8_matmul_scratch(int64_t rows, int64_t panels, int64_t k) {
  const int64_t packed = panels < kInt8MatmulPanels ? panels : kInt8MatmulPanels;
  return (rows + 1) * (int8_matmul_stride(k) + 4) + 64 + packed * 32 * ((k + 3) / 4 * 4);
}

}  // namespace ipex

// Rows [row_begin, row_end) of y. `scratch` is aligned to 64 bytes.
#define IPEX_DECLARE_INT8_MATMUL(suffix)            \
  IPEX_KERNEL_API void ipex_k_int8_matmul_##suffix( \
      const ipex::Int8MatmulArgs* args, int64_t row_begin, int64_t row_end, char* scratch)
IPEX_DECLARE_INT8_MATMUL(f32);
IPEX_DECLARE_INT8_MATMUL(bf16);
IPEX_DECLARE_INT8_MATMUL(f16);
#undef IPEX_DECLARE_INT8_MATMUL
