// SPDX-License-Identifier: Apache-2.0
// One or two rows of fp8 weights where float16 numbers can be converted but not multiplied: the
// bits of a code are moved to their place in a float16, subnormal ones too, and the processor
// converts. Two neighbors of K come out side by side, so that sums are kept for both and added at
// the end.
#pragma once

#include "woq_linear/woq_few_float.h"

#if IPEX_HAVE_AVX2 && !IPEX_HAVE_AVX512

namespace ipex {
namespace {

// What the float16 of a code is to be multiplied by.
template <uint32_t kFormat>
inline constexpr float kHalfUnit = kFormat == kFormatFp8E4M3 ? 256.0f : 1.0f;

// The codes in the upper bytes of 16-bit lanes as float16 numbers. No NaN or infinity.
template <uint32_t kFormat>
IPEX_INLINE __m256i codes_to_half(__m256i lanes) {
  if constexpr (kFormat == kFormatFp8E4M3)
    return _mm256_and_si256(_mm256_srai_epi16(lanes, 1),
                            _mm256_set1_epi16(static_cast<int16_t>(0xbf80)));
  return _mm256_and_si256(lanes, _mm256_set1_epi16(static_cast<int16_t>(0xff00)));
}

// x[0] and x[1] in turn.
IPEX_INLINE f32v pair_of(const float* x) {
  double both;
  __builtin_memcpy(&both, x, sizeof(both));
  return reinterpret_cast<f32v>(_mm256_set1_pd(both));
}

// c[row][strip][16] of kRows rows and kStrips strips.
template <uint32_t kFormat, int kRows, int kStrips>
void few_half(const WoqLinearArgs& args, const char* const* strips, int64_t row, float* c) {
  constexpr int kVectors = kStrips * kStripVectors;
  const PackedHeader& header = args.header;
  const float* x = static_cast<const float*>(args.operand) + row * args.operand_stride;
  for (int r = 0; r < kRows; ++r)
    for (int64_t i = 0; i < kStrips * kStrip; i += kLanes) store(c + r * kFewColumns + i, zero());
  const char* weights[kStrips];
  for (int s = 0; s < kStrips; ++s) weights[s] = strips[s] + args.at.weights;
  const int64_t end = args.at.k_padded, stride = args.operand_stride;
  const NextStrips following(args.at, args.at.groups);
  for (int64_t group = 0, k = 0; group < args.at.groups; ++group) {
    const int64_t group_end = group + 1 < args.at.groups ? (group + 1) * header.group : end;
    following.fetch<kStrips>(strips, group);
    f32v acc[kRows][kVectors][2];  // columns 0 to 3 and 4 to 7 of a vector
    for (auto& of_row : acc)
      for (auto& of_vector : of_row) of_vector[0] = of_vector[1] = zero();
    for (; k < group_end; k += 4) {
      const int64_t at = k / 4 * kBlockBytes;
#pragma GCC unroll 4
      for (int s = 0; s < kStrips; ++s) __builtin_prefetch(weights[s] + at + kWeightsAhead);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        const __m256i word =
            raw(load_words(weights[v / kStripVectors] + at + v % kStripVectors * kLanes * 4));
        const __m256i first = codes_to_half<kFormat>(_mm256_slli_epi16(word, 8));
        const __m256i second = codes_to_half<kFormat>(word);
        const f32v values[2][2] = {{f16_to_f32(_mm256_castsi256_si128(first)),
                                    f16_to_f32(_mm256_extracti128_si256(first, 1))},
                                   {f16_to_f32(_mm256_castsi256_si128(second)),
                                    f16_to_f32(_mm256_extracti128_si256(second, 1))}};
#pragma GCC unroll 2
        for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 2
          for (int j = 0; j < 2; ++j) {
            const f32v factor = pair_of(x + r * stride + k + 2 * j);
            acc[r][v][0] = fma(values[j][0], factor, acc[r][v][0]);
            acc[r][v][1] = fma(values[j][1], factor, acc[r][v][1]);
          }
      }
    }
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      const f32v scale =
          scale_vector(args.at, header, strips[v / kStripVectors], group, v % kStripVectors) *
          set1(kHalfUnit<kFormat>);
#pragma GCC unroll 2
      for (int r = 0; r < kRows; ++r) {
        const __m256d sums = _mm256_castps_pd(_mm256_hadd_ps(acc[r][v][0], acc[r][v][1]));
        const f32v value = _mm256_castpd_ps(_mm256_permute4x64_pd(sums, 0xd8));
        float* to = c + r * kFewColumns + v * kLanes;
        store(to, fma(scale, value, load(to)));
      }
    }
  }
}

}  // namespace
}  // namespace ipex

#endif  // IPEX_HAVE_AVX2 && !IPEX_HAVE_AVX512
