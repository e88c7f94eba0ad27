// SPDX-License-Identifier: Apache-2.0
// The products of decode attention with caches of int8 for queries of 16 bits: the numbers of the
// cache stay integers. A query, and the weights of a block of keys, are 16-bit fixed point with a
// scale of their own, within 2^-16 of the largest of them: finer than float16 and bfloat16 numbers
// of that size are. A multiply-add of 16-bit pairs does twice the work of one in float.
#pragma once

#include "decode.h"
#include "rows.h"

#if IPEX_HAVE_AVX2

namespace ipex {
namespace {

#if IPEX_HAVE_AVX512
using Shorts = __m512i;
// 2 * kLanes numbers.
IPEX_INLINE Shorts load_shorts(const int16_t* p) { return _mm512_loadu_si512(p); }
IPEX_INLINE Shorts load_shorts(const Int8* p) {
  return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
IPEX_INLINE Shorts unpack_low(Shorts a, Shorts b) { return _mm512_unpacklo_epi16(a, b); }
IPEX_INLINE Shorts unpack_high(Shorts a, Shorts b) { return _mm512_unpackhi_epi16(a, b); }
// sum + the products of both halves of each lane.
IPEX_INLINE i32v add_products(i32v sum, Shorts a, Shorts b) {
#if IPEX_HAVE_AVX512_VNNI
  return reinterpret_cast<i32v>(_mm512_dpwssd_epi32(raw(sum), a, b));
#else
  return sum + reinterpret_cast<i32v>(_mm512_madd_epi16(a, b));
#endif
}
IPEX_INLINE void store_shorts(int16_t* p, i32v v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(raw(v)));
}
#else
using Shorts = __m256i;
IPEX_INLINE Shorts load_shorts(const int16_t* p) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}
IPEX_INLINE Shorts load_shorts(const Int8* p) {
  return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
IPEX_INLINE Shorts unpack_low(Shorts a, Shorts b) { return _mm256_unpacklo_epi16(a, b); }
IPEX_INLINE Shorts unpack_high(Shorts a, Shorts b) { return _mm256_unpackhi_epi16(a, b); }
IPEX_INLINE i32v add_products(i32v sum, Shorts a, Shorts b) {
#if IPEX_HAVE_AVX_VNNI
  return reinterpret_cast<i32v>(_mm256_dpwssd_avx_epi32(raw(sum), a, b));
#else
  return sum + reinterpret_cast<i32v>(_mm256_madd_epi16(a, b));
#endif
}
IPEX_INLINE void store_shorts(int16_t* p, i32v v) {
  const __m128i low = _mm256_castsi256_si128(raw(v)), high = _mm256_extracti128_si256(raw(v), 1);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm_packs_epi32(low, high));
}
#endif

// `count` numbers, a multiple of kLanes, as integers up to `most`. Returns what one is worth: NaN
// where a number is not finite.
template <class T>
IPEX_INLINE float to_shorts(const T* from, int64_t count, float most, int16_t* to) {
  f32v largest = zero(), bad = zero();
  for (int64_t i = 0; i < count; i += kLanes) {
    const f32v v = load(from + i);
    largest = max(largest, abs(v));
    bad = bad + v * zero();
  }
  const float top = reduce_max(largest), nan = reduce_add(bad);
  // Below this nothing is left of a product, and the reciprocal would overflow.
  const f32v factor = set1(top > 1e-30f ? most / top : 0.0f);
  for (int64_t i = 0; i < count; i += kLanes) store_shorts(to + i, to_int(load(from + i) * factor));
  return (top > 1e-30f ? top / most : 0.0f) + nan;
}

struct Int8Products {
  static constexpr int kQueries = 4;
  using Query = float;  // a scale, and from the 16th on integers
  using Weight = float;

  static IPEX_INLINE const int16_t* integers(const Query* q) {
    return reinterpret_cast<const int16_t*>(q + 16);
  }

  template <class T>
  static IPEX_INLINE void prepare(const T* from, int64_t padded, Query* to) {
    // Sums over a row of products with a byte fit 32 bits.
    const int64_t most = INT32_MAX / (128 * padded);
    to[0] = to_shorts(from, padded, static_cast<float>(most < 32767 ? most : 32767),
                      reinterpret_cast<int16_t*>(to + 16));
  }

  template <int kRows, bool kFetch>
  static IPEX_INLINE void score(const Query* const* q, const Int8* const* k, int64_t padded,
                                const Int8* const* next, float* const* scores) {
    constexpr int kKeys = kLanes == 8 && kRows > 2 ? 2 : kKeyStep;  // that registers have sums for
    f32v sums[kRows][kKeyStep];
#pragma GCC unroll 2
    for (int first = 0; first < kKeyStep; first += kKeys) {
      i32v acc[kRows][kKeys];
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
        for (int j = 0; j < kKeys; ++j) acc[r][j] = iset1(0);
      for (int64_t d = 0; d < padded; d += 2 * kLanes) {
        if constexpr (kFetch) fetch_rows<kKeys, 2 * kLanes>(next + first, d);
        Shorts key[kKeys];
#pragma GCC unroll 4
        for (int j = 0; j < kKeys; ++j) key[j] = load_shorts(k[first + j] + d);
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
          const Shorts query = load_shorts(integers(q[r]) + d);
#pragma GCC unroll 4
          for (int j = 0; j < kKeys; ++j) acc[r][j] = add_products(acc[r][j], query, key[j]);
        }
      }
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
        for (int j = 0; j < kKeys; ++j) sums[r][first + j] = to_float(acc[r][j]);
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const __m128 four = reduce_four(sums[r][0], sums[r][1], sums[r][2], sums[r][3]);
      _mm_storeu_ps(scores[r], _mm_mul_ps(four, _mm_set1_ps(q[r][0])));
    }
  }

