// SPDX-License-Identifier: Apache-2.0
// Few rows with activations as 16-bit fixed point: the codes of weights are the other operand of a
// multiply-add of 16-bit pairs, with little or no conversion. The activations of a chunk of K share
// a scale, so they are within 2^-16 of the largest of them: finer than float16 and bfloat16 numbers
// of that size are.
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

typedef uint16_t Halves __attribute__((vector_size(kLanes * 4)));
typedef int16_t SignedHalves __attribute__((vector_size(kLanes * 4)));

IPEX_INLINE i32v halves_right(i32v word, int bits) {
  return reinterpret_cast<i32v>(reinterpret_cast<Halves>(word) >> static_cast<uint16_t>(bits));
}

// A word of codes as pairs of 16-bit integers: pair j holds the elements 2 j and 2 j + 1 of its
// column. The weight is scale * woq_int16_unit() * (integer - implied).
template <uint32_t kFormat>
class PairCodes;

template <>
class PairCodes<kFormatInt4> {
 public:
  static constexpr int kBlockK = 8, kPairs = 4;
  static int32_t implied() { return 8; }  // where there are no zero points
  IPEX_INLINE void decode(i32v word, i32v (&pairs)[kPairs]) const {
    const i32v low = iset1(0x000f000f);
    pairs[0] = word & low;
    pairs[1] = halves_right(word, 4) & low;
    pairs[2] = halves_right(word, 8) & low;
    pairs[3] = halves_right(word, 12);
  }
};

template <>
class PairCodes<kFormatInt8> {
 public:
  static constexpr int kBlockK = 4, kPairs = 2;
  static int32_t implied() { return 0; }
  IPEX_INLINE void decode(i32v word, i32v (&pairs)[kPairs]) const {
    const auto halves = reinterpret_cast<SignedHalves>(word);
    pairs[0] = reinterpret_cast<i32v>((halves << 8) >> 8);
    pairs[1] = reinterpret_cast<i32v>(halves >> 8);
  }
};

#if IPEX_HAVE_AVX2 && !IPEX_HAVE_AVX512

// 16 bytes, looked up by the bytes of a vector, which are below 16.
class Bytes16 {
 public:
  explicit Bytes16(const uint8_t* values)
      : all_(_mm256_broadcastsi128_si256(
            _mm_loadu_si128(reinterpret_cast<const __m128i*>(values)))) {}
  IPEX_INLINE i32v operator[](i32v bytes) const {
    return reinterpret_cast<i32v>(_mm256_shuffle_epi8(all_, raw(bytes)));
  }

 private:
  const __m256i all_;
};

// Twice the number plus 12: no sign to extend.
inline constexpr uint8_t kFp4Codes[16] = {12, 13, 14, 15, 16, 18, 20, 24,
                                          12, 11, 10, 9,  8,  6,  4,  0};

template <>
class PairCodes<kFormatFp4> {
 public:
  static constexpr int kBlockK = 8, kPairs = 4;
  PairCodes() : table_(kFp4Codes) {}
  static int32_t implied() { return 12; }
  IPEX_INLINE void decode(i32v word, i32v (&pairs)[kPairs]) const {
    const i32v nibbles = iset1(0x0f0f0f0f), even = iset1(0x00ff00ff);
    const i32v low = table_[word & nibbles], high = table_[(word >> 4) & nibbles];
    pairs[0] = low & even;
    pairs[1] = high & even;
    pairs[2] = halves_right(low, 8);
    pairs[3] = halves_right(high, 8);
  }

 private:
  const Bytes16 table_;
};

// The table times kWoqNf4Most, its bytes: nearer to the numbers than float16 is.
inline constexpr int16_t nf4_integer(int code) {
  const float value = kNf4Values[code] * static_cast<float>(kWoqNf4Most);
  return static_cast<int16_t>(value < 0 ? value - 0.5f : value + 0.5f);
}
struct Nf4Bytes {
  uint8_t low[16], high[16];
  constexpr Nf4Bytes() : low(), high() {
    for (int code = 0; code < 16; ++code) {
      const int16_t value = nf4_integer(code);
      low[code] = static_cast<uint8_t>(value & 0xff);
      high[code] = static_cast<uint8_t>(value >> 8 & 0xff);
    }
  }
};
inline constexpr Nf4Bytes kNf4Bytes;

template <>
class PairCodes<kFormatNf4> {
 public:
  static constexpr int kBlockK = 8, kPairs = 4;
  PairCodes() : low_(kNf4Bytes.low), high_(kNf4Bytes.high) {}
  static int32_t implied() { return 0; }
  IPEX_INLINE void decode(i32v word, i32v (&pairs)[kPairs]) const {
    const i32v nibbles = iset1(0x0f0f0f0f);
    const i32v first = word & nibbles, second = (word >> 4) & nibbles;
    join(low_[first], high_[first], &pairs[0], &pairs[2]);
    join(low_[second], high_[second], &pairs[1], &pairs[3]);
  }

 private:
  // The bytes at even places and at odd ones as 16-bit numbers.
  static IPEX_INLINE void join(i32v low, i32v high, i32v* even, i32v* odd) {
    const __m256i upper = _mm256_set1_epi32(static_cast<int32_t>(0xff00ff00));
    const __m256i shifted = _mm256_slli_epi16(raw(high), 8);
    *even = reinterpret_cast<i32v>(_mm256_blendv_epi8(raw(low), shifted, upper));
    *odd = reinterpret_cast<i32v>(_mm256_blendv_epi8(raw(halves_right(low, 8)), raw(high), upper));
  }
  const Bytes16 low_, high_;
};

