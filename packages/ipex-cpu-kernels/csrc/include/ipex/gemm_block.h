// SPDX-License-Identifier: Apache-2.0
// A block of a matrix product with all that follows it: rows of x times packed panels into y.
#pragma once

#include "ipex/epilogue.h"
#include "ipex/gemm.h"
#include "ipex/gemm_sizes.h"

namespace ipex {
namespace {

template <class T>
struct GemmBlock {
  const T* x;  // first row
  int64_t x_stride, rows;
  const T* w;  // first panel
  int64_t panels, k;
  T* y;  // first element
  int64_t y_stride;
  int64_t row, column, columns;  // where the block lies in y, for what follows the product
  const Epilogue* epilogue;
  const T* addend;  // what the sums begin with, its rows as far apart as those of y, or null

  // Columns of y that a panel gives.
  int64_t panel_columns() const { return epilogue->gated ? kPanel / 2 : kPanel; }

  // For the panels from `panel` on, at most `width` columns.
  Finisher<T> finisher(int64_t panel, int64_t width) const {
    const int64_t first = panel * panel_columns(), left = columns - first;
    return Finisher<T>(*epilogue, column + first, left < width ? left : width);
  }

  // Puts the addend of rows [r, r + n) and the panels from `panel` on, at most `width` columns,
  // into C. What lies behind the columns of y is added to and left alone, so it must be no signal.
  void load_addend(int64_t panel, int64_t width, int64_t r, int64_t n, float* c,
                   int64_t ldc) const {
    const int64_t first = panel * panel_columns(), left = columns - first;
    const T* from = addend + r * y_stride + first;
    for (; n > 0; --n, from += y_stride, c += ldc) {
      for (int64_t i = 0; i < width; i += kLanes) {
        const int64_t count = left - i;
        store(c + i, count >= kLanes ? load(from + i)
                     : count > 0     ? load_n(from + i, count)
                                     : zero());
      }
    }
  }

  // Finishes rows [r, r + n) of what the panels from `panel` on gave.
  void finish(const Finisher<T>& finisher, int64_t panel, const float* c, int64_t ldc, int64_t r,
              int64_t n) const {
    finisher.rows(c, ldc, n, row + r, y + r * y_stride + panel * panel_columns(), y_stride);
  }
};

#if IPEX_HAVE_AMX

// With many rows the tiles are what counts, and they are fed from the caches:
// - A block of x is copied into the order of the tiles, so that its lines lie side by side (rows
//   whose distance is a multiple of 4 KiB would fight for few places in L1).
// - K is cut so that 32 rows of x, a panel of W and C fit L1: the panel stays there while the rows
//   stream from L2. C lies in L2 between the pieces of K. Up to kTileDepthOnce there is one piece.
// - What is needed next (the following panel, the following piece of x) is fetched into L2.
// - The vector units finish a block while tiles multiply the next one. In one go: a few rows per
//   step cost more than the overlap gains.

// Lines to be fetched into L2, a few at a time: `rows` rows of `lines` lines.
struct Ahead {
  const char* at = nullptr;
  int64_t stride = 0, lines = 0, rows = 0, per_step = 0, line = 0;

  Ahead() = default;
  Ahead(const void* from, int64_t row_stride, int64_t row_bytes, int64_t row_count, int64_t steps)
      : at(static_cast<const char*>(from)),
        stride(row_stride),
        lines((row_bytes + 63) / 64),
        rows(lines > 0 ? row_count : 0),
        per_step((lines * rows + steps - 1) / steps) {}

  IPEX_INLINE void step() {
    for (int64_t i = 0; i < per_step && rows > 0; ++i) {
      __builtin_prefetch(at + line * 64, 0, 2);
      if (++line < lines) continue;
      line = 0;
      at += stride;
      --rows;
    }
  }
};

// A block of C that waits to be finished.
struct Waiting {
  const GemmBlock<BFloat16>* block = nullptr;
  const Finisher<BFloat16>* finisher = nullptr;
  const float* c = nullptr;
  int64_t panel = 0, row = 0, rows = 0;

