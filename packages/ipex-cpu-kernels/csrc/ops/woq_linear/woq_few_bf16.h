// SPDX-License-Identifier: Apache-2.0
// Few rows in bfloat16: codes become bfloat16, mostly by a look-up of 16-bit lanes, and are
// multiplied in pairs.
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

template <bool kBool>
struct Known {
  static constexpr bool kValue = kBool;
};

// A 64-byte block as vectors of bfloat16 pairs: value j holds the elements 2 pair(j) and
// 2 pair(j) + 1 of the 16 columns, in plane plane(j). The weight is the sum of the planes times
// kScale.
template <uint32_t kFormat>
struct Bf16Codes;

// 4-bit codes.
template <>
struct Bf16Codes<kFormatNf4> {
  static constexpr int kBlockK = 8, kValues = 4, kPlanes = 1;
  static constexpr float kScale = 1.0f;
  static constexpr int pair(int j) { return j; }
  static constexpr int plane(int) { return 0; }

  template <int kBlocks>
  static IPEX_INLINE bool has_rare(const char* const (&)[kBlocks]) {
    return false;
  }
  explicit Bf16Codes(const PackedHeader& header) : table_(lookup_table(nibble_values(header))) {}
  template <bool kRare>
  IPEX_INLINE void decode(__m512i word, __m512i (&value)[4]) const {
    value[0] = _mm512_permutexvar_epi16(word, table_);
#pragma GCC unroll 4
    for (int j = 1; j < 4; ++j)
      value[j] =
          _mm512_permutexvar_epi16(_mm512_srli_epi16(word, static_cast<unsigned>(4 * j)), table_);
  }

 private:
  __m512i table_;
};

