// SPDX-License-Identifier: Apache-2.0
// A convolution that reads x where it lies, of float and, with VDPBF16PS, of bfloat16. K falls into
// segments, which a window finds side by side in x: the channels under one tap, or all that a line
// of the window sees. For each pixel of y a table has where its segments begin (padding: in zeros),
// so that nothing is copied and a tile is a matrix product for any stride, dilation and padding.
#pragma once

#include <algorithm>

#include "convolution/groups.h"
#include "convolution/padded.h"

namespace ipex {
namespace {

inline constexpr int kDirectVectors = kLanes == 16 ? 4 : 2;
inline constexpr int kDirectRows = kLanes == 4 ? 4 : 6;

// What a step along K multiplies: an element of a row of x times a vector of the weight, or a pair
// of bfloat16 times a vector of pairs. A pair may have its second element in the next segment.
template <class T>
struct DirectStep {
  static constexpr int64_t kElements = 1;
  IPEX_INLINE static f32v broadcast(const float* x) { return set1(*x); }
  IPEX_INLINE static f32v weight(const float* w) { return load(w); }
  IPEX_INLINE static f32v multiply(f32v a, f32v b, f32v sum) { return fma(a, b, sum); }
};
#if IPEX_HAVE_AVX512_BF16
template <>
struct DirectStep<BFloat16> {
  static constexpr int64_t kElements = 2;
  IPEX_INLINE static __m512bh broadcast(const BFloat16* x) { return broadcast_pair(x); }
  IPEX_INLINE static __m512bh broadcast(BFloat16 low, BFloat16 high) {
    return reinterpret_cast<__m512bh>(_mm512_set1_epi32(low.bits | high.bits << 16));
  }
  IPEX_INLINE static __m512bh weight(const BFloat16* w) {
    return reinterpret_cast<__m512bh>(_mm512_loadu_si512(w));
  }
  IPEX_INLINE static f32v multiply(__m512bh a, __m512bh b, f32v sum) {
    return _mm512_dpbf16_ps(sum, a, b);
  }
};
#endif

// What a tile multiplies: of `count` segments `depth` elements each.
template <class T>
struct DirectPiece {
  const T* const* from;  // [rows][stride]
  int64_t stride, count, offset, depth;
  bool first, last;
  const T* zeros;  // where a segment of padding begins
  // Weights of the next piece that the tile fetches meanwhile, and how many bytes at each step.
  const char* next = nullptr;
  int64_t next_step = 0;
};

// Where a tile of the last piece goes if nothing else follows.
template <class T>
struct DirectResult {
  T* y;
  const T* residual;  // like y, or null
  const float* bias;
  int64_t stride;
  bool relu;
};

// Fetches what a tile is going to write and to add: parts of many lines of an image, which no
// prefetcher of the processor foresees.
template <int kRows, int kVectors, class T>
IPEX_INLINE void fetch_result(const DirectResult<T>& result, int first) {
#pragma GCC unroll 6
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; v += 64 / static_cast<int>(kLanes * sizeof(T))) {
      const int64_t place = r * result.stride + (first + v) * kLanes;
      __builtin_prefetch(result.y + place, 1);
      if (result.residual) __builtin_prefetch(result.residual + place);
    }
  }
}

// Segments of padding are skipped from this depth on, where the products cost more than the
// question.
inline constexpr int64_t kLeastSkipped = 16;

template <int kRows, class T>
IPEX_INLINE bool all_are(const T* const* x, const T* wanted) {
  bool all = true;
#pragma GCC unroll 6
  for (int r = 0; r < kRows; ++r) all &= x[r] == wanted;
  return all;
}

// `first`: the first vector of the panels' columns. kOdd: segments have an odd number of elements,
// so that some pairs have theirs in two of them.
template <bool kFetch, bool kOdd, int kRows, int kVectors, class T>
IPEX_INLINE void direct_tile(const DirectPiece<T>& piece, const T* p0, const T* p1, int first,
                             float* c, int64_t ldc, const DirectResult<T>* result) {
  using Step = DirectStep<T>;
  f32v acc[kRows][kVectors];
  load_tile(acc, c, ldc, !piece.first);
  if (piece.last && result) fetch_result<kRows, kVectors>(*result, first);
  const T* w[kVectors];
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) w[v] = column(p0, p1, first + v, Step::kElements);
  const char* next = piece.next;
  for (int64_t s = 0; s < piece.count; ++s) {
    const T* x[kRows];
#pragma GCC unroll 6
    for (int r = 0; r < kRows; ++r) x[r] = piece.from[r * piece.stride + s];
    if (!kOdd && piece.depth >= kLeastSkipped && all_are<kRows>(x, piece.zeros)) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) w[v] += kPanel * piece.depth;
      continue;
    }
#pragma GCC unroll 6
    for (int r = 0; r < kRows; ++r) x[r] += piece.offset;
    const auto step = [&](const auto& of_row) IPEX_LAMBDA {
      if constexpr (kFetch) {
        __builtin_prefetch(next, 0, 2);
        next += piece.next_step;
      }
      decltype(Step::weight(nullptr)) b[kVectors];
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        b[v] = Step::weight(w[v]);
        w[v] += kPanel * Step::kElements;
      }
