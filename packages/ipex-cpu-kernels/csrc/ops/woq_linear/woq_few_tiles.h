// SPDX-License-Identifier: Apache-2.0
// A few rows in bfloat16 on AMX tiles: codes become bfloat16 by the same look-ups as in
// woq_few_bf16.h, but are stored as operands of the tiles, for up to 32 rows at once. Sums leave
// the tiles at the end of a group, to be scaled. Codes are decoded some steps before they are
// multiplied, and sums scaled some groups after: what tiles and vectors hand each other has reached
// L1 by then.
#pragma once

#include "ipex/kernel/gemm.h"
#include "woq_linear/woq_few_bf16.h"

#if IPEX_HAVE_AMX

namespace ipex {
namespace {

// Elements along K of a step: one tile.
inline constexpr int64_t kTileK = 32;
// Steps that decoding is ahead; decoded steps that are kept.
inline constexpr int64_t kTileLag = 2, kTileRing = 4;
// Groups whose sums wait to be scaled.
inline constexpr int64_t kTileGroups = 4;

// Stores a step of one strip: [plane][kTileK / 2][16][2]. int8 codes are two planes. What lies
// `ahead` is fetched into L2.
template <uint32_t kFormat>
IPEX_INLINE void codes_to_tiles(const Bf16Codes<kFormat>& codes, const char* block, int64_t ahead,
                                uint16_t* to) {
  constexpr int kBlockK = Bf16Codes<kFormat>::kBlockK, kBlocks = kTileK / kBlockK;
  constexpr int kValues = Bf16Codes<kFormat>::kValues;
  const auto decode = [&](auto rare) IPEX_LAMBDA {
#pragma GCC unroll 8
    for (int b = 0; b < kBlocks; ++b) {
      const char* at = block + b * kBlockBytes;
      __builtin_prefetch(at + 4096);
      if (ahead) __builtin_prefetch(at + ahead, 0, 2);
      __m512i value[kValues];
      codes.template decode<decltype(rare)::kValue>(_mm512_loadu_si512(at), value);
#pragma GCC unroll 4
      for (int j = 0; j < kValues; ++j) {
        const int64_t pair = b * kBlockK / 2 + Bf16Codes<kFormat>::pair(j);
        const int64_t plane = Bf16Codes<kFormat>::plane(j) * kTileK * kStrip;
        _mm512_store_si512(to + plane + pair * 2 * kStrip, value[j]);
      }
    }
  };
  const char* blocks[kBlocks];
  for (int b = 0; b < kBlocks; ++b) blocks[b] = block + b * kBlockBytes;
  if (Bf16Codes<kFormat>::template has_rare<kBlocks>(blocks))
    decode(Known<true>{});
  else
    decode(Known<false>{});
}

// The product of up to 16 rows and four strips, or of up to 32 rows and two.
template <uint32_t kFormat, bool kTwo>
class FewTiles {
 public:
  static constexpr int kStrips = kTwo ? 2 : 4;

  FewTiles(const WoqLinearArgs& args, const char* const* strips, int64_t row, int64_t rows,
           int64_t ahead, float* c)
      : args_(args),
        codes_(args.header),
        strips_(strips),
        row_(row),
        rows_(rows),
        ahead_(ahead),
        c_(c) {}

  // c[row][strip][16].
  void run() {
    const auto* x = static_cast<const BFloat16*>(args_.operand) + row_ * args_.operand_stride;
    const int64_t steps = args_.at.k_padded / kTileK, groups = args_.at.groups;
    const int64_t group_steps = groups > 1 ? args_.header.group / kTileK : steps;
    int64_t group = 0, scaled = 0, left = group_steps < steps ? group_steps : steps;
    clear();
    tile_fence(x);
    for (int64_t s = -kTileLag; s < steps; ++s) {
      if (s + kTileLag < steps) decode(s + kTileLag, steps);
      if (s < 0) continue;
      multiply(x + s * args_.operand_step, ring_[s % kTileRing]);
      if (--left > 0) continue;
      take(sums_[group % kTileGroups]);
      ++group;
      left = group_steps < steps - s - 1 ? group_steps : steps - s - 1;
      // Groups of one or two steps are scaled three at a time: C is read and written less often.
      if (group_steps > 2 && group - scaled == 2)
        scale<1>(scaled++);
      else if (group - scaled == kTileGroups)
        scale<kTileGroups - 1>(scaled), scaled += kTileGroups - 1;
    }
    while (scaled < group) scale<1>(scaled++);
  }