inline constexpr float kLowNibbles[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
inline constexpr float kHighNibbles[16] = {0,    16,   32,  48,  64,  80,  96,  112,
                                           -128, -112, -96, -80, -64, -48, -32, -16};

// int8: two nibbles, 16 * high + low, each exact.
template <>
struct Bf16Codes<kFormatInt8> {
  static constexpr int kBlockK = 4, kValues = 4, kPlanes = 2;
  static constexpr float kScale = 1.0f;
  static constexpr int pair(int j) { return j / 2; }
  static constexpr int plane(int j) { return j % 2; }

  template <int kBlocks>
  static IPEX_INLINE bool has_rare(const char* const (&)[kBlocks]) {
    return false;
  }
  explicit Bf16Codes(const PackedHeader&)
      : low_(lookup_table(kLowNibbles)), high_(lookup_table(kHighNibbles)) {}
  template <bool kRare>
  IPEX_INLINE void decode(__m512i word, __m512i (&value)[4]) const {
    value[0] = _mm512_permutexvar_epi16(word, low_);
#pragma GCC unroll 4
    for (int j = 1; j < 4; ++j)
      value[j] = _mm512_permutexvar_epi16(_mm512_srli_epi16(word, static_cast<unsigned>(4 * j)),
                                          j % 2 ? high_ : low_);
  }

 private:
  __m512i low_, high_;
};

inline constexpr float kE4M3Tiny[16] = {0x0p-65f, 0x1p-65f, 0x2p-65f, 0x3p-65f,
                                        0x4p-65f, 0x5p-65f, 0x6p-65f, 0x7p-65f};
inline constexpr float kE5M2Tiny[16] = {0x0p-64f, 0x1p-64f, 0x2p-64f, 0x3p-64f};

// fp8 without NaN and infinity: the bits are moved to their place in a bfloat16, with 64 added to
// the exponent, which kScale makes up for. Subnormal numbers are looked up; a block seldom has one.
template <uint32_t kFormat>
  requires(kFormat == kFormatFp8E4M3 || kFormat == kFormatFp8E5M2)
struct Bf16Codes<kFormat> {
  static constexpr bool kE4 = kFormat == kFormatFp8E4M3;
  static constexpr int kBlockK = 4, kValues = 2, kPlanes = 1;
  static constexpr float kScale = kE4 ? 0x1p56f : 0x1p48f;
  static constexpr int pair(int j) { return j; }
  static constexpr int plane(int) { return 0; }

  explicit Bf16Codes(const PackedHeader&) : tiny_(lookup_table(kE4 ? kE4M3Tiny : kE5M2Tiny)) {}
  // Whether one of kBlocks blocks has a number that is zero or subnormal. Asked for many codes at
  // once: the processor cannot foresee the answer for a few.
  template <int kBlocks>
  static IPEX_INLINE bool has_rare(const char* const (&blocks)[kBlocks]) {
    const __m512i exponents = _mm512_set1_epi8(kE4 ? 0x78 : 0x7c);
    __m512i least = exponents;
#pragma GCC unroll 8
    for (int b = 0; b < kBlocks; ++b)
      least = _mm512_min_epu8(least, _mm512_and_si512(exponents, _mm512_loadu_si512(blocks[b])));
    return _mm512_testn_epi8_mask(least, least) != 0;
  }
  template <bool kRare>
  IPEX_INLINE void decode(__m512i word, __m512i (&value)[2]) const {
    value[0] = place(_mm512_slli_epi16(word, 8));
    value[1] = place(word);
    if constexpr (kRare) {
      value[0] = with_tiny(value[0]);
      value[1] = with_tiny(value[1]);
    }
  }

 private:
  // The code in the upper byte of each lane.
  static IPEX_INLINE __m512i place(__m512i lanes) {
    const __m512i kept = _mm512_set1_epi16(static_cast<int16_t>(kE4 ? 0x87f0 : 0x8fe0));
    // (a & b) | c
    return _mm512_ternarylogic_epi32(_mm512_srai_epi16(lanes, kE4 ? 4 : 3), kept,
                                     _mm512_set1_epi16(0x2000), 0xea);
  }
  IPEX_INLINE __m512i with_tiny(__m512i v) const {
    const __mmask32 tiny = _mm512_testn_epi16_mask(v, _mm512_set1_epi16(kE4 ? 0x0780 : 0x0f80));
    const __m512i found = _mm512_permutexvar_epi16(_mm512_srli_epi16(v, kE4 ? 4 : 5), tiny_);
    const __m512i sign = _mm512_set1_epi16(INT16_MIN);
    // (sign & v) | found
    return _mm512_mask_mov_epi16(v, tiny, _mm512_ternarylogic_epi32(sign, v, found, 0xea));
  }
  __m512i tiny_;
};

// c[row][strip][16] of kRows rows and kStrips strips.
template <uint32_t kFormat, int kRows, int kStrips>
void few_bf16(const WoqLinearArgs& args, const char* const* strips, int64_t row,
              const FollowingStrips& following, float* c) {
  constexpr int kBlockK = Bf16Codes<kFormat>::kBlockK;
  constexpr int kValues = Bf16Codes<kFormat>::kValues;
  // One row has too few sums to hide the latency of the products.
  constexpr int kSums = kRows == 1 ? 2 : 1;
  const PackedHeader& header = args.header;
  const Bf16Codes<kFormat> codes(header);
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
      __m512i value[kStrips][kValues];
      const char* block[kStrips];
#pragma GCC unroll 4
      for (int s = 0; s < kStrips; ++s) {
        block[s] = weights[s] + k / kBlockK * kBlockBytes;
        if constexpr (IPEX_HAVE_AMX) __builtin_prefetch(block[s] + 4096);
        if constexpr (kRows > 1) following.fetch(weights[s], k / kBlockK);
      }
      const bool rare = Bf16Codes<kFormat>::template has_rare<kStrips>(block);
#pragma GCC unroll 4
      for (int s = 0; s < kStrips; ++s) {
        const __m512i word = _mm512_loadu_si512(block[s]);
        if (__builtin_expect(rare, 0))
          codes.template decode<true>(word, value[s]);
        else
          codes.template decode<false>(word, value[s]);
      }
#pragma GCC unroll 4
      for (int j = 0; j < kValues; ++j) {
        const int64_t pair = k + 2 * Bf16Codes<kFormat>::pair(j);
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
          int32_t bits;
          __builtin_memcpy(&bits, x + r * args.operand_stride + pair, sizeof(bits));
          const auto factor = reinterpret_cast<__m512bh>(_mm512_set1_epi32(bits));
          auto& sum = acc[j % kSums][r];
#pragma GCC unroll 4
          for (int s = 0; s < kStrips; ++s)
            sum[s] = _mm512_dpbf16_ps(sum[s], reinterpret_cast<__m512bh>(value[s][j]), factor);
        }
      }
    }
#pragma GCC unroll 4
    for (int s = 0; s < kStrips; ++s) {
      const f32v scale =
          scale_vector(args.at, header, strips[s], g, 0) * set1(Bf16Codes<kFormat>::kScale);
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
