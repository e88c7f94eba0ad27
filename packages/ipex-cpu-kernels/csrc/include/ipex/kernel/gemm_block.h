// SPDX-License-Identifier: Apache-2.0
// A block of a matrix product with all that follows it: rows of x times packed panels into y.
#pragma once

#include "ipex/kernel/gemm_operands.h"
#include "ipex/kernel/gemm_tiles.h"

namespace ipex {
namespace {

// Rows that meet a piece of panels at most.
inline constexpr int64_t kMostRows = 192;

// How deep a piece of two panels is that `rows` rows meet. It stays in L1 or L2 while all tiles of
// them pass and fetch the next piece; the fewer tiles, the sooner. A single tile reads whole
// panels, and so do copies.
template <class T>
int64_t depth_of_piece(int64_t rows, int64_t k) {
  constexpr bool amx = IPEX_HAVE_AMX && kIsBFloat16<T>;
  const int64_t tile = amx ? kRowStep<T> : kTileRows, tiles = (rows + tile - 1) / tile;
  const int64_t whole = k > 0 ? k : 1;  // k = 0 gives zeros
  if (tiles <= 1 || (kCopies && rows >= kWidenedRows<T>)) return whole;
  // Without AVX-512, Zen 3 was measured, whose L2 is small: up to 48 rows do best with 32 KB.
  const int64_t most = kCopies ? 1 : 4, doublings = amx ? 4 : tiles - 2;
  const int64_t bytes = int64_t{16384} << (doublings < most ? doublings : most);
  const int64_t pieces = (k * 2 * kPanel * int64_t{sizeof(T)} + bytes - 1) / bytes;
  return pieces <= 1 ? whole : (k + 32 * pieces - 1) / (32 * pieces) * 32;
}

// Rows [begin, begin + count) of the block. product(i, n, d, p0, p1, depth, c, ldc, accumulate,
// next) multiplies n rows from `begin` + i on, and columns of x from d on; see multiply().
template <class T, class F>
IPEX_INLINE void gemm_block_rows(const GemmBlock<T>& g, int64_t begin, int64_t count,
                                 const F& product) {
  constexpr int64_t ldc = 2 * kPanel;
  alignas(64) float c[kMostRows * ldc];
  const int64_t size = panel_size<T>(g.k);
  const int64_t piece = depth_of_piece<T>(count, g.k);
  for (int64_t p = 0; p < g.panels; p += 2) {
    const T* p0 = g.w + p * size;
    const T* p1 = p + 1 < g.panels ? p0 + size : nullptr;
    const Finisher<T> finisher = g.finisher(p, (p1 ? 2 : 1) * g.panel_columns());
    for (int64_t r = 0; r < count; r += kMostRows) {
      const int64_t rows = count - r < kMostRows ? count - r : kMostRows;
      // The last two steps of rows fetch the next piece.
      const int64_t last = (rows - 1) / kRowStep<T> * kRowStep<T>;
      const int64_t fetching = last > 0 ? last - kRowStep<T> : 0;
      if (g.addend) g.load_addend(p, (p1 ? 2 : 1) * kPanel, begin + r, rows, c, ldc);
      for (int64_t d = 0; d == 0 || d < g.k; d += piece) {
        const int64_t depth = g.k - d < piece ? g.k - d : piece;
        // Nothing follows where other rows meet these panels again.
        const T* next = d + depth < g.k                         ? p0 + (d + depth) * kPanel
                        : r + rows == count && p + 2 < g.panels ? p0 + 2 * size
                                                                : nullptr;
        Following following(next, p1 ? size : 0, (rows - fetching + kTileRows - 1) / kTileRows);
        for (int64_t i = 0; i < rows; i += kRowStep<T>)
          product(r + i, rows - i < kRowStep<T> ? rows - i : kRowStep<T>, d, p0 + d * kPanel,
                  p1 ? p1 + d * kPanel : nullptr, depth, c + i * ldc, ldc, d > 0 || g.addend,
                  next && rows > kTileRows && i >= fetching ? &following : nullptr);
      }
      g.finish(finisher, p, c, ldc, begin + r, rows);
    }
  }
}

// `scratch`: kGemmScratch bytes, or null. With it there are at most kTileRowsMost rows and
// kTilePanelsMost panels where bfloat16 has tiles.
template <class T>
void gemm_block(const GemmBlock<T>& g, [[maybe_unused]] char* scratch) {
#if IPEX_HAVE_AMX
  if constexpr (kIsBFloat16<T>) {
    if (scratch && g.k > 0) {
      PlainRows rows(g, scratch);
      return gemm_block_tiles(g, rows, reinterpret_cast<float*>(scratch + kTileScratchX));
    }
  }
#endif
  // Where rows become float, all panels meet rows that were converted once.
  float* wide = nullptr;
  int64_t step = g.rows;
  const int64_t stride = (g.k + 1) / 2 * 2;
  if constexpr (kConverts<T>) {
    constexpr int64_t floats = kGemmScratch / static_cast<int64_t>(sizeof(float));
    const int64_t most = stride ? floats / stride / kRowStep<T> * kRowStep<T> : 0;
    if (scratch && most && g.rows >= kWideRows) {
      wide = reinterpret_cast<float*>(scratch);
      step = most;
    }
  }
  TileScope scope;
  for (int64_t r = 0; r < g.rows; r += step) {
    const int64_t rows = g.rows - r < step ? g.rows - r : step;
    if (wide) convert_rows(g.x + r * g.x_stride, g.x_stride, rows, g.k, wide, stride);
    const auto product = [&](int64_t i, int64_t n, int64_t d, const T* p0, const T* p1,
                             int64_t depth, float* c, int64_t ldc, bool accumulate,
                             Following* next) IPEX_LAMBDA {
      if (wide)
        multiply_float(wide + i * stride + d, stride, n, p0, p1, depth, c, ldc, accumulate, next);
      else
        multiply(scope, g.x + (r + i) * g.x_stride + d, g.x_stride, n, p0, p1, depth, c, ldc,
                 accumulate, next);
    };
    gemm_block_rows(g, r, rows, product);
  }
}

}  // namespace
}  // namespace ipex
