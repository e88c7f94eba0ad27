// SPDX-License-Identifier: Apache-2.0
// Kernels of woq_linear with activations rounded to 8 bits, for weights of order vnni.
//
// K is cut into chunks: the groups of the weight, or, where it has one group, the blocks whose
// activations share a scale. For a chunk, with integer weights v = code - zero and activation codes
// a with scale s and zero point z,
//   sum over k of s (a - z) v = s (sum of a code - zero sum of a - z sum of v)
// and the sums over a and over v are not part of the inner loop.
#pragma once

#include "ipex/epilogue_args.h"
#include "ipex/kernel.h"
#include "woq_linear/woq_format.h"

namespace ipex {

struct WoqInt8Args {
  const char* packed;  // the whole tensor
  PackedHeader header;
  WoqLayout at;
  const void* x;  // [rows, k] in packed order of K, rows x_stride elements apart
  void* y;        // [rows, n], contiguous
  int64_t x_stride;
  int64_t n, k;  // columns of y; of x
  Epilogue epilogue;

  int64_t chunk, chunks;  // elements of K in a chunk; their number
  bool stored_sums;       // the packed tensor has the sums of v for each chunk
  bool symmetric;
  bool by_chunk;      // each chunk of activations has its own scale
  const float* ends;  // range that all rows share, [chunks or 1][2]; null: each row has its own
  bool few;           // for the kernel for few rows: codes are int8, that is 128 less
  uint8_t* codes;     // [rows][codes_stride], 0 behind K
  int64_t codes_stride;
  float* scales;   // [rows][chunks]; NaN where a number is not finite
  int32_t* zeros;  // [rows][chunks]
  int32_t* sums;   // [rows][chunks], of the codes
};

// Rows up to which weights are decoded as they are read.
inline constexpr int64_t kWoqInt8FewRows = 31;

// Elements of K, and chunks, of which the weights are laid out as panels at a time.
inline constexpr int64_t kWoqInt8Depth = 4096;
inline constexpr int64_t kWoqInt8Chunks = 64;

// Bytes of scratch for each thread of the kernel for many rows, for up to `rows` rows: panels, int
// and float sums, scales, zero points and sums of the chunks.
inline int64_t woq_int8_scratch(int64_t rows) {
  return 2 * kPackedPanel * (kWoqInt8Depth + rows * 8 + kWoqInt8Chunks * 12);
}

}  // namespace ipex

// range: smallest and largest activation, 0 included, of each row and each chunk (by_chunk) or the
// whole of it: ends[rows][chunks or 1][2].
// prepare: fills in codes, scales, zeros and sums of the rows.
// few: all columns of the panels, at most kWoqInt8FewRows rows; needs stored sums or symmetric
// codes.
// many: any rows; scratch as woq_int8_scratch says.
#define IPEX_DECLARE_WOQ_INT8(suffix)                                                              \
  IPEX_KERNEL_API void ipex_k_woq_int8_range_##suffix(                                             \
      const ipex::WoqInt8Args* args, int64_t row_begin, int64_t row_end, float* ends);             \
  IPEX_KERNEL_API void ipex_k_woq_int8_prepare_##suffix(const ipex::WoqInt8Args* args,             \
                                                        int64_t row_begin, int64_t row_end);       \
  IPEX_KERNEL_API void ipex_k_woq_int8_few_##suffix(const ipex::WoqInt8Args* args, int64_t rows,   \
                                                    int64_t panel_begin, int64_t panel_end);       \
  IPEX_KERNEL_API void ipex_k_woq_int8_many_##suffix(const ipex::WoqInt8Args* args, char* scratch, \
                                                     int64_t row_begin, int64_t row_end,           \
                                                     int64_t panel_begin, int64_t panel_end)
IPEX_DECLARE_WOQ_INT8(f32);
IPEX_DECLARE_WOQ_INT8(bf16);
IPEX_DECLARE_WOQ_INT8(f16);
#undef IPEX_DECLARE_WOQ_INT8
