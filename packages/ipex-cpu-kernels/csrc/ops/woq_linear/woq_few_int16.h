// SPDX-License-Identifier: Apache-2.0
// Few rows with activations as 16-bit fixed point: the codes of int4 and int8 weights are the other
// operand of a multiply-add of 16-bit pairs, without any conversion. The activations of a chunk of
// K share a scale, so they are within 2^-16 of the largest of them: finer than float16 and bfloat16
// numbers of that size are.
#pragma once

#include "woq_linear/woq_few_float.h"

namespace ipex {
namespace {

// acc + the sums of the products of both 16-bit halves.
IPEX_INLINE i32v add_pairs(i32v acc, i32v a, i32v b) {
#if IPEX_HAVE_AVX512_VNNI
  return reinterpret_cast<i32v>(_mm512_dpwssd_epi32(raw(acc), raw(a), raw(b)));
#elif IPEX_HAVE_AVX512
  return acc + reinterpret_cast<i32v>(_mm512_madd_epi16(raw(a), raw(b)));
#elif IPEX_HAVE_AVX_VNNI
  return reinterpret_cast<i32v>(_mm256_dpwssd_avx_epi32(raw(acc), raw(a), raw(b)));
#elif IPEX_HAVE_AVX2
  return acc + reinterpret_cast<i32v>(_mm256_madd_epi16(raw(a), raw(b)));
#else
  return acc + reinterpret_cast<i32v>(_mm_madd_epi16(raw(a), raw(b)));
#endif
}

template <bool kNibbles, int kRows, int kStrips>
void few_int16(const WoqLinearArgs& args, const char* const* strips, int64_t row, float* c) {
  constexpr int kBlockK = kNibbles ? 8 : 4;
  constexpr int kPairs = kBlockK / 2;
  constexpr int kVectors = kStrips * kStripVectors;
  const PackedHeader& header = args.header;
  const auto* x = static_cast<const int16_t*>(args.operand) + row * args.operand_stride;
  const bool has_zeros = header.zero_kind != kZeroNone;
  // int8 codes are read as code + 128; int4 codes without zero points stand for code - 8.
  const int32_t implied = !kNibbles ? 128 : has_zeros ? 0 : 8;
  for (int r = 0; r < kRows; ++r)
    for (int64_t i = 0; i < kStrips * kStrip; i += kLanes) store(c + r * kFewColumns + i, zero());
  const char* weights[kStrips];
  for (int s = 0; s < kStrips; ++s) weights[s] = strips[s] + args.at.weights;
  const int64_t end = args.at.k_padded;
  for (int64_t chunk = 0, k = 0; chunk < args.chunks; ++chunk) {
    const int64_t group = k / header.group, next = (chunk + 1) * args.chunk;
    const int64_t chunk_end = next < end ? next : end;
    i32v acc[kRows][kVectors];
    for (auto& of_row : acc)
      for (auto& sum : of_row) sum = iset1(0);
    for (; k < chunk_end; k += kBlockK) {
      i32v word[kVectors];
#pragma GCC unroll 4
      for (int s = 0; s < kStrips; ++s)
#pragma GCC unroll 4
        for (int v = 0; v < kStripVectors; ++v) {
          i32v& w = word[s * kStripVectors + v];
          w = load_words(weights[s] + k / kBlockK * kBlockBytes + v * kLanes * 4);
          if constexpr (!kNibbles) w = w ^ iset1(static_cast<int32_t>(0x80808080));
        }
#pragma GCC unroll 4
      for (int j = 0; j < kPairs; ++j) {
        i32v codes[kVectors];
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v)
          codes[v] = kNibbles ? (word[v] >> (4 * j)) & iset1(0x000f000f)
                              : (word[v] >> (8 * j)) & iset1(0x00ff00ff);
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
          int32_t pair;
          __builtin_memcpy(&pair, x + r * args.operand_stride + k + 2 * j, sizeof(pair));
          const i32v factor = iset1(pair);
#pragma GCC unroll 8
          for (int v = 0; v < kVectors; ++v) acc[r][v] = add_pairs(acc[r][v], codes[v], factor);
        }
      }
    }
    for (int s = 0; s < kStrips; ++s) {
#pragma GCC unroll 4
      for (int v = 0; v < kStripVectors; ++v) {
        const f32v scale = scale_vector(args.at, header, strips[s], group, v);
        const f32v zeros = zero_vector(args.at, header, strips[s], group, v, 0.0f);
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
          const int64_t place = (row + r) * args.chunks + chunk;
          const float sum = args.chunk_sums[place];
          const i32v taken = iset1(implied * static_cast<int32_t>(sum));
          f32v value = to_float(acc[r][s * kStripVectors + v] - taken);
          if (has_zeros) value = fnma(set1(sum), zeros, value);
          float* to = c + r * kFewColumns + s * kStrip + v * kLanes;
          store(to, fma(scale * set1(args.chunk_scales[place]), value, load(to)));
        }
      }
    }
  }
}

}  // namespace
}  // namespace ipex
