// SPDX-License-Identifier: Apache-2.0
// Many rows: two panels of weights are decoded once, into the layout of dense panels, and
// multiplied by all rows.
#pragma once

#include "ipex/kernel/epilogue.h"
#include "ipex/kernel/gemm.h"
#include "woq_linear/woq_decode.h"
#include "woq_linear/woq_linear.h"

namespace ipex {
namespace {

// Decodes one strip, K from `begin` (whole blocks) to `end`, into columns of a panel: [k][32], or
// [k / 2][32][2] for BFloat16. `panel` is the place of the strip's first column.
template <uint32_t kFormat, class T>
void decode_strip(const PackedHeader& header, const WoqLayout& at, const char* strip, int64_t begin,
                  int64_t end, T* panel) {
  constexpr bool kNibbles = kFormat == kFormatInt4 || kFormat == kFormatNf4;
  constexpr int kBlockK = kNibbles ? 8 : 4;
  constexpr int kHalf = kBlockK / 2;
  const Table16 table(nibble_values(header));
  f32v scales[kStripVectors] = {}, zeros[kStripVectors] = {};
  int64_t group_end = begin;
  const bool offset = header.zero_kind != kZeroNone || kImpliedZero<kFormat> != 0.0f;
  const bool vnni = header.order == kOrderVnni;
  for (int64_t k = begin; k < end; k += kBlockK) {
    if (k >= group_end) {
      const int64_t group = k / header.group;
      for (int v = 0; v < kStripVectors; ++v) {
        scales[v] = scale_vector(at, header, strip, group, v);
        zeros[v] = zero_vector(at, header, strip, group, v, kImpliedZero<kFormat>);
      }
      group_end = (group + 1) * header.group;
    }
    const char* block = strip + at.weights + k / kBlockK * kBlockBytes;
    T* row = panel + (k - begin) * kPanel;
#pragma GCC unroll 4
    for (int v = 0; v < kStripVectors; ++v) {
      i32v word = load_words(block + v * kLanes * 4);
      if (vnni) word = from_vnni(word, header.format);
      const f32v scale = scales[v];
      // Elements 0 .. half - 1 are the even k, the others the odd ones.
#pragma GCC unroll 4
      for (int j = 0; j < kHalf; ++j) {
        f32v even = element<kFormat>(word, j, table);
        f32v odd = element<kFormat>(word, j + kHalf, table);
        if (offset) {
          even = even - zeros[v];
          odd = odd - zeros[v];
        }
        even = even * scale;
        odd = odd * scale;
        T* to = row + 2 * j * kPanel;
        if constexpr (kIsBFloat16<T>) {
          store2(to + 2 * v * kLanes, f32v2{even, odd});
        } else {
          store(to + v * kLanes, even);
          store(to + kPanel + v * kLanes, odd);
        }
      }
    }
  }
}

// Decodes K from `begin` to `end` of one panel.
template <class T>
void decode_panel(const PackedHeader& header, const WoqLayout& at, const char* packed,
                  int64_t panel, int64_t begin, int64_t end, T* to) {
  constexpr int64_t inner = kIsBFloat16<T> ? 2 : 1;
  for (int64_t s = 0; s < 2; ++s) {
    const char* strip = packed + at.first_strip + (2 * panel + s) * at.strip_bytes;
    with_format(header.format, [&]<uint32_t kFormat>() {
      decode_strip<kFormat>(header, at, strip, begin, end, to + s * kStrip * inner);
    });
  }
}

// The product of rows and panels with operands and panels in C; the result in T.
template <class C, class T>
void many_rows(const WoqLinearArgs& args, char* scratch, int64_t row_begin, int64_t row_end,
               int64_t panel_begin, int64_t panel_end) {
  constexpr int64_t ldc = 2 * kPanel;
  const int64_t columns = args.epilogue.gated ? kPanel / 2 : kPanel;  // of y, for a panel
  C* panels = reinterpret_cast<C*>(scratch);
  float* sums = reinterpret_cast<float*>(scratch + 2 * kPanel * kWoqDepth * 4);
  const C* x = static_cast<const C*>(args.operand);
  TileScope scope;
  for (int64_t p = panel_begin; p < panel_end; p += 2) {
    const bool two = p + 1 < panel_end;
    const int64_t column = p * columns;
    const int64_t width = (two ? 2 : 1) * columns;
    const int64_t count = args.n - column < width ? args.n - column : width;
    const Finisher<T> finisher(args.epilogue, column, count);
    for (int64_t d = 0; d < args.k; d += kWoqDepth) {
      const int64_t depth = args.k - d < kWoqDepth ? args.k - d : kWoqDepth;
      C* second = panels + kPanel * kWoqDepth;
      decode_panel(args.header, args.at, args.packed, p, d, d + depth, panels);
      if (two) decode_panel(args.header, args.at, args.packed, p + 1, d, d + depth, second);
      const bool last = d + depth == args.k;
      for (int64_t r = row_begin; r < row_end; r += kRowStep<C>) {
        const int64_t rows = row_end - r < kRowStep<C> ? row_end - r : kRowStep<C>;
        float* c = sums + (r - row_begin) * ldc;
        multiply(scope, x + r * args.operand_stride + d, args.operand_stride, rows, panels,
                 two ? second : nullptr, depth, c, ldc, d > 0);
        if (last)
          finisher.rows(c, ldc, rows, r, static_cast<T*>(args.y) + r * args.n + column, args.n);
      }
    }
  }
}

}  // namespace
}  // namespace ipex
