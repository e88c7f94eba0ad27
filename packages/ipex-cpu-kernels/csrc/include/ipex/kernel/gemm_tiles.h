// SPDX-License-Identifier: Apache-2.0
// A block of a matrix product of bfloat16 on AMX tiles, for many rows.
#pragma once

#include "ipex/kernel/gemm_operands.h"
#include "ipex/kernel/gemm_sizes.h"

#if IPEX_HAVE_AMX

namespace ipex {
namespace {

// With many rows the tiles are what counts, and they are fed from the caches:
// - A block of x is copied into the order of the tiles, so that its lines lie side by side (rows
//   whose distance is a multiple of 4 KiB would fight for few places in L1); see PlainRows.
// - K is cut so that 32 rows of x, a panel of W and C fit L1: the panel stays there while the rows
//   stream from L2. C lies in L2 between the pieces of K. Up to kTileDepth there is one piece.
// - What is needed next (the following panel, the following piece of x) is fetched into L2.
// - A copy of x is streamed past the panel, which so stays in L1.
// - The vector units finish a block while tiles multiply the next one, in some pieces: a call for a
//   few rows each step costs more than the overlap gains.

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
  // Steps between two pieces and to the next one, rows of a piece.
  int64_t every = 0, left = 0, piece = 0;

  // The next block has so many steps.
  IPEX_INLINE void spread(int64_t steps) {
    const int64_t pieces = steps < kPieces ? steps + 1 : kPieces;
    every = left = (steps + kPieces - 1) / kPieces;
    piece = (rows + pieces - 1) / pieces;
  }
  IPEX_INLINE void step() {
    if (--left > 0 || rows <= 0) return;
    left = every;
    finish(piece < rows ? piece : rows);
  }
  void finish(int64_t count) {
    block->finish(*finisher, panel, c, kTileLdc, row, count);
    c += count * kTileLdc;
    row += count;
    rows -= count;
  }
  void finish() {
    if (rows > 0) finish(rows);
  }

  static constexpr int64_t kPieces = 4;
};

// 32 (or 16, !kTwo) rows, block `block` of x, times one panel. `last` is the weight of a step
// behind the `steps` whole ones, or null.
template <bool kTwo, class Rows>
void multiply_tiles(const Rows& x, int64_t block, const BFloat16* w, int64_t steps,
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
  const auto step = [&](int64_t s, const BFloat16* panel) IPEX_LAMBDA {
    const BFloat16* a = x.at(block, s);
    _tile_loadd(6, panel, kPanel * 4);
    if constexpr (Rows::kStreamed)
      _tile_stream_loadd(4, a, x.stride() * 2);
    else
      _tile_loadd(4, a, x.stride() * 2);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, panel + 32, kPanel * 4);
    _tile_dpbf16ps(1, 4, 7);
    if constexpr (kTwo) {
      if constexpr (Rows::kStreamed)
        _tile_stream_loadd(5, a + 16 * x.stride(), x.stride() * 2);
      else
        _tile_loadd(5, a + 16 * x.stride(), x.stride() * 2);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    next_w.step();
    next_x.step();
    waiting.step();
  };
  waiting.spread(steps);
  for (int64_t s = 0; s < steps; ++s) step(s, w + s * kTileStep);
  if (last) step(steps, last);
  waiting.finish();  // while the last tiles are still multiplied
  _tile_stored(0, c, kC);
  _tile_stored(1, c + 16, kC);
  if constexpr (kTwo) {
    _tile_stored(2, c + 16 * kTileLdc, kC);
    _tile_stored(3, c + 16 * kTileLdc + 16, kC);
  }
}

// Where the tiles get x from: its rows as they lie in memory, copied into the order of tiles.
class PlainRows {
 public:
  static constexpr int64_t kDepth = kTileDepth;
  static constexpr bool kStreamed = true;

  // `copy` has kTileScratchX bytes.
  PlainRows(const GemmBlock<BFloat16>& g, char* copy)
      : x_(g.x), x_stride_(g.x_stride), rows_(g.rows), copy_(reinterpret_cast<BFloat16*>(copy)) {}

  // The columns [d, d + k) are the next ones. They lie as [rows / 32][steps][32][32], with zeros
  // behind k and behind the rows up to a multiple of 16.
  void start(int64_t d, int64_t k) {
    const int64_t whole = k / 32;
    steps_ = (k + 31) / 32;
    for (int64_t r = 0; r < (rows_ + 15) / 16 * 16; ++r) {
      BFloat16* line = copy_ + r / 32 * steps_ * kTileStep + r % 32 * 32;
      if (r >= rows_) {
        for (int64_t s = 0; s < steps_; ++s, line += kTileStep) std::memset(line, 0, 64);
        continue;
      }
      const BFloat16* row = x_ + r * x_stride_ + d;
      for (int64_t s = 0; s < whole; ++s, line += kTileStep) std::memcpy(line, row + s * 32, 64);
      if (whole < steps_) {
        std::memset(line, 0, 64);
        std::memcpy(line, row + whole * 32, static_cast<size_t>(k - whole * 32) * 2);
      }
    }
    tile_fence(copy_);
  }
  // The first of the 32 rows of a block, at the columns of a step, and the distance of the rows.
  IPEX_INLINE const BFloat16* at(int64_t block, int64_t step) const {
    return copy_ + (block * steps_ + step) * kTileStep;
  }
  IPEX_INLINE int64_t stride() const { return 32; }
  // Fetches columns within `steps` steps.
  Ahead ahead(int64_t d, int64_t k, int64_t steps) const {
    return Ahead(x_ + d, x_stride_ * 2, k * 2, rows_, steps);
  }

 private:
  const BFloat16* x_;
  int64_t x_stride_, rows_;
  BFloat16* copy_;
  int64_t steps_ = 0;
};

// See above. At most kTileRowsMost rows and kTilePanelsMost panels; `c` has room for
// kTileScratchC bytes.
template <class Rows>
void gemm_block_tiles(const GemmBlock<BFloat16>& g, Rows& x, float* c) {
  alignas(64) BFloat16 last[kTileStep];
  const bool gated = g.epilogue->gated;
  const int64_t pieces = g.k <= Rows::kDepth ? 1 : (g.k + Rows::kDepth - 1) / Rows::kDepth;
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
    x.start(d, n);
    const int64_t passes = blocks * (n + 31) / 32;  // steps for all rows
    Ahead next_x;
    if (!is_last) {
      const int64_t left = g.k - d - depth;
      next_x = x.ahead(d + depth, left < depth ? left : depth, passes * g.panels);
    }
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
          multiply_tiles<true>(x, b, w, steps, tail, to, add, waiting, next_w, next_x);
        else
          multiply_tiles<false>(x, b, w, steps, tail, to, add, waiting, next_w, next_x);
        if (finishes) {
          waiting = {&g, &finisher, gated ? block_c : to, first, b * 32, rows};
        }
      }
    }
  }
  waiting.finish();
}

}  // namespace
}  // namespace ipex

#endif  // IPEX_HAVE_AMX
