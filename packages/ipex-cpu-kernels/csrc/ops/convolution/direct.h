// SPDX-License-Identifier: Apache-2.0
// A convolution of float that reads x where it lies. K falls into segments, which a window finds
// side by side in x: the channels under one tap, or all that a line of the window sees. For each
// pixel of y a table has where its segments begin (padding: in zeros), so that nothing is copied
// and a tile is a matrix product for any stride, dilation and padding.
#pragma once

#include <algorithm>

#include "convolution/padded.h"
#include "ipex/gemm_operands.h"

namespace ipex {
namespace {

inline constexpr int kDirectVectors = kLanes == 16 ? 4 : 2;
inline constexpr int kDirectRows = kLanes == 4 ? 4 : 6;

// What a tile multiplies: of `count` segments `depth` elements each.
struct DirectPiece {
  const float* const* from;  // [rows][stride]
  int64_t stride, count, offset, depth;
  bool first, last;
};

// Where a tile of the last piece goes if nothing else follows.
struct DirectResult {
  float* y;
  const float* residual;  // like y, or null
  const float* bias;
  int64_t stride;
  bool relu;
};

// Fetches what a tile is going to write and to add: parts of many lines of an image, which no
// prefetcher of the processor foresees.
template <int kRows, int kVectors>
IPEX_INLINE void fetch_result(const DirectResult& result, int first) {
#pragma GCC unroll 6
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; v += 64 / static_cast<int>(sizeof(f32v))) {
      const int64_t place = r * result.stride + (first + v) * kLanes;
      __builtin_prefetch(result.y + place, 1);
      if (result.residual) __builtin_prefetch(result.residual + place);
    }
  }
}

// `first`: the first vector of the panels' columns.
template <int kRows, int kVectors>
IPEX_INLINE void direct_tile(const DirectPiece& piece, const float* p0, const float* p1, int first,
                             float* c, int64_t ldc, const DirectResult* result) {
  f32v acc[kRows][kVectors];
  load_tile(acc, c, ldc, !piece.first);
  if (piece.last && result) fetch_result<kRows, kVectors>(*result, first);
  const float* w[kVectors];
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) w[v] = column(p0, p1, first + v, 1);
  for (int64_t s = 0; s < piece.count; ++s) {
    const float* x[kRows];
#pragma GCC unroll 6
    for (int r = 0; r < kRows; ++r) x[r] = piece.from[r * piece.stride + s] + piece.offset;
    for (int64_t i = 0; i < piece.depth; ++i) {
      f32v b[kVectors];
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        b[v] = load(w[v]);
        w[v] += kPanel;
      }
#pragma GCC unroll 6
      for (int r = 0; r < kRows; ++r) {
        const f32v a = set1(x[r][i]);
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) acc[r][v] = fma(a, b[v], acc[r][v]);
      }
    }
  }
  if (!piece.last || !result) return store_tile(acc, c, ldc);
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) {
    const int64_t at = (first + v) * kLanes;
    const f32v bias = result->bias ? load(result->bias + at) : zero();
#pragma GCC unroll 6
    for (int r = 0; r < kRows; ++r) {
      const int64_t place = r * result->stride + at;
      f32v sum = acc[r][v] + bias;
      if (result->residual) sum = sum + load(result->residual + place);
      // The value last: max keeps the NaN of its second operand.
      store(result->y + place, result->relu ? max(zero(), sum) : sum);
    }
  }
}

// All columns of one (p1 == nullptr) or two panels.
inline void direct_rows(const DirectPiece& piece, int64_t rows, const float* p0, const float* p1,
                        float* c, int64_t ldc, const DirectResult* result) {
  const int vectors = (p1 ? 2 : 1) * kPanel / static_cast<int>(kLanes);
  with_rows<kDirectRows>(rows, [&]<int kRows>() IPEX_LAMBDA {
    int v = 0;
    for (; v + kDirectVectors <= vectors; v += kDirectVectors)
      direct_tile<kRows, kDirectVectors>(piece, p0, p1, v, c + v * kLanes, ldc, result);
    if constexpr (kDirectVectors > 2) {
      for (; v < vectors; v += 2)
        direct_tile<kRows, 2>(piece, p0, p1, v, c + v * kLanes, ldc, result);
    }
  });
}

// Copies the lines of an image from `begin` on with zeros beside them; those outside are left out.
inline void copy_padded(const ConvolutionArgs& args, int64_t image, int64_t begin, int64_t end,
                        float* to) {
  const int64_t size = args.padded_width() * args.channels;
  for (int64_t line = begin; line < end; ++line, to += size)
    if (line >= 0 && line < args.height) copy_padded_line(args, image, line, to);
}

