// SPDX-License-Identifier: Apache-2.0
// A few rows in bfloat16 on AMX tiles: codes become bfloat16 by the same look-ups as in
// woq_few_bf16.h, but are stored as operands of the tiles, for up to 32 rows at once. Sums leave
// the tiles at the end of a group, to be scaled.
#pragma once

#include "ipex/kernel/gemm.h"
#include "woq_linear/woq_few_bf16.h"

#if IPEX_HAVE_AMX

namespace ipex {
namespace {

// Elements along K that are decoded at a time: the operands of two strips stay in L1.
inline constexpr int64_t kTileCodes = 128;

// Stores the codes [k, k + count) of a strip, `count` a multiple of 32: [plane][count / 2][16][2].
// int8 codes are two planes, 16 * high + low.
template <bool kNibbles>
IPEX_INLINE void codes_to_tiles(const char* weights, int64_t k, int64_t count, __m512i low,
                                __m512i high, uint16_t* to) {
  constexpr int kBlockK = kNibbles ? 8 : 4;
  for (int64_t i = 0; i < count; i += kBlockK) {
    const char* block = weights + (k + i) / kBlockK * kBlockBytes;
    __builtin_prefetch(block + 4096);
    const __m512i word = _mm512_loadu_si512(block);
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      const __m512i at = j ? _mm512_srli_epi16(word, static_cast<unsigned>(4 * j)) : word;
      const int64_t pair = i / 2 + (kNibbles ? j : j / 2);
      const int64_t plane = kNibbles ? 0 : j % 2 * kTileCodes * kStrip;
      _mm512_store_si512(to + plane + pair * 2 * kStrip,
                         _mm512_permutexvar_epi16(at, !kNibbles && j % 2 ? high : low));
    }
  }
}

// c[row][strip][16] of `rows` rows, at most 32, and two strips. `scope` is configured for them.
template <bool kNibbles>
void few_tiles(const WoqLinearArgs& args, const char* const* strips, int64_t row, int64_t rows,
               float* c) {
  constexpr int kPlanes = kNibbles ? 1 : 2;
  alignas(64) uint16_t codes[2][kPlanes * kTileCodes * kStrip];
  alignas(64) float sums[32 * 2 * kStrip];
  const PackedHeader& header = args.header;
  const __m512i low = lookup_table(kNibbles ? nibble_values(header) : kLowNibbles);
  const __m512i high = kNibbles ? low : lookup_table(kHighNibbles);
  const auto* x = static_cast<const BFloat16*>(args.operand) + row * args.operand_stride;
  const int64_t x_stride = args.operand_stride * 2;
  const bool two = rows > 16, has_zeros = header.zero_kind != kZeroNone;
  const int64_t end = args.at.k_padded;
  tile_fence(x);
  for (int64_t g = 0, k = 0; g < args.at.groups; ++g) {
    const int64_t next = (g + 1) * header.group;
    const int64_t group_end = g + 1 < args.at.groups ? next : end;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    while (k < group_end) {
      const int64_t count = group_end - k < kTileCodes ? group_end - k : kTileCodes;
      for (int s = 0; s < 2; ++s)
        codes_to_tiles<kNibbles>(strips[s] + args.at.weights, k, count, low, high, codes[s]);
      tile_fence(codes);
      for (int64_t i = 0; i < count; i += 32) {
        _tile_loadd(4, x + k + i, x_stride);
        if (two) _tile_loadd(5, x + 16 * args.operand_stride + k + i, x_stride);
        for (int plane = 0; plane < kPlanes; ++plane) {
          const int64_t at = (plane * kTileCodes + i) * kStrip;
          _tile_loadd(6, codes[0] + at, 64);
          _tile_dpbf16ps(0, 4, 6);
          _tile_loadd(7, codes[1] + at, 64);
          _tile_dpbf16ps(1, 4, 7);
          if (!two) continue;
          _tile_dpbf16ps(2, 5, 6);
          _tile_dpbf16ps(3, 5, 7);
        }
      }
      k += count;
    }
    constexpr int64_t kStride = 2 * kStrip * 4;
    _tile_stored(0, sums, kStride);
    _tile_stored(1, sums + kStrip, kStride);
    if (two) {
      _tile_stored(2, sums + 16 * 2 * kStrip, kStride);
      _tile_stored(3, sums + 16 * 2 * kStrip + kStrip, kStride);
    }
    for (int s = 0; s < 2; ++s) {
      const f32v scale = scale_vector(args.at, header, strips[s], g, 0);
      const f32v zeros = has_zeros ? zero_vector(args.at, header, strips[s], g, 0, 0.0f) : zero();
      for (int64_t r = 0; r < rows; ++r) {
        f32v value = load(sums + (r * 2 + s) * kStrip);
        if (has_zeros) value = fnma(set1(args.sums[(row + r) * args.at.groups + g]), zeros, value);
        float* to = c + r * kFewColumns + s * kStrip;
        store(to, g == 0 ? scale * value : fma(scale, value, load(to)));
      }
    }
  }
}

}  // namespace
}  // namespace ipex

#endif  // IPEX_HAVE_AMX
