// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "ipex/epilogue_args.h"
#include "ipex/kernel.h"

namespace ipex {

struct ConvolutionArgs {
  const void* x;         // [images, height, width, channels], contiguous
  const void* weight;    // [n, taps_y * taps_x * channels] as panels of 32 columns, see packed.h
  void* y;               // [images * out_height * out_width, n], contiguous
  const void* residual;  // like y, or null
  int64_t height, width, channels;
  int64_t out_height, out_width, n;
  int64_t taps_y, taps_x, stride_y, stride_x, padding_y, padding_x, dilation_y, dilation_x;
  Epilogue epilogue;  // bias and activation only
  // The rows of the product are the pixels of padded lines (see lines.h), some of which y lacks.
  bool by_lines = false;

  int64_t k() const { return taps_y * taps_x * channels; }
  // The rows of the product are pixels of x as they lie there.
  bool in_place() const {
    return taps_y == 1 && taps_x == 1 && stride_y == 1 && stride_x == 1 && padding_y == 0 &&
           padding_x == 0;
  }
  // The pixels of a line of x with its padding.
  int64_t padded_width() const { return width + 2 * padding_x; }
};

// The distance of the copies of rows (pixels of y): not a multiple of 4 KiB, for lines that far
// apart share few places of L1.
inline int64_t convolution_stride(int64_t k) { return (k + 31) / 32 * 32 + 32; }

// Whether tiles can read lines: whole groups of 32 channels, neighbouring windows, and few pixels
// that y lacks.
inline bool convolution_has_lines(const ConvolutionArgs& args) {
  return !args.in_place() && args.stride_y == 1 && args.stride_x == 1 && args.channels % 32 == 0 &&
         args.padded_width() * 4 <= args.out_width * 5;
}

// Bytes of the places of the steps, and of the lines that `rows` rows see.
inline int64_t convolution_lines_offset(const ConvolutionArgs& args) {
  return (args.k() / 32 * static_cast<int64_t>(sizeof(int64_t)) + 63) / 64 * 64;
}
inline int64_t convolution_lines_bytes(const ConvolutionArgs& args, int64_t rows) {
  const int64_t below = (args.taps_y - 1) * args.dilation_y;
  const int64_t right = (args.taps_x - 1) * args.dilation_x;
  // Blocks of 32 rows may reach behind the last one.
  const int64_t pixels = rows + 32 + (below + 2) * args.padded_width() + right;
  return convolution_lines_offset(args) + pixels * args.channels * 2;
}

}  // namespace ipex

// Computes the rows [row_begin, row_end) of what the panels [panel_begin, panel_end) give, in lines
// images * out_height * padded_width() rows.
// `rows` has room for the copies: the rows, convolution_stride(k) elements each, or
// convolution_lines_bytes(), unless in_place(); `tiles` is the scratch of gemm_tiles.h, given where
// there are tiles and many rows.
#define IPEX_DECLARE_CONVOLUTION(suffix)                                                          \
  IPEX_KERNEL_API void ipex_k_convolution_##suffix(                                               \
      const ipex::ConvolutionArgs* args, int64_t row_begin, int64_t row_end, int64_t panel_begin, \
      int64_t panel_end, char* rows, char* tiles)
IPEX_DECLARE_CONVOLUTION(f32);
IPEX_DECLARE_CONVOLUTION(bf16);
IPEX_DECLARE_CONVOLUTION(f16);
#undef IPEX_DECLARE_CONVOLUTION