// Fills the table for rows [begin, end); `lines`: the copies from line `first` on, or null.
inline void find_segments(const ConvolutionArgs& args, int64_t begin, int64_t end,
                          const float* zeros, const float* lines, int64_t first, const float** to) {
  const int64_t channels = args.channels, pixels = args.out_height * args.out_width;
  const int64_t line_size = (lines ? args.padded_width() : args.width) * channels;
  const bool merged = direct_merged(args);
  int64_t image = begin / pixels, out_y = begin % pixels / args.out_width;
  int64_t out_x = begin % args.out_width;
  for (int64_t row = begin; row < end; ++row) {
    const float* x = static_cast<const float*>(args.x) + image * args.height * line_size;
    const int64_t column = out_x * args.stride_x - (lines ? 0 : args.padding_x);
    int64_t line = out_y * args.stride_y - args.padding_y;
    for (int64_t y = 0; y < args.taps_y; ++y, line += args.dilation_y) {
      const bool inside = line >= 0 && line < args.height;
      const float* at = lines ? lines + (line - first) * line_size : x + line * line_size;
      if (merged) {
        *to++ = inside ? at + column * channels : zeros;
        continue;
      }
      int64_t place = column;
      for (int64_t i = 0; i < args.taps_x; ++i, place += args.dilation_x)
        *to++ = inside && place >= 0 && place < args.width ? at + place * channels : zeros;
    }
    if (++out_x == args.out_width) {
      out_x = 0;
      if (++out_y == args.out_height) out_y = 0, ++image;
    }
  }
}

// The rows of `block` (its w, panels, y, addend, column and columns as usual; no x), `from` their
// table; `c` has room for 64 columns of them.
inline void direct_block(const GemmBlock<float>& block, const float* const* from, int64_t segments,
                         int64_t depth, float* c) {
  constexpr int64_t ldc = 2 * kPanel;
  const int64_t size = panel_size<float>(block.k);
  const Activation activation = block.epilogue->activation;
  const bool simple = activation == Activation::kNone || activation == Activation::kRelu;
  const bool whole = block.k <= kDirectPiece + kDirectPiece / 2;
  const int64_t together = whole ? segments : std::max<int64_t>(1, kDirectPiece / depth);
  const int64_t length = whole || together > 1 ? depth : std::min(depth, kDirectPiece);
  for (int64_t p = 0; p < block.panels; p += 2) {
    const float* p0 = block.w + p * size;
    const float* p1 = p + 1 < block.panels ? p0 + size : nullptr;
    const int64_t width = (p1 ? 2 : 1) * kPanel, column = p * kPanel;
    const bool direct = simple && column + width <= block.columns;
    if (!direct && block.addend) block.load_addend(p, width, 0, block.rows, c, ldc);
    const auto* bias = static_cast<const float*>(block.epilogue->bias);
    for (int64_t s = 0, d = 0, k = 0; s < segments;) {
      const int64_t count = std::min(together, segments - s), end = std::min(depth, d + length);
      DirectPiece piece{nullptr,
                        segments,
                        count,
                        d,
                        end - d,
                        k == 0 && (direct || !block.addend),
                        s + count == segments && end == depth};
      for (int64_t r = 0; r < block.rows; r += kDirectRows) {
        const int64_t at = r * block.y_stride + column;
        const DirectResult result{block.y + at, block.addend ? block.addend + at : nullptr,
                                  bias ? bias + block.column + column : nullptr, block.y_stride,
                                  activation == Activation::kRelu};
        piece.from = from + r * segments + s;
        direct_rows(piece, std::min<int64_t>(kDirectRows, block.rows - r), p0 + k * kPanel,
                    p1 ? p1 + k * kPanel : nullptr, c + r * ldc, ldc, direct ? &result : nullptr);
      }
      k += count * (end - d);
      d = end == depth ? 0 : end;
      if (d == 0) s += count;
    }
    if (!direct) block.finish(block.finisher(p, width), p, c, ldc, 0, block.rows);
  }
}

// Rows [begin, end) of `block`, whose y and addend are those of row 0.
inline void convolve_direct(const ConvolutionArgs& args, int64_t begin, int64_t end,
                            GemmBlock<float> block, char* scratch) {
  const DirectScratch places(args, end - begin);
  auto* const zeros = reinterpret_cast<float*>(scratch);
  auto* const c = reinterpret_cast<float*>(scratch + places.c);
  auto* const table = reinterpret_cast<const float**>(scratch + places.table);
  auto* const lines = reinterpret_cast<float*>(scratch + places.lines);
  const int64_t segments = direct_segments(args), depth = args.k() / segments;
  const int64_t pixels = args.out_height * args.out_width;
  std::fill(zeros, zeros + depth, 0.0f);
  const bool copies = direct_copies(args);
  float* const y = block.y;
  const float* const addend = block.addend;
  while (begin < end) {
    int64_t rows = end - begin, first = 0;
    if (copies) {  // the lines of one image
      const int64_t image = begin / pixels, pixel = begin % pixels;
      rows = std::min(rows, pixels - pixel);
      first = pixel / args.out_width * args.stride_y - args.padding_y;
      const int64_t last = (pixel + rows - 1) / args.out_width * args.stride_y - args.padding_y +
                           (args.taps_y - 1) * args.dilation_y;
      copy_padded(args, image, first, last + 1, lines);
    }
    find_segments(args, begin, begin + rows, zeros, copies ? lines : nullptr, first, table);
    block.row = begin;
    block.rows = rows;
    block.y = y + begin * block.y_stride;
    block.addend = addend ? addend + begin * block.y_stride : nullptr;
    direct_block(block, table, segments, depth, c);
    begin += rows;
  }
}

}  // namespace
}  // namespace ipex
