// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "ipex/epilogue_args.h"
#include "ipex/kernel.h"

namespace ipex {

// The pixels of x that a block of y sees by minimal filtering (see winograd.h).
inline constexpr int64_t kWinogradPlaces = 16;

struct ConvolutionArgs {
  const void* x;         // [images, height, width, channels], contiguous
  const void* weight;    // [groups, n / groups, k()] as panels of 32 columns, see packed.h
  void* y;               // [images * out_height * out_width, n], contiguous
  const void* residual;  // like y, or null
  int64_t height, width, channels;
  int64_t out_height, out_width, n;
  int64_t taps_y, taps_x, stride_y, stride_x, padding_y, padding_x, dilation_y, dilation_x;
  int64_t groups = 1;  // of channels, and of the n columns
  Epilogue epilogue;   // bias and activation only
  // The rows of the product are the pixels of padded lines (see lines.h), some of which y lacks.
  bool by_lines = false;
  // Nothing is copied (see direct.h). Float always; bfloat16 with VDPBF16PS and without tiles.
  bool direct = false;
  // The weight was transformed, and the rows of the product are blocks of 2 x 2 pixels of y (see
  // winograd.h).
  bool winograd = false;

  // The channels that a column sees, the columns that see the same, and their panels.
  int64_t depth() const { return channels / groups; }
  int64_t columns() const { return n / groups; }
  int64_t panels() const { return (columns() + 31) / 32; }
  int64_t k() const { return (winograd ? kWinogradPlaces : taps_y * taps_x) * depth(); }
  // The rows of the product are pixels of x as they lie there.
  bool in_place() const {
    return taps_y == 1 && taps_x == 1 && stride_y == 1 && stride_x == 1 && padding_y == 0 &&
           padding_x == 0;
  }
  // The blocks of y, those at its edges included.
  int64_t blocks_down() const { return (out_height + 1) / 2; }
  int64_t blocks_across() const { return (out_width + 1) / 2; }
  // The pixels of a line of x with its padding.
  int64_t padded_width() const { return width + 2 * padding_x; }
};

// The distance of the copies of rows (pixels of y): not a multiple of 4 KiB, for lines that far
// apart share few places of L1.
inline int64_t convolution_stride(int64_t k) { return (k + 31) / 32 * 32 + 32; }

// Whether tiles can read lines: one group, whole blocks of 32 channels, neighboring windows, and
// few pixels that y lacks.
inline bool convolution_has_lines(const ConvolutionArgs& args) {
  return !args.in_place() && args.groups == 1 && args.stride_y == 1 && args.stride_x == 1 &&
         args.channels % 32 == 0 && args.padded_width() * 4 <= args.out_width * 5;
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

// ---- without copies (see direct.h)

// Bytes along K of a column that a tile multiplies at a time, so that what it reads of the weight
// stays in a cache while all rows pass.
inline constexpr int64_t kDirectPiece = 2048;

// Whether K is one such piece.
inline bool direct_whole(int64_t k, int64_t element_size) {
  return k * element_size <= kDirectPiece + kDirectPiece / 2;
}

// Whether all that a line of the window sees lies side by side; few channels are worth a copy of
// the lines with their padding.
inline bool direct_merged(const ConvolutionArgs& args) {
  return args.taps_x > 1 && args.groups == 1 && args.dilation_x == 1 &&
         (args.padding_x == 0 || args.channels < 32);
}
inline bool direct_copies(const ConvolutionArgs& args) {
  return direct_merged(args) && args.padding_x > 0;
}
inline int64_t direct_segments(const ConvolutionArgs& args) {
  return args.taps_y * (direct_merged(args) ? 1 : args.taps_x);
}

// Where the parts of the scratch begin that `rows` rows need: a segment of zeros for each group,
// sums of 64 columns, the table and the copied lines.
struct DirectScratch {
  DirectScratch(const ConvolutionArgs& args, int64_t rows, int64_t element_size) {
    const auto size = [](int64_t elements, int64_t each) {
      return (elements * each + 63) / 64 * 64;
    };
    const int64_t segments = direct_segments(args);
    c = size(args.k() / segments * args.groups, element_size);
    table = c + size(rows * 64, 4);
    lines = table + size(rows * segments, static_cast<int64_t>(sizeof(void*)));
    const int64_t steps = rows / args.out_width + 1;  // from the first line of y to the last
    const int64_t seen = steps * args.stride_y + (args.taps_y - 1) * args.dilation_y + 1;
    bytes =
        lines +
        (direct_copies(args) ? size(seen * args.padded_width() * args.channels, element_size) : 0);
  }
  int64_t c, table, lines, bytes;
};

// ---- by minimal filtering (see winograd.h)

// Whether there is a way: a window of 3 x 3 pixels side by side, at every pixel.
inline bool winograd_has(const ConvolutionArgs& args) {
  return args.taps_y == 3 && args.taps_x == 3 && args.stride_y == 1 && args.stride_x == 1 &&
         args.dilation_y == 1 && args.dilation_x == 1 && args.groups == 1;
}

// Where the parts of the scratch begin that `blocks` blocks need: a pixel of zeros, a table of
// rows, x transformed, the products of 64 columns, and what they are transformed back to.
struct WinogradScratch {
  WinogradScratch(const ConvolutionArgs& args, int64_t blocks)
      : stride((args.channels + 15) / 16 * 16 + 16) {
    constexpr int64_t kBytes = sizeof(float), kColumns = 64;
    table = stride * kBytes;
    x = table + (blocks * static_cast<int64_t>(sizeof(void*)) + 63) / 64 * 64;
    products = x + kWinogradPlaces * blocks * stride * kBytes;
    sums = products + kWinogradPlaces * blocks * kColumns * kBytes;
    bytes = sums + 4 * blocks * kColumns * kBytes;
  }
  int64_t stride;  // elements from a block's channels to the next one's
  int64_t table, x, products, sums, bytes;
};

}  // namespace ipex

// Computes the rows [row_begin, row_end) of what the panels [panel_begin, panel_end) give, in lines
// images * out_height * padded_width() rows. The panels of all groups are counted, group by group.
// `rows` has room for the copies: the rows, convolution_stride(k) elements each, or
// convolution_lines_bytes(), unless in_place(); a DirectScratch if direct. `tiles` is the
// scratch of gemm_tiles.h, given where there are tiles and many rows.
#define IPEX_DECLARE_CONVOLUTION(suffix)                                                          \
  IPEX_KERNEL_API void ipex_k_convolution_##suffix(                                               \
      const ipex::ConvolutionArgs* args, int64_t row_begin, int64_t row_end, int64_t panel_begin, \
      int64_t panel_end, char* rows, char* tiles)
IPEX_DECLARE_CONVOLUTION(f32);
IPEX_DECLARE_CONVOLUTION(bf16);
IPEX_DECLARE_CONVOLUTION(f16);
#undef IPEX_DECLARE_CONVOLUTION