 private:
  static constexpr int kPlanes = Bf16Codes<kFormat>::kPlanes;
  static constexpr int64_t kRows = kTwo ? 32 : 16;
  static constexpr int64_t kStride = kStrips * kStrip;

  IPEX_INLINE void decode(int64_t step, int64_t steps) {
    if (!ahead_) fetch_next_strips<kStrips>(args_.at, strips_, step, steps);
    const int64_t at =
        args_.at.weights + step * (kTileK / Bf16Codes<kFormat>::kBlockK) * kBlockBytes;
#pragma GCC unroll 4
    for (int s = 0; s < kStrips; ++s)
      codes_to_tiles(codes_, strips_[s] + at, ahead_, ring_[step % kTileRing][s]);
    tile_fence(ring_);
  }

  static IPEX_INLINE void clear() {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }

  IPEX_INLINE void multiply(const BFloat16* x,
                            const uint16_t (*w)[kPlanes * kTileK * kStrip]) const {
    const int64_t stride = args_.operand_stride * 2;
    _tile_loadd(4, x, stride);
    if constexpr (kTwo) _tile_loadd(5, x + 16 * args_.operand_stride, stride);
#pragma GCC unroll 2
    for (int64_t plane = 0; plane < kPlanes; ++plane) {
      const int64_t at = plane * kTileK * kStrip;
      _tile_loadd(6, w[0] + at, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, w[1] + at, 64);
      _tile_dpbf16ps(1, 4, 7);
      if constexpr (kTwo) {
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      } else {
        _tile_loadd(5, w[2] + at, 64);
        _tile_dpbf16ps(2, 4, 5);
        _tile_loadd(6, w[3] + at, 64);
        _tile_dpbf16ps(3, 4, 6);
      }
    }
  }

  // Sums of a group out of the tiles.
  static IPEX_INLINE void take(float* to) {
    _tile_stored(0, to, kStride * 4);
    _tile_stored(1, to + kStrip, kStride * 4);
    _tile_stored(2, to + (kTwo ? 16 * kStride : 2 * kStrip), kStride * 4);
    _tile_stored(3, to + (kTwo ? 16 * kStride + kStrip : 3 * kStrip), kStride * 4);
    tile_fence(to);
    clear();
  }

  template <int kCount>
  IPEX_INLINE void scale(int64_t group) {
    const bool has_zeros = args_.header.zero_kind != kZeroNone;
#pragma GCC unroll 4
    for (int s = 0; s < kStrips; ++s) {
      f32v scales[kCount], zeros[kCount];
#pragma GCC unroll 3
      for (int i = 0; i < kCount; ++i) {
        scales[i] = scale_vector(args_.at, args_.header, strips_[s], group + i, 0) *
                    set1(Bf16Codes<kFormat>::kScale);
        zeros[i] = zero();
        if (has_zeros)
          zeros[i] = zero_vector(args_.at, args_.header, strips_[s], group + i, 0, 0.0f);
      }
      for (int64_t r = 0; r < rows_; ++r) {
        float* to = c_ + r * kFewColumns + s * kStrip;
        f32v total = group == 0 ? zero() : load(to);
#pragma GCC unroll 3
        for (int i = 0; i < kCount; ++i) {
          f32v value = load(sums_[(group + i) % kTileGroups] + r * kStride + s * kStrip);
          if (has_zeros)
            value =
                fnma(set1(args_.sums[(row_ + r) * args_.at.groups + group + i]), zeros[i], value);
          total = fma(scales[i], value, total);
        }
        store(to, total);
      }
    }
  }

  const WoqLinearArgs& args_;
  const Bf16Codes<kFormat> codes_;
  const char* const* strips_;
  const int64_t row_, rows_, ahead_;
  float* const c_;
  alignas(64) uint16_t ring_[kTileRing][kStrips][kPlanes * kTileK * kStrip];
  alignas(64) float sums_[kTileGroups][kRows * kStride];
};

}  // namespace
}  // namespace ipex

#endif  // IPEX_HAVE_AMX
