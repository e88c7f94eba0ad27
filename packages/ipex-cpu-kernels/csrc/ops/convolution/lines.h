// SPDX-License-Identifier: Apache-2.0
// A convolution of bfloat16 with stride 1 on AMX tiles that read x itself. In lines with their
// padding, what a tap sees of neighboring pixels of y lies a pixel apart, and so do the ends of
// one line and the start of the next: all pixels of the lines are rows of the product, and those
// that y lacks are dropped. Instead of every tap, a pixel is copied once.
#pragma once

#include <cstring>

#include "convolution/padded.h"
#include "ipex/kernel/gemm_tiles.h"

#if IPEX_HAVE_AMX

namespace ipex {
namespace {

// Where the tiles get x from, see PlainRows.
class LineRows {
 public:
  // A panel of so many elements leaves room in L1: the lines that 32 rows see are few.
  static constexpr int64_t kDepth = 640;
  // The next taps see the same rows again.
  static constexpr bool kStreamed = false;

  // `offsets`: where a step finds its 32 channels, from the first tap of a row.
  LineRows(const BFloat16* first, int64_t channels, const int64_t* offsets)
      : first_(first), channels_(channels), offsets_(offsets) {}

  void start(int64_t d, int64_t) { step_ = d / 32; }
  IPEX_INLINE const BFloat16* at(int64_t block, int64_t step) const {
    return first_ + block * 32 * channels_ + offsets_[step_ + step];
  }
  IPEX_INLINE int64_t stride() const { return channels_; }
  Ahead ahead(int64_t, int64_t, int64_t) const { return {}; }

 private:
  const BFloat16* first_;
  int64_t channels_;
  const int64_t* offsets_;
  int64_t step_ = 0;
};

inline void find_steps(const ConvolutionArgs& args, int64_t* offsets) {
  for (int64_t y = 0; y < args.taps_y; ++y) {
    for (int64_t x = 0; x < args.taps_x; ++x) {
      const int64_t pixel = y * args.dilation_y * args.padded_width() + x * args.dilation_x;
      for (int64_t c = 0; c < args.channels; c += 32) *offsets++ = pixel * args.channels + c;
    }
  }
}

// Copies the padded lines [begin, end) of an image.
inline void copy_lines(const ConvolutionArgs& args, int64_t image, int64_t begin, int64_t end,
                       BFloat16* to) {
  const int64_t size = args.padded_width() * args.channels;
  for (int64_t line = begin; line < end; ++line, to += size) {
    const int64_t y = line - args.padding_y;
    if (y < 0 || y >= args.height)
      std::memset(to, 0, static_cast<size_t>(size) * sizeof(BFloat16));
    else
      copy_padded_line(args, image, y, to);
  }
}

// The rows [begin, end) of `block`, whose x, y and addend belong to the first image.
inline void convolve_lines(const ConvolutionArgs& args, int64_t begin, int64_t end,
                           GemmBlock<BFloat16> block, char* scratch, char* tiles) {
  const int64_t line = args.padded_width(), rows = args.out_height * line;
  const int64_t pixels = args.out_height * args.out_width;
  auto* const offsets = reinterpret_cast<int64_t*>(scratch);
  auto* const lines = reinterpret_cast<BFloat16*>(scratch + convolution_lines_offset(args));
  find_steps(args, offsets);
  block.line = line;
  block.kept = args.out_width;
  BFloat16* const y = block.y;
  const BFloat16* const addend = block.addend;
  while (begin < end) {
    const int64_t image = begin / rows, first = begin % rows;
    const int64_t count = end - begin < rows - first ? end - begin : rows - first;
    copy_lines(args, image, first / line,
               (first + count - 1) / line + (args.taps_y - 1) * args.dilation_y + 1, lines);
    tile_fence(lines);
    block.row = image * pixels;
    block.y = y + image * pixels * block.y_stride;
    if (addend) block.addend = addend + image * pixels * block.y_stride;
    block.first = first;
    block.rows = count;
    LineRows from(lines + first % line * args.channels, args.channels, offsets);
    gemm_block_tiles(block, from, reinterpret_cast<float*>(tiles + kTileScratchX));
    begin += count;
  }
}

}  // namespace
}  // namespace ipex

#endif  // IPEX_HAVE_AMX
