// SPDX-License-Identifier: Apache-2.0
// A convolution as a product of matrices: the pixels under the taps of the window, copied into one
// row for each pixel of the result, times the packed weight.
#include "convolution/convolution.h"

#include <algorithm>
#include <cstring>

#include "ipex/epilogue.h"
#include "ipex/gemm.h"

namespace ipex {
namespace {

// Depth of a product up to which two panels stay in half of a small L2. A deeper one is cut into
// pieces whose sums meet in C.
template <class T>
inline constexpr int64_t kPiece = 65536 / (16 * static_cast<int64_t>(sizeof(T)));

// Copies what the taps of one line of the window see, `line` the first of its pixels in x and
// `column` the place of the first tap; taps beside the image see zeros.
template <class T>
void gather_line(const ConvolutionArgs& args, const T* line, int64_t column, T* to) {
  const int64_t channels = args.channels;
  const auto bytes = [&](int64_t pixels) {
    return static_cast<size_t>(pixels * channels) * sizeof(T);
  };
  if (args.dilation_x == 1) {  // neighbouring taps see neighbouring pixels
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
      std::memcpy(to, line + column * channels, bytes(1));
  }
}

// The rows [begin, end) of the left-hand side, `stride` elements apart.
template <class T>
void gather(const ConvolutionArgs& args, int64_t begin, int64_t end, T* to, int64_t stride) {
  const int64_t size = args.taps_x * args.channels, pixels = args.out_height * args.out_width;
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
      gather_line(args, static_cast<const T*>(args.x) + first, column, part);
    }
  }
}

// Puts the addend of some rows and columns of y where sums begin with it.
template <class T>
void load_residual(const T* from, int64_t stride, int64_t rows, int64_t columns, float* c,
                   int64_t ldc) {
  for (int64_t r = 0; r < rows; ++r, from += stride, c += ldc) {
    int64_t i = 0;
    for (; i + kLanes <= columns; i += kLanes) store(c + i, load(from + i));
    if (i < columns) store_n(c + i, load_n(from + i, columns - i), columns - i);
  }
}

template <class T>
void run(const ConvolutionArgs& args, int64_t row_begin, int64_t row_end, int64_t panel_begin,
         int64_t panel_end, char* scratch) {
  constexpr int64_t ldc = 2 * kPanel;
  // What lies in C behind the columns of y is added to and left alone, so it must be no signal.
  alignas(64) float c[kConvolutionRows * ldc] = {};
  const int64_t k = args.k(), size = panel_size<T>(k);
  const int64_t pieces = (k + kPiece<T> - 1) / kPiece<T>;
  const int64_t depth = ((k + pieces - 1) / pieces + 31) / 32 * 32;
  const T* x = static_cast<const T*>(args.x) + row_begin * k;
  int64_t stride = k;
  if (!args.in_place()) {
    auto* copy = reinterpret_cast<T*>(scratch);
    stride = convolution_stride(k);
    gather(args, row_begin, row_end, copy, stride);
    x = copy;
  }
  const auto* w = static_cast<const T*>(args.weight);
  TileScope scope;
  for (int64_t p = panel_begin; p < panel_end; p += 2) {
    const T* p0 = w + p * size;
    const T* p1 = p + 1 < panel_end ? p0 + size : nullptr;
    const int64_t column = p * kPanel, wide = p1 ? 2 * kPanel : kPanel;
    const int64_t columns = args.n - column < wide ? args.n - column : wide;
    const Finisher<T> finisher(args.epilogue, column, columns);
    // Cut along K, all rows pass before the next piece, so that a piece of the panels stays in L2.
    const int64_t step = pieces > 1 ? kConvolutionRows : kRowStep<T>;
    for (int64_t r = row_begin; r < row_end; r += step) {
      const int64_t last = row_end - r < step ? row_end : r + step;
      if (args.residual)
        load_residual(static_cast<const T*>(args.residual) + r * args.n + column, args.n, last - r,
                      columns, c, ldc);
      for (int64_t d = 0; d < k; d += depth) {
        const int64_t part = k - d < depth ? k - d : depth;
        const bool add = d > 0 || args.residual;
        for (int64_t i = r; i < last; i += kRowStep<T>) {
          const int64_t rows = last - i < kRowStep<T> ? last - i : kRowStep<T>;
          multiply(scope, x + (i - row_begin) * stride + d, stride, rows, p0 + d * kPanel,
                   p1 ? p1 + d * kPanel : nullptr, part, c + (i - r) * ldc, ldc, add);
        }
      }
      finisher.rows(c, ldc, last - r, r, static_cast<T*>(args.y) + r * args.n + column, args.n);
    }
  }
}

}  // namespace
}  // namespace ipex

void ipex_k_convolution_f32(const ipex::ConvolutionArgs* args, int64_t row_begin, int64_t row_end,
                            int64_t panel_begin, int64_t panel_end, char* scratch) {
  ipex::run<float>(*args, row_begin, row_end, panel_begin, panel_end, scratch);
}

void ipex_k_convolution_bf16(const ipex::ConvolutionArgs* args, int64_t row_begin, int64_t row_end,
                             int64_t panel_begin, int64_t panel_end, char* scratch) {
  ipex::run<ipex::BFloat16>(*args, row_begin, row_end, panel_begin, panel_end, scratch);
}

void ipex_k_convolution_f16(const ipex::ConvolutionArgs* args, int64_t row_begin, int64_t row_end,
                            int64_t panel_begin, int64_t panel_end, char* scratch) {
  ipex::run<ipex::Half>(*args, row_begin, row_end, panel_begin, panel_end, scratch);
}
