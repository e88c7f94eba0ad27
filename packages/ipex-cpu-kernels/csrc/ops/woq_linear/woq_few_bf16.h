// SPDX-License-Identifier: Apache-2.0
// Few rows in bfloat16: codes become bfloat16 by a look-up of 16-bit lanes and are multiplied in
// pairs. One kernel for every 4-bit code; int8 codes are two nibbles, 16 * high + low, each exact.
#pragma once

#include "woq_linear/woq_few_float.h"

#if IPEX_HAVE_AVX512_BF16

namespace ipex {
namespace {

// Look-ups take the low five bits of a lane and the fifth belongs to the next code: the table is
// there twice.
IPEX_INLINE __m512i lookup_table(const float* values) {
  const __m256i half = f32_to_bf16(loadu(values));
  return _mm512_broadcast_i64x4(half);
}

inline constexpr float kLowNibbles[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
inline constexpr float kHighNibbles[16] = {0,    16,   32,  48,  64,  80,  96,  112,
                                           -128, -112, -96, -80, -64, -48, -32, -16};

// c[row][strip][16] of kRows rows and kStrips strips.
template <bool kNibbles, int kRows, int kStrips>
void few_bf16(const WoqLinearArgs& args, const char* const* strips, int64_t row, float* c) {
  constexpr int kBlockK = kNibbles ? 8 : 4;
  // One row has too few sums to hide the latency of the products.
  constexpr int kSums = kRows == 1 ? 2 : 1;
  const PackedHeader& header = args.header;
  const __m512i low = lookup_table(kNibbles ? nibble_values(header) : kLowNibbles);
  const __m512i high = kNibbles ? low : lookup_table(kHighNibbles);
  const auto* x = static_cast<const BFloat16*>(args.operand) + row * args.operand_stride;
  const bool has_zeros = header.zero_kind != kZeroNone;
  // The result stays in registers where there are enough.
  constexpr bool kKept = kRows * kStrips <= 8;
  f32v total[kKept ? kRows : 1][kStrips];
  for (auto& of_row : total)
    for (auto& one : of_row) one = zero();
  if constexpr (!kKept)
    for (int r = 0; r < kRows; ++r)
      for (int s = 0; s < kStrips; ++s) store(c + r * kFewColumns + s * kStrip, zero());
  const char* weights[kStrips];
  for (int s = 0; s < kStrips; ++s) weights[s] = strips[s] + args.at.weights;
  const int64_t end = args.at.k_padded;
  for (int64_t g = 0, k = 0; g < args.at.groups; ++g) {
    const int64_t next = (g + 1) * header.group;
    const int64_t group_end = next < end ? next : end;
    f32v acc[kSums][kRows][kStrips];
    for (auto& sum : acc)
      for (auto& of_row : sum)
        for (auto& one : of_row) one = zero();
    fetch_next_strips<kStrips>(args.at, strips, g, args.at.groups);
    for (; k < group_end; k += kBlockK) {
      __m512i word[kStrips];
#pragma GCC unroll 4
      for (int s = 0; s < kStrips; ++s) {
        const char* block = weights[s] + k / kBlockK * kBlockBytes;
        if constexpr (IPEX_HAVE_AMX) __builtin_prefetch(block + 4096);
        word[s] = _mm512_loadu_si512(block);
      }
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        __m512bh value[kStrips];
#pragma GCC unroll 4
        for (int s = 0; s < kStrips; ++s) {
          const __m512i at = j ? _mm512_srli_epi16(word[s], static_cast<unsigned>(4 * j)) : word[s];
          value[s] = reinterpret_cast<__m512bh>(
              _mm512_permutexvar_epi16(at, !kNibbles && j % 2 ? high : low));
        }
        const int64_t pair = k + (kNibbles ? 2 * j : j / 2 * 2);
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
          int32_t bits;
          __builtin_memcpy(&bits, x + r * args.operand_stride + pair, sizeof(bits));
          const auto factor = reinterpret_cast<__m512bh>(_mm512_set1_epi32(bits));
          auto& sum = acc[j % kSums][r];
#pragma GCC unroll 4
          for (int s = 0; s < kStrips; ++s) sum[s] = _mm512_dpbf16_ps(sum[s], value[s], factor);
        }
      }
    }
#pragma GCC unroll 4
    for (int s = 0; s < kStrips; ++s) {
      const f32v scale = scale_vector(args.at, header, strips[s], g, 0);
      const f32v zeros = has_zeros ? zero_vector(args.at, header, strips[s], g, 0, 0.0f) : zero();
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        f32v value = acc[0][r][s];
        if constexpr (kSums == 2) value = value + acc[1][r][s];
        if (has_zeros) value = fnma(set1(args.sums[(row + r) * args.at.groups + g]), zeros, value);
        if constexpr (kKept) {
          total[r][s] = fma(scale, value, total[r][s]);
        } else {
          float* to = c + r * kFewColumns + s * kStrip;
          store(to, fma(scale, value, load(to)));
        }
      }
    }
  }
  if constexpr (kKept)
    for (int r = 0; r < kRows; ++r)
      for (int s = 0; s < kStrips; ++s) store(c + r * kFewColumns + s * kStrip, total[r][s]);
}

}  // namespace
}  // namespace ipex

#endif  // IPEX_HAVE_AVX512_BF16
