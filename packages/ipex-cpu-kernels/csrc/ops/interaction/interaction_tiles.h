// SPDX-License-Identifier: Apache-2.0
// Interaction of up to 32 vectors of bfloat16 by AMX tiles: the products of one sample are one
// small matrix product, whose operands are put into the order of tiles while they are read.
#pragma once

#include "interaction.h"
#include "ipex/kernel/gemm.h"
#include "ipex/kernel/transpose.h"

#if IPEX_HAVE_AMX

namespace ipex {
namespace {

inline constexpr int64_t kTileSide = 16, kTilePairs = 32;

inline bool fits_tiles(const InteractionArgs& args) {
  return args.count > 1 && args.count <= kInteractionTileCount && args.dim >= kTilePairs &&
         args.dim <= kInteractionTileDim;
}

IPEX_INLINE const BFloat16* sample_row(const InteractionArgs& args, int64_t i, int64_t sample) {
  return static_cast<const BFloat16*>(args.inputs[i]) + sample * args.strides[i];
}

// Numbers [d, d + 32) of a row of `dim`, zeros behind it.
IPEX_INLINE __m512i load_pairs(const BFloat16* row, int64_t d, int64_t dim) {
  if (d + kTilePairs <= dim) return _mm512_loadu_si512(row + d);
  return _mm512_maskz_loadu_epi16(static_cast<__mmask32>((uint64_t{1} << (dim - d)) - 1), row + d);
}

// The tiles: 0..2 C, 4..5 the left operand, 6..7 the right one.
inline void interaction_tiles(const InteractionArgs& args, int64_t begin, int64_t end,
                              float* scratch) {
  const int64_t count = args.count, dim = args.dim, width = interaction_width(count, dim);
  const int64_t depth = (dim + kTilePairs - 1) / kTilePairs * kTilePairs;
  const int64_t halves = count > kTileSide ? 2 : 1;
  // The vectors as rows [32][depth], and their pairs as columns [depth / 2][32].
  auto* const left = reinterpret_cast<BFloat16*>(scratch);
  float* const right = scratch + kInteractionTileCount * depth / 2;
  float* const c = right + kInteractionTileCount * depth / 2;
  constexpr int64_t ldc = kInteractionTileCount;
  TileScope scope;
  scope.configure(32);
  for (int64_t sample = begin; sample < end; ++sample) {
    BFloat16* const out = static_cast<BFloat16*>(args.out) + sample * width;
    for (int64_t half = 0; half < halves; ++half) {
      const int64_t first = half * kTileSide;
      for (int64_t d = 0; d < depth; d += kTilePairs) {
        f32v rows[kLanes];
#pragma GCC unroll 16
        for (int64_t i = 0; i < kTileSide; ++i) {
          const __m512i pairs = first + i < count
                                    ? load_pairs(sample_row(args, first + i, sample), d, dim)
                                    : _mm512_setzero_si512();
          _mm512_store_si512(left + (first + i) * depth + d, pairs);
          rows[i] = as_float(reinterpret_cast<i32v>(pairs));
        }
        transpose(rows);
#pragma GCC unroll 16
        for (int64_t i = 0; i < kTileSide; ++i)
          store(right + (d / 2 + i) * kInteractionTileCount + first, rows[i]);
      }
    }
    tile_fence(scratch);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    for (int64_t d = 0; d < depth; d += kTilePairs) {
      const float* b = right + d / 2 * kInteractionTileCount;
      _tile_loadd(4, left + d, depth * 2);
      _tile_loadd(6, b, kInteractionTileCount * 4);
      _tile_dpbf16ps(0, 4, 6);
      if (halves == 1) continue;
      _tile_loadd(5, left + kTileSide * depth + d, depth * 2);
      _tile_dpbf16ps(1, 5, 6);
      _tile_loadd(7, b + kTileSide, kInteractionTileCount * 4);
      _tile_dpbf16ps(2, 5, 7);
    }
    _tile_stored(0, c, ldc * 4);
    if (halves == 2) {
      _tile_stored(1, c + kTileSide * ldc, ldc * 4);
      _tile_stored(2, c + kTileSide * ldc + kTileSide, ldc * 4);
    }
    __builtin_memcpy(out, sample_row(args, 0, sample), static_cast<size_t>(dim) * 2);
    BFloat16* to = out + dim;
    for (int64_t i = 1; i < count; to += i, ++i) {
      store_n(to, load(c + i * ldc), i < kTileSide ? i : kTileSide);
      if (i > kTileSide) store_n(to + kTileSide, load(c + i * ldc + kTileSide), i - kTileSide);
    }
  }
}

}  // namespace
}  // namespace ipex

#endif  // IPEX_HAVE_AMX
