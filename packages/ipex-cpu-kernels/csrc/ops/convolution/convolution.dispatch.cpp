// SPDX-License-Identifier: Apache-2.0
// A convolution as a product of matrices: the pixels under the taps of the window, copied into one
// row for each pixel of the result, times the packed weight; or without copies, see direct.h.
#include "convolution/convolution.h"

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "convolution/direct.h"
#include "convolution/lines.h"
#include "convolution/winograd.h"
#include "ipex/kernel/gemm_block.h"

namespace ipex {
namespace {

// Copies what the taps of one line of the window see of a group, `line` the first of its pixels in
// x and `column` the place of the first tap; taps beside the image see zeros.
template <class T>
void gather_line(const ConvolutionArgs& args, const T* line, int64_t column, T* to) {
  const int64_t channels = args.depth();
  const auto bytes = [&](int64_t pixels) {
    return static_cast<size_t>(pixels * channels) * sizeof(T);
  };
  // Neighboring taps see neighboring pixels, and all of their channels.
  if (args.dilation_x == 1 && args.groups == 1) {
    const int64_t left = std::clamp<int64_t>(-column, 0, args.taps_x);
    const int64_t end = std::clamp<int64_t>(args.width - column, left, args.taps_x);
    std::memset(to, 0, bytes(left));
    std::memcpy(to + left * channels, line + (column + left) * channels, bytes(end - left));
    std::memset(to + end * channels, 0, bytes(args.taps_x - end));
    return;
  }
  for (int64_t tap = 0; tap < args.taps_x; ++tap, column += args.dilation_x, to += channels) {
    if (column < 0 || column >= args.width)
      std::memset(to, 0, bytes(1));
    else
      std::memcpy(to, line + column * args.channels, bytes(1));
  }
}

// The rows [begin, end) of the left-hand side of a group, `stride` elements apart.
template <class T>
void gather(const ConvolutionArgs& args, int64_t group, int64_t begin, int64_t end, T* to,
            int64_t stride) {
  const T* const x = static_cast<const T*>(args.x) + group * args.depth();
  const int64_t size = args.taps_x * args.depth(), pixels = args.out_height * args.out_width;
  for (int64_t row = begin; row < end; ++row, to += stride) {
    const int64_t image = row / pixels, pixel = row % pixels;
    const int64_t column = pixel % args.out_width * args.stride_x - args.padding_x;
    int64_t line = pixel / args.out_width * args.stride_y - args.padding_y;
    T* part = to;
    for (int64_t tap = 0; tap < args.taps_y; ++tap, line += args.dilation_y, part += size) {
      if (line < 0 || line >= args.height) {
        std::memset(part, 0, static_cast<size_t>(size) * sizeof(T));
        continue;
      }
      const int64_t first = (image * args.height + line) * args.width * args.channels;
      gather_line(args, x + first, column, part);
    }
  }
}

// The rows [begin, end) of `block`, whose y and addend belong to row 0.
template <class T>
void convolve_copies(const ConvolutionArgs& args, int64_t group, int64_t begin, int64_t end,
                     GemmBlock<T> block, T* copies, char* tiles) {
  place_rows(block, begin, end - begin);
  if (args.in_place()) {
    block.x_stride = args.channels;
    block.x = static_cast<const T*>(args.x) + group * args.depth() + begin * block.x_stride;
  } else {
    block.x_stride = convolution_stride(args.k());
    gather(args, group, begin, end, copies, block.x_stride);
    block.x = copies;
  }
  gemm_block(block, tiles);
}

template <class T>
void run(const ConvolutionArgs& args, int64_t row_begin, int64_t row_end, int64_t panel_begin,
         int64_t panel_end, char* rows, char* tiles) {
  if (args.winograd)
    return convolve_winograd<T>(args, row_begin, row_end, panel_begin, panel_end, rows);
  if constexpr (std::is_same_v<T, float>) {
    convolve_direct<T>(args, row_begin, row_end, panel_begin, panel_end, rows);
  } else {
#if IPEX_HAVE_AVX512_BF16 && !IPEX_HAVE_AMX
    if constexpr (kIsBFloat16<T>) {
      if (args.direct)
        return convolve_direct<T>(args, row_begin, row_end, panel_begin, panel_end, rows);
    }
#endif
    for_groups<T>(args, panel_begin, panel_end, [&](int64_t group, const GemmBlock<T>& block) {
#if IPEX_HAVE_AMX
      if constexpr (kIsBFloat16<T>) {
        if (args.by_lines) return convolve_lines(args, row_begin, row_end, block, rows, tiles);
      }
#endif
      convolve_copies(args, group, row_begin, row_end, block, reinterpret_cast<T*>(rows), tiles);
    });
  }
}

}  // namespace
}  // namespace ipex

void ipex_k_convolution_f32(const ipex::ConvolutionArgs* args, int64_t row_begin, int64_t row_end,
                            int64_t panel_begin, int64_t panel_end, char* rows, char* tiles) {
  ipex::run<float>(*args, row_begin, row_end, panel_begin, panel_end, rows, tiles);
}

void ipex_k_convolution_bf16(const ipex::ConvolutionArgs* args, int64_t row_begin, int64_t row_end,
                             int64_t panel_begin, int64_t panel_end, char* rows, char* tiles) {
  ipex::run<ipex::BFloat16>(*args, row_begin, row_end, panel_begin, panel_end, rows, tiles);
}

void ipex_k_convolution_f16(const ipex::ConvolutionArgs* args, int64_t row_begin, int64_t row_end,
                            int64_t panel_begin, int64_t panel_end, char* rows, char* tiles) {
  ipex::run<ipex::Half>(*args, row_begin, row_end, panel_begin, panel_end, rows, tiles);
}
