// SPDX-License-Identifier: Apache-2.0
// A block of a matrix product with all that follows it: rows of x times packed panels into y.
#pragma once

#include "ipex/kernel/gemm_operands.h"
#include "ipex/kernel/gemm_tiles.h"

namespace ipex {
namespace {

// With `scratch` (kTileScratch bytes, given for bfloat16 where there are tiles and many rows) at
// most kTileRowsMost rows and kTilePanelsMost panels.
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
  // Two deep panels and the rows they meet are more than L2 holds. Cut along K, a piece of the
  // panels stays there while several steps of rows pass. Sums go on where they stopped.
  constexpr int64_t kDeep = 4096 / static_cast<int64_t>(sizeof(T)), kSteps = 8;
  constexpr int64_t ldc = 2 * kPanel;
  alignas(64) float c[kSteps * kRowStep<T> * ldc];
  const int64_t size = panel_size<T>(g.k);
  const bool deep = g.k > kDeep + kDeep / 2 && g.rows > kRowStep<T>;
  const int64_t piece = deep ? kDeep : g.k > 0 ? g.k : 1;
  const int64_t most = deep ? kSteps * kRowStep<T> : kRowStep<T>;
  TileScope scope;
  for (int64_t p = 0; p < g.panels; p += 2) {
    const T* p0 = g.w + p * size;
    const T* p1 = p + 1 < g.panels ? p0 + size : nullptr;
    const Finisher<T> finisher = g.finisher(p, (p1 ? 2 : 1) * g.panel_columns());
    for (int64_t r = 0; r < g.rows; r += most) {
      const int64_t rows = g.rows - r < most ? g.rows - r : most;
      if (g.addend) g.load_addend(p, (p1 ? 2 : 1) * kPanel, r, rows, c, ldc);
      for (int64_t d = 0; d == 0 || d < g.k; d += piece) {
        const int64_t depth = g.k - d < piece ? g.k - d : piece;
        for (int64_t i = 0; i < rows; i += kRowStep<T>)
          multiply(scope, g.x + (r + i) * g.x_stride + d, g.x_stride,
                   rows - i < kRowStep<T> ? rows - i : kRowStep<T>, p0 + d * kPanel,
                   p1 ? p1 + d * kPanel : nullptr, depth, c + i * ldc, ldc, d > 0 || g.addend);
      }
      g.finish(finisher, p, c, ldc, r, rows);
    }
  }
}

}  // namespace
}  // namespace ipex