#endif  // IPEX_HAVE_AVX2 && !IPEX_HAVE_AVX512

// Calls f.operator()<format>() for the formats that this level multiplies in 16 bits.
template <class F>
IPEX_INLINE void with_pair_codes(uint32_t format, const F& f) {
#if IPEX_HAVE_AVX2 && !IPEX_HAVE_AVX512
  if (format == kFormatFp4) return f.template operator()<kFormatFp4>();
  if (format == kFormatNf4) return f.template operator()<kFormatNf4>();
#endif
  if (format == kFormatInt4) return f.template operator()<kFormatInt4>();
  f.template operator()<kFormatInt8>();
}

// What the sums of a chunk of one strip become: the numbers that all rows share.
template <uint32_t kFormat>
class PairFinish {
 public:
  IPEX_INLINE PairFinish(const WoqLinearArgs& args, const char* strip, int64_t chunk, int64_t group)
      : x_scales_(args.chunk_scales + chunk),
        x_sums_(args.chunk_sums + chunk),
        stride_(args.chunks) {
    const auto implied = static_cast<float>(PairCodes<kFormat>::implied());
#pragma GCC unroll 4
    for (int v = 0; v < kStripVectors; ++v) {
      scale_[v] = scale_vector(args.at, args.header, strip, group, v);
      if constexpr (kHasZeros)
        zeros_[v] = zero_vector(args.at, args.header, strip, group, v, implied);
      if constexpr (kFormat == kFormatFp4) zeros_[v] = set1(implied);
    }
  }

  // Adds the sums of kRows rows from `row` on to c.
  template <int kRows>
  IPEX_INLINE void add(int64_t row, const i32v (&sums)[kRows][kStripVectors], float* c) const {
    const float* x_scales = x_scales_ + row * stride_;
    const float* x_sums = x_sums_ + row * stride_;
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const f32v x_scale = set1(x_scales[r * stride_]);
      const f32v x_sum = kOffset ? set1(x_sums[r * stride_]) : zero();
#pragma GCC unroll 4
      for (int v = 0; v < kStripVectors; ++v) {
        f32v value = to_float(sums[r][v]);
        if constexpr (kOffset) value = fnma(x_sum, zeros_[v], value);
        float* to = c + r * kFewColumns + v * kLanes;
        store(to, fma(scale_[v] * x_scale, value, load(to)));
      }
    }
  }

 private:
  static constexpr bool kHasZeros = kFormat == kFormatInt4 || kFormat == kFormatInt8;
  static constexpr bool kOffset = kHasZeros || kFormat == kFormatFp4;
  const float *const x_scales_, *const x_sums_;
  const int64_t stride_;
  f32v scale_[kStripVectors], zeros_[kStripVectors];
};

template <uint32_t kFormat, int kRows, int kStrips>
void few_int16(const WoqLinearArgs& args, const char* const* strips, int64_t row, float* c) {
  constexpr int kBlockK = PairCodes<kFormat>::kBlockK;
  constexpr int kPairs = PairCodes<kFormat>::kPairs;
  constexpr int kVectors = kStrips * kStripVectors;
  const PairCodes<kFormat> codes{};
  const auto* x = static_cast<const int16_t*>(args.operand) + row * args.operand_stride;
  for (int r = 0; r < kRows; ++r)
    for (int64_t i = 0; i < kStrips * kStrip; i += kLanes) store(c + r * kFewColumns + i, zero());
  const char* weights[kStrips];
  for (int s = 0; s < kStrips; ++s) weights[s] = strips[s] + args.at.weights;
  const int64_t end = args.at.k_padded, chunks = args.chunks, stride = args.operand_stride;
  const bool one_group = args.at.groups == 1;
  const NextStrips following(args.at, chunks);
  for (int64_t chunk = 0, k = 0; chunk < chunks; ++chunk) {
    const int64_t group = one_group ? 0 : chunk, next = (chunk + 1) * args.chunk;
    const int64_t chunk_end = next < end ? next : end;
    following.fetch<kStrips>(strips, chunk);
    i32v acc[kStrips][kRows][kStripVectors];
    for (auto& of_strip : acc)
      for (auto& of_row : of_strip)
        for (auto& sum : of_row) sum = iset1(0);
    for (; k < chunk_end; k += kBlockK) {
#pragma GCC unroll 4
      for (int s = 0; s < kStrips; ++s)
        __builtin_prefetch(weights[s] + k / kBlockK * kBlockBytes + kWeightsAhead);
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        i32v pairs[kPairs];
        codes.decode(load_words(weights[v / kStripVectors] + k / kBlockK * kBlockBytes +
                                v % kStripVectors * kLanes * 4),
                     pairs);
#pragma GCC unroll 4
        for (int j = 0; j < kPairs; ++j)
#pragma GCC unroll 4
          for (int r = 0; r < kRows; ++r) {
            int32_t pair;
            __builtin_memcpy(&pair, x + r * stride + k + 2 * j, sizeof(pair));
            i32v& sum = acc[v / kStripVectors][r][v % kStripVectors];
            sum = add_pairs(sum, pairs[j], iset1(pair));
          }
      }
    }
#pragma GCC unroll 4
    for (int s = 0; s < kStrips; ++s)
      PairFinish<kFormat>(args, strips[s], chunk, group).add(row, acc[s], c + s * kStrip);
  }
}

}  // namespace
}  // namespace ipex