  void finish() {
    if (rows > 0) block->finish(*finisher, panel, c, kTileLdc, row, rows);
    rows = 0;
  }
};

// 32 (or 16, !kTwo) rows of x in the order of tiles times one panel. `last` is the weight of a
// step behind the `steps` whole ones, or null.
template <bool kTwo>
inline void multiply_tiles(const BFloat16* a, const BFloat16* w, int64_t steps,
                           const BFloat16* last, float* c, bool accumulate, Waiting& waiting,
                           Ahead& next_w, Ahead& next_x) {
  constexpr int64_t kC = kTileLdc * 4;
  if (accumulate) {
    _tile_loadd(0, c, kC);
    _tile_loadd(1, c + 16, kC);
    if constexpr (kTwo) {
      _tile_loadd(2, c + 16 * kTileLdc, kC);
      _tile_loadd(3, c + 16 * kTileLdc + 16, kC);
    }
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  const auto step = [&](const BFloat16* x, const BFloat16* panel) IPEX_LAMBDA {
    _tile_loadd(6, panel, kPanel * 4);
    _tile_loadd(4, x, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, panel + 32, kPanel * 4);
    _tile_dpbf16ps(1, 4, 7);
    if constexpr (kTwo) {
      _tile_loadd(5, x + 16 * 32, 64);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    next_w.step();
    next_x.step();
  };
  for (int64_t s = 0; s < steps; ++s) step(a + s * kTileStep, w + s * kTileStep);
  if (last) step(a + steps * kTileStep, last);
  waiting.finish();  // while the last tiles are still multiplied
  _tile_stored(0, c, kC);
  _tile_stored(1, c + 16, kC);
  if constexpr (kTwo) {
    _tile_stored(2, c + 16 * kTileLdc, kC);
    _tile_stored(3, c + 16 * kTileLdc + 16, kC);
  }
}

// Copies k columns of rows of x into the order of tiles: [rows / 32][steps][32][32], zeros behind k
// and behind the rows up to a multiple of 16.
inline void tile_rows(const BFloat16* x, int64_t stride, int64_t rows, int64_t k, BFloat16* to) {
  const int64_t whole = k / 32, steps = (k + 31) / 32;
  for (int64_t r = 0; r < (rows + 15) / 16 * 16; ++r) {
    BFloat16* line = to + r / 32 * steps * kTileStep + r % 32 * 32;
    if (r >= rows) {
      for (int64_t s = 0; s < steps; ++s, line += kTileStep) std::memset(line, 0, 64);
      continue;
    }
    const BFloat16* row = x + r * stride;
    for (int64_t s = 0; s < whole; ++s, line += kTileStep) std::memcpy(line, row + s * 32, 64);
    if (whole < steps) {
      std::memset(line, 0, 64);
      std::memcpy(line, row + whole * 32, static_cast<size_t>(k - whole * 32) * 2);
    }
  }
}

// See above. At most kTileRowsMost rows and kTilePanelsMost panels; `scratch` has kTileScratch
// bytes.
inline void gemm_block_tiles(const GemmBlock<BFloat16>& g, char* scratch) {
  auto* x = reinterpret_cast<BFloat16*>(scratch);
  auto* c = reinterpret_cast<float*>(scratch + kTileScratchX);
  alignas(64) BFloat16 last[kTileStep];
  const bool gated = g.epilogue->gated;
  const int64_t pieces = g.k <= kTileDepthOnce ? 1 : (g.k + kTileDepth - 1) / kTileDepth;
  const int64_t depth = ((g.k + pieces - 1) / pieces + 31) / 32 * 32;
  const int64_t blocks = (g.rows + 31) / 32, size = panel_size<BFloat16>(g.k);
  const int64_t even_k = (g.k + 1) / 2 * 2;
  Finisher<BFloat16> finishers[2];
  Waiting waiting;
  TileScope scope;
  scope.configure(32);
  for (int64_t d = 0; d < g.k; d += depth) {
    const int64_t n = g.k - d < depth ? g.k - d : depth, steps = n / 32;
    const bool is_last = d + depth >= g.k;
    tile_rows(g.x + d, g.x_stride, g.rows, n, x);
    tile_fence(x);
    const int64_t x_size = (n + 31) / 32 * kTileStep;
    const int64_t passes = blocks * (n + 31) / 32;  // steps for all rows
    Ahead next_x;
    if (!is_last)
      next_x =
          Ahead(g.x + d + depth, g.x_stride * 2,
                (depth < g.k - d - depth ? depth : g.k - d - depth) * 2, g.rows, passes * g.panels);
    for (int64_t p = 0; p < g.panels; ++p) {
      const BFloat16* w = g.w + p * size + d * kPanel;
      if (n % 32) {
        // The weight of a step that reaches behind K, with zeros in place of the next panel.
        const int64_t left = (even_k - d - steps * 32) * kPanel;
        std::memset(last, 0, sizeof(last));
        std::memcpy(last, w + steps * kTileStep, static_cast<size_t>(left) * 2);
        tile_fence(last);
      }
      Ahead next_w;
      if (p + 1 < g.panels) next_w = Ahead(w + size, 0, n * kPanel * 2, 1, passes);
      // A gate waits for its other half.
      const bool finishes = is_last && (!gated || p % 2);
      const int64_t first = gated ? p / 2 * 2 : p;
      Finisher<BFloat16>& finisher = finishers[(gated ? p / 2 : p) % 2];
      if (finishes) finisher = g.finisher(first, kPanel);
      for (int64_t b = 0; b < blocks; ++b) {
        const int64_t rows = g.rows - b * 32 < 32 ? g.rows - b * 32 : 32;
        // With one piece of K, C is needed until it is finished; two blocks stay in L1.
        const int64_t place = pieces > 1 ? p / 2 * blocks + b : gated ? b : b % 2;
        float* const block_c = c + place * 32 * kTileLdc;
        float* const to = block_c + p % 2 * kPanel;
        const BFloat16* tail = n % 32 ? last : nullptr;
        const bool add = d > 0 || g.addend;
        if (d == 0 && g.addend) {
          g.load_addend(p, kPanel, b * 32, rows, to, kTileLdc);
          tile_fence(to);
        }
        if (rows > 16)
          multiply_tiles<true>(x + b * x_size, w, steps, tail, to, add, waiting, next_w, next_x);
        else
          multiply_tiles<false>(x + b * x_size, w, steps, tail, to, add, waiting, next_w, next_x);
        if (finishes) {
          waiting = {&g, &finisher, gated ? block_c : to, first, b * 32, rows};
        }
      }
    }
  }
  waiting.finish();
}

#endif  // IPEX_HAVE_AMX

// With `scratch` (kTileScratch bytes, given for bfloat16 where there are tiles and many rows) at
// most kTileRowsMost rows and kTilePanelsMost panels.
template <class T>
void gemm_block(const GemmBlock<T>& g, [[maybe_unused]] char* scratch) {
#if IPEX_HAVE_AMX
  if constexpr (kIsBFloat16<T>) {
    if (scratch && g.k > 0) return gemm_block_tiles(g, scratch);
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