  // What the rows of a tile multiply the values with.
  struct Weights {
    alignas(64) int16_t integers[kQueries][kDecodeBlock];
    float scale[kQueries];
  };
  template <int kRows>
  static IPEX_INLINE void convert(const Weight* const* w, int64_t keys, Weights* to) {
    for (int r = 0; r < kRows; ++r)
      to->scale[r] = to_shorts(w[r], decode_round_up(keys, kLanes), 32767.0f, to->integers[r]);
  }

  template <int kRows, int kPairs, bool kFetch>
  static IPEX_INLINE void add_columns(float* const* acc, const Weights& w, const Int8* const* v,
                                      int64_t keys, int64_t d, const Int8* const* next) {
    i32v sum[kRows][kPairs][2];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 2
      for (int c = 0; c < kPairs; ++c) sum[r][c][0] = sum[r][c][1] = iset1(0);
    for (int64_t j = 0; j < keys; j += 2) {
      if constexpr (kFetch) fetch_rows<2, kPairs * 2 * kLanes>(next + j, d);
      Shorts low[kPairs], high[kPairs];
#pragma GCC unroll 2
      for (int c = 0; c < kPairs; ++c) {
        const Shorts one = load_shorts(v[j] + d + c * 2 * kLanes);
        const Shorts two = load_shorts(v[j + 1] + d + c * 2 * kLanes);
        low[c] = unpack_low(one, two);
        high[c] = unpack_high(one, two);
      }
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        int32_t pair;
        std::memcpy(&pair, w.integers[r] + j, sizeof(pair));
        const Shorts weight = raw(iset1(pair));
#pragma GCC unroll 2
        for (int c = 0; c < kPairs; ++c) {
          sum[r][c][0] = add_products(sum[r][c][0], weight, low[c]);
          sum[r][c][1] = add_products(sum[r][c][1], weight, high[c]);
        }
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 2
      for (int c = 0; c < kPairs; ++c)
#pragma GCC unroll 2
        for (int half = 0; half < 2; ++half) {
          float* at = acc[r] + d + (2 * c + half) * kLanes;
          store(at, fma(to_float(sum[r][c][half]), set1(w.scale[r]), load(at)));
        }
  }

  // Unpacking leaves quads of both vectors in turn.
  template <class T>
  static IPEX_INLINE void store_row(const float* acc, float factor, int64_t padded, T* to) {
    alignas(64) float row[2 * kLanes];
    for (int64_t d = 0; d < padded; d += 2 * kLanes) {
      for (int64_t i = 0; i < 2 * kLanes; i += 4)
        std::memcpy(row + i, acc + d + i / 8 * 4 + i / 4 % 2 * kLanes, 4 * sizeof(float));
      for (int64_t i = 0; i < 2 * kLanes; i += kLanes)
        store(to + d + i, load(row + i) * set1(factor));
    }
  }
};

template <>
struct ProductsFor<BFloat16, Int8> {
  using Type = Int8Products;
};
template <>
struct ProductsFor<Half, Int8> {
  using Type = Int8Products;
};

// As for other products, all keys of a block at once.
template <>
IPEX_NOINLINE void add_rows<Int8Products, Int8>(float* const* acc, int64_t rows,
                                                const float* const* w, const Int8* const* v,
                                                int64_t keys, int64_t padded,
                                                const Int8* const* next) {
  constexpr int64_t kStep = 2 * kLanes;
  for (int64_t r = 0; r < rows; r += Int8Products::kQueries)
    with_tile<Int8Products::kQueries>(
        rows - r, r == 0 && next, [&]<int kRows, bool kFetch>() IPEX_LAMBDA {
          constexpr int kPairs = kRows <= 2 || kLanes == 16 ? 2 : 1;
          Int8Products::Weights weights;
          Int8Products::convert<kRows>(w + r, keys, &weights);
          int64_t d = 0;
          for (; d + kPairs * kStep <= padded; d += kPairs * kStep)
            Int8Products::add_columns<kRows, kPairs, kFetch>(acc + r, weights, v, keys, d, next);
          for (; d < padded; d += kStep)
            Int8Products::add_columns<kRows, 1, kFetch>(acc + r, weights, v, keys, d, next);
        });
}

}  // namespace
}  // namespace ipex

#endif  // IPEX_HAVE_AVX2