#pragma GCC unroll 6
      for (int r = 0; r < kRows; ++r) {
        const auto a = of_row(r);
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) acc[r][v] = Step::multiply(a, b[v], acc[r][v]);
      }
    };
    int64_t i = kOdd ? s % 2 : 0;
    for (; i + Step::kElements <= piece.depth; i += Step::kElements)
      step([&](int r) IPEX_LAMBDA { return Step::broadcast(x[r] + i); });
    if constexpr (kOdd) {
      if (i < piece.depth) {
        const bool more = s + 1 < piece.count;
        step([&](int r) IPEX_LAMBDA {
          const T* const* from = piece.from + r * piece.stride + s + 1;
          return Step::broadcast(x[r][i], more ? (*from)[piece.offset] : T{});
        });
      }
    }
  }
  if (!piece.last || !result) return store_tile(acc, c, ldc);
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) {
    const int64_t at = (first + v) * kLanes;
    const f32v bias = load(result->bias + at);
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

// `vectors` of columns of one (p1 == nullptr) or two panels.
template <bool kFetch, bool kOdd, class T>
void direct_rows(const DirectPiece<T>& piece, int64_t rows, int vectors, const T* p0, const T* p1,
                 float* c, int64_t ldc, const DirectResult<T>* result) {
  with_rows<kDirectRows>(rows, [&]<int kRows>() IPEX_LAMBDA {
    int v = 0;
    for (; v + kDirectVectors <= vectors; v += kDirectVectors)
      direct_tile<kFetch, kOdd, kRows, kDirectVectors>(piece, p0, p1, v, c + v * kLanes, ldc,
                                                       result);
    if constexpr (kDirectVectors > 2) {
      for (; v + 2 <= vectors; v += 2)
        direct_tile<kFetch, kOdd, kRows, 2>(piece, p0, p1, v, c + v * kLanes, ldc, result);
    }
    if (v < vectors)
      direct_tile<kFetch, kOdd, kRows, 1>(piece, p0, p1, v, c + v * kLanes, ldc, result);
  });
}

// Copies the lines of an image from `begin` on with zeros beside them; those outside are left out.
template <class T>
void copy_padded(const ConvolutionArgs& args, int64_t image, int64_t begin, int64_t end, T* to) {
  const int64_t size = args.padded_width() * args.channels;
  for (int64_t line = begin; line < end; ++line, to += size)
    if (line >= 0 && line < args.height) copy_padded_line(args, image, line, to);
}

// Fills the table for rows [begin, end); `lines`: the copies from line `first` on, or null.
template <class T>
void find_segments(const ConvolutionArgs& args, int64_t begin, int64_t end, const T* zeros,
                   const T* lines, int64_t first, const T** to) {
  const int64_t channels = args.channels, pixels = args.out_height * args.out_width;
  const int64_t line_size = (lines ? args.padded_width() : args.width) * channels;
  const int64_t segments = direct_segments(args), stride = args.stride_x;
  const bool merged = direct_merged(args);
  for (int64_t count; begin < end; begin += count, to += count * segments) {  // a line of y
    const int64_t out_x = begin % args.out_width;
    count = std::min(end - begin, args.out_width - out_x);
    const T* x = static_cast<const T*>(args.x) + begin / pixels * args.height * line_size;
    if (lines) x = lines - first * line_size;
    int64_t line = begin % pixels / args.out_width * args.stride_y - args.padding_y;
    for (int64_t s = 0; s < segments; line += args.dilation_y) {
      int64_t place = out_x * stride - (lines ? 0 : args.padding_x);
      for (int64_t i = merged ? args.taps_x - 1 : 0; i < args.taps_x; ++i, ++s) {
        // The pixels [left, right) of these see x, the others padding.
        int64_t left = 0, right = line >= 0 && line < args.height ? count : 0;
        if (!merged) {
          left = std::min(count, std::max<int64_t>(0, stride - 1 - place) / stride);
          right = std::min(right, std::max<int64_t>(0, args.width - place + stride - 1) / stride);
        }
        const int64_t at = line * line_size + place * channels;
        for (int64_t n = 0; n < std::min(left, right); ++n) to[n * segments + s] = zeros;
        for (int64_t n = left; n < right; ++n)
          to[n * segments + s] = x + at + n * stride * channels;
        for (int64_t n = std::max<int64_t>(0, right); n < count; ++n) to[n * segments + s] = zeros;
        place += args.dilation_x;
      }
    }
  }
}

// How many bytes of the next piece of its panel each of the tiles of `rows` rows fetches into L2 at
// every step, so that the first of the next tiles does not wait for memory; every other tile
// fetches from the second panel. 0 with many rows, where that wait matters less than instructions.
template <class T>
int64_t fetched_bytes(int64_t rows) {
  const int64_t tiles = (rows + kDirectRows - 1) / kDirectRows, turns = (tiles + 1) / 2;
  constexpr int64_t kStep = kPanel * DirectStep<T>::kElements * sizeof(T), kMostTiles = 40;
  return tiles > kMostTiles ? 0 : std::min<int64_t>(64, (kStep + turns - 1) / turns);
}

// The rows of `block` (its w, panels, y, addend, column and columns as usual; no x), `from` their
// table, in whose segments they begin at `offset`, `zeros` what it has for padding; `c` has room
// for 64 columns of them.
template <bool kOdd, class T>
void direct_block(const GemmBlock<T>& block, const T* const* from, const T* zeros, int64_t segments,
                  int64_t depth, int64_t offset, float* c) {
  constexpr int64_t ldc = 2 * kPanel;
  const int64_t size = panel_size<T>(block.k);
  const Activation activation = block.epilogue->activation;
  const bool simple = activation == Activation::kNone || activation == Activation::kRelu;
  constexpr int64_t kPiece = kDirectPiece / static_cast<int64_t>(sizeof(T));
  const bool whole = direct_whole(block.k, sizeof(T));
  const int64_t together = whole ? segments : std::max<int64_t>(1, kPiece / depth);
  const int64_t length = whole || together > 1 ? depth : std::min(depth, kPiece);
  const int64_t fetched = fetched_bytes<T>(block.rows);
  for (int64_t p = 0; p < block.panels; p += 2) {
    const T* p0 = block.w + p * size;
    const T* p1 = p + 1 < block.panels ? p0 + size : nullptr;
    const int64_t width = (p1 ? 2 : 1) * kPanel, column = p * kPanel;
    const int64_t columns = std::min(width, block.columns - column);
    const int64_t vectors = (columns + kLanes - 1) / kLanes;
    const bool direct = simple && vectors * kLanes == columns;
    if (!direct && block.addend) block.load_addend(p, width, 0, block.rows, c, ldc);
    const Finisher<T> finisher = block.finisher(p, width);
    for (int64_t s = 0, d = 0, k = 0; s < segments;) {
      const int64_t count = std::min(together, segments - s), end = std::min(depth, d + length);
      DirectPiece<T> piece{nullptr,
                           segments,
                           count,
                           offset + d,
                           end - d,
                           k == 0 && (direct || !block.addend),
                           s + count == segments && end == depth,
                           zeros};
      const int64_t steps = count * (end - d) / DirectStep<T>::kElements;
      // What follows in the panels, or the next ones, which lie behind them.
      const T* next = piece.last ? p0 + 2 * size : p0 + (k + count * (end - d)) * kPanel;
      const int64_t left = block.panels - (piece.last ? p + 2 : p);
      piece.next_step = left > 0 ? fetched : 0;
      for (int64_t r = 0, tile = 0; r < block.rows; r += kDirectRows, ++tile) {
        const int64_t at = r * block.y_stride + column;
        const DirectResult<T> result{block.y + at, block.addend ? block.addend + at : nullptr,
                                     finisher.bias(), block.y_stride,
                                     activation == Activation::kRelu};
        piece.from = from + r * segments + s;
        piece.next = reinterpret_cast<const char*>(left > 1 && tile % 2 ? next + size : next) +
                     tile / 2 * steps * piece.next_step;
        const auto rows =
            piece.next_step ? direct_rows<true, kOdd, T> : direct_rows<false, kOdd, T>;
        rows(piece, std::min<int64_t>(kDirectRows, block.rows - r), static_cast<int>(vectors),
             p0 + k * kPanel, p1 ? p1 + k * kPanel : nullptr, c + r * ldc, ldc,
             direct ? &result : nullptr);
      }
      k += count * (end - d);
      d = end == depth ? 0 : end;
      if (d == 0) s += count;
    }
    if (!direct) block.finish(finisher, p, c, ldc, 0, block.rows);
  }
}

// Rows [begin, end) of what the panels [panel_begin, panel_end) give.
template <class T>
void convolve_direct(const ConvolutionArgs& args, int64_t begin, int64_t end, int64_t panel_begin,
                     int64_t panel_end, char* scratch) {
  const DirectScratch places(args, end - begin, sizeof(T));
  auto* const zeros = reinterpret_cast<T*>(scratch);
  auto* const c = reinterpret_cast<float*>(scratch + places.c);
  auto* const table = reinterpret_cast<const T**>(scratch + places.table);
  auto* const lines = reinterpret_cast<T*>(scratch + places.lines);
  const int64_t segments = direct_segments(args), depth = args.k() / segments;
  const int64_t pixels = args.out_height * args.out_width;
  std::memset(zeros, 0, static_cast<size_t>(depth * args.groups) * sizeof(T));
  const bool copies = direct_copies(args);
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
    find_segments<T>(args, begin, begin + rows, zeros, copies ? lines : nullptr, first, table);
    for_groups<T>(args, panel_begin, panel_end, [&](int64_t group, GemmBlock<T> block) IPEX_LAMBDA {
      place_rows(block, begin, rows);
      const int64_t offset = group * args.depth();
      if constexpr (DirectStep<T>::kElements == 2) {
        if (depth % 2) return direct_block<true>(block, table, zeros, segments, depth, offset, c);
      }
      direct_block<false>(block, table, zeros, segments, depth, offset, c);
    });
    begin += rows;
  }
}

}  // namespace
}  // namespace ipex
