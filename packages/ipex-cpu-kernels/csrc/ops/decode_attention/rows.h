// SPDX-License-Identifier: Apache-2.0
// The two products of decode attention for a few query rows and rows of keys or values that lie
// anywhere: scores = q . k, and acc += weight * v.
//
// Rows are multiples of 2 * kLanes elements. Accumulators and float queries keep the order of
// elements in which loads of the cache type are cheapest (see load2 in vec.h); Products::store
// undoes it.
#pragma once

#include <cstring>

#include "ipex/kernel/kv_load.h"
#include "ipex/kernel/vec.h"

namespace ipex {
namespace {

// Query rows of one register tile of products in float.
inline constexpr int kTileQueries = kLanes == 16 ? 4 : 2;
// Keys are scored in multiples of this many; pointers are padded up to it.
inline constexpr int kKeyStep = 4;

// Calls f.operator()<n>() for n query rows, 1 .. kRows.
template <int kRows, class F>
IPEX_INLINE void with_queries(int64_t rows, const F& f) {
  if constexpr (kRows == 1) {
    f.template operator()<1>();
  } else {
    if (rows >= kRows)
      f.template operator()<kRows>();
    else
      with_queries<kRows - 1>(rows, f);
  }
}

// Sums of four vectors.
IPEX_INLINE __m128 reduce_four(f32v a, f32v b, f32v c, f32v d) {
#if IPEX_HAVE_AVX512
  const f32v ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  const f32v cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
  const __m512d x = _mm512_castps_pd(ab), y = _mm512_castps_pd(cd);
  const __m512 s = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)),
                                 _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
  const __m256 h = _mm256_add_ps(_mm512_castps512_ps256(s), _mm512_extractf32x8_ps(s, 1));
  return _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
#elif IPEX_HAVE_AVX2
  const __m256 s = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
  return _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
#else
  _MM_TRANSPOSE4_PS(a, b, c, d);
  return (a + b) + (c + d);
#endif
}

// Tells the core which rows come next, while it computes with others: kCount rows, the cache lines
// that start in their elements [d, d + kElements). A block is too short for it to find out by
// itself: without this, keys that come from memory take half as long again, also on AMD's Zen 4,
// where fetching ahead along one long row does not pay. Into L2: L1 is in use. Spread over the
// products, a few lines at a time: a burst fills the queue of misses, and the loads of the products
// wait behind it.
template <int kCount, int64_t kElements, class E>
IPEX_INLINE void fetch_rows(const E* const* rows, int64_t d) {
  constexpr auto kSize = static_cast<int64_t>(sizeof(E));
  if (kElements * kSize < 64 && d * kSize % 64 != 0) return;
#pragma GCC unroll 4
  for (int i = 0; i < kCount; ++i)
#pragma GCC unroll 8
    for (int64_t at = 0; at < kElements; at += 64 / kSize)
      __builtin_prefetch(rows[i] + d + at, 0, 2);
}

// Products in float, rows of the cache converted on the way. The type of the query does not matter
// to the products, so that all query types share one instance for a cache type.
template <class E>
struct FloatProducts {
  static constexpr int kQueries = kTileQueries;
  using Query = float;
  using Weight = float;

  // A row of T, padded, as `score` wants it.
  template <class T>
  static IPEX_INLINE void prepare(const T* from, int64_t padded, Query* to) {
    for (int64_t d = 0; d < padded; d += 2 * kLanes) {
      f32v2 pair = {load(from + d), load(from + d + kLanes)};
      if constexpr (kIsBFloat16<E>) pair = load2(from + d);
      store(to + d, pair.a);
      store(to + d + kLanes, pair.b);
    }
  }

  template <int kRows, bool kFetch>
  static IPEX_INLINE void score(const Query* const* q, const E* const* k, int64_t padded,
                                const E* const* next, float* const* scores) {
    f32v acc[kRows][4];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) acc[r][j] = zero();
    for (int64_t d = 0; d < padded; d += 2 * kLanes) {
      if constexpr (kFetch) fetch_rows<kKeyStep, 2 * kLanes>(next, d);
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        const f32v2 key = load2(k[j] + d);
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
          acc[r][j] = fma(load(q[r] + d), key.a, acc[r][j]);
          acc[r][j] = fma(load(q[r] + d + kLanes), key.b, acc[r][j]);
        }
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r)
      _mm_storeu_ps(scores[r], reduce_four(acc[r][0], acc[r][1], acc[r][2], acc[r][3]));
  }

  // Columns [d, d + kPairs * 2 * kLanes).
  template <int kRows, int kPairs, bool kFetch>
  static IPEX_INLINE void add_columns(float* const* acc, const Weight* const* w, const E* const* v,
                                      int64_t begin, int64_t end, int64_t d, const E* const* next) {
    f32v2 sum[kRows][kPairs];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
      for (int c = 0; c < kPairs; ++c) {
        const float* at = acc[r] + d + c * 2 * kLanes;
        sum[r][c] = {load(at), load(at + kLanes)};
      }
    for (int64_t j = begin; j < end; ++j) {
      if constexpr (kFetch) fetch_rows<1, kPairs * 2 * kLanes>(next + j, d);
      f32v2 value[kPairs];
#pragma GCC unroll 4
      for (int c = 0; c < kPairs; ++c) value[c] = load2(v[j] + d + c * 2 * kLanes);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        const f32v weight = set1(w[r][j]);
#pragma GCC unroll 4
        for (int c = 0; c < kPairs; ++c) {
          sum[r][c].a = fma(weight, value[c].a, sum[r][c].a);
          sum[r][c].b = fma(weight, value[c].b, sum[r][c].b);
        }
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
      for (int c = 0; c < kPairs; ++c) {
        float* at = acc[r] + d + c * 2 * kLanes;
        store(at, sum[r][c].a);
        store(at + kLanes, sum[r][c].b);
      }
  }

  template <class T>
  static IPEX_INLINE void store_row(const float* acc, float factor, int64_t padded, T* to) {
    const f32v f = set1(factor);
    for (int64_t d = 0; d < padded; d += 2 * kLanes) {
      const f32v2 pair = {load(acc + d) * f, load(acc + d + kLanes) * f};
      if constexpr (kIsBFloat16<E>) {
        store2(to + d, pair);
      } else {
        store(to + d, pair.a);
        store(to + d + kLanes, pair.b);
      }
    }
  }
};

#if IPEX_HAVE_AVX512_BF16

IPEX_INLINE __m512bh as_pairs(__m512i a) { return reinterpret_cast<__m512bh>(a); }

// Products of pairs of bfloat16: along the row for scores, of two neighboring rows for values.
struct PairProducts {
  static constexpr int kQueries = kTileQueries;
  using Query = BFloat16;
  using Weight = BFloat16;

  static IPEX_INLINE void prepare(const BFloat16* from, int64_t padded, Query* to) {
    std::memcpy(to, from, sizeof(BFloat16) * static_cast<size_t>(padded));
  }

  template <int kRows, bool kFetch>
  static IPEX_INLINE void score(const Query* const* q, const BFloat16* const* k, int64_t padded,
                                const BFloat16* const* next, float* const* scores) {
    f32v acc[kRows][4];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) acc[r][j] = zero();
    for (int64_t d = 0; d < padded; d += 2 * kLanes) {
      if constexpr (kFetch) fetch_rows<kKeyStep, 2 * kLanes>(next, d);
      __m512bh query[kRows];
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) query[r] = as_pairs(_mm512_loadu_si512(q[r] + d));
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        const __m512bh key = as_pairs(_mm512_loadu_si512(k[j] + d));
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) acc[r][j] = _mm512_dpbf16_ps(acc[r][j], query[r], key);
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r)
      _mm_storeu_ps(scores[r], reduce_four(acc[r][0], acc[r][1], acc[r][2], acc[r][3]));
  }

  template <int kRows, int kPairs, bool kFetch>
  static IPEX_INLINE void add_columns(float* const* acc, const Weight* const* w,
                                      const BFloat16* const* v, int64_t begin, int64_t end,
                                      int64_t d, const BFloat16* const* next) {
    f32v2 sum[kRows][kPairs];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
      for (int c = 0; c < kPairs; ++c) {
        const float* at = acc[r] + d + c * 2 * kLanes;
        sum[r][c] = {load(at), load(at + kLanes)};
      }
    for (int64_t j = begin; j < end; j += 2) {
      if constexpr (kFetch) fetch_rows<2, kPairs * 2 * kLanes>(next + j, d);
      __m512bh even[kPairs], odd[kPairs];
#pragma GCC unroll 4
      for (int c = 0; c < kPairs; ++c) {
        const __m512i one = _mm512_loadu_si512(v[j] + d + c * 2 * kLanes);
        const __m512i two = _mm512_loadu_si512(v[j + 1] + d + c * 2 * kLanes);
        even[c] = as_pairs(_mm512_unpacklo_epi16(one, two));
        odd[c] = as_pairs(_mm512_unpackhi_epi16(one, two));
      }
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        int32_t pair;
        std::memcpy(&pair, w[r] + j, sizeof(pair));
        const __m512bh weight = as_pairs(_mm512_set1_epi32(pair));
#pragma GCC unroll 4
        for (int c = 0; c < kPairs; ++c) {
          sum[r][c].a = _mm512_dpbf16_ps(sum[r][c].a, weight, even[c]);
          sum[r][c].b = _mm512_dpbf16_ps(sum[r][c].b, weight, odd[c]);
        }
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
      for (int c = 0; c < kPairs; ++c) {
        float* at = acc[r] + d + c * 2 * kLanes;
        store(at, sum[r][c].a);
        store(at + kLanes, sum[r][c].b);
      }
  }

  // The order of the interleaved rows: quads of a and of b in turn.
  static IPEX_INLINE void store_row(const float* acc, float factor, int64_t padded, BFloat16* to) {
    const f32v f = set1(factor);
    const __m512i quads = _mm512_set_epi64(7, 3, 6, 2, 5, 1, 4, 0);
    for (int64_t d = 0; d < padded; d += 2 * kLanes) {
      const __m512i both = reinterpret_cast<__m512i>(
          _mm512_cvtne2ps_pbh(load(acc + d + kLanes) * f, load(acc + d) * f));
      _mm512_storeu_si512(to + d, _mm512_permutexvar_epi64(quads, both));
    }
  }
};

#endif  // IPEX_HAVE_AVX512_BF16

template <class T, class E>
struct ProductsFor {
  using Type = FloatProducts<E>;
};
#if IPEX_HAVE_AVX512_BF16
template <>
struct ProductsFor<BFloat16, BFloat16> {
  using Type = PairProducts;
};
#endif

// Calls f.operator()<n, fetch>() for n query rows, 1 .. kMost.
template <int kMost, class F>
IPEX_INLINE void with_tile(int64_t rows, bool fetch, const F& f) {
  with_queries<kMost>(rows, [&]<int kRows>() IPEX_LAMBDA {
    if (fetch)
      f.template operator()<kRows, true>();
    else
      f.template operator()<kRows, false>();
  });
}

// scores[r][0 .. keys) for the rows of `q`; `keys` is rounded up to kKeyStep. Rows of `next`, as
// many, will be used after this; there may be none. A function of its own, as `add_rows` is: it is
// large, and what calls it exists for each type of queries and of the cache.
template <class P, class E>
IPEX_NOINLINE void score_rows(const typename P::Query* const* q, int64_t rows, const E* const* k,
                              int64_t keys, int64_t padded, const E* const* next,
                              float* const* scores) {
  for (int64_t r = 0; r < rows; r += P::kQueries)
    with_tile<P::kQueries>(rows - r, r == 0 && next, [&]<int kRows, bool kFetch>() IPEX_LAMBDA {
      for (int64_t j = 0; j < keys; j += kKeyStep) {
        float* to[kRows];
        for (int i = 0; i < kRows; ++i) to[i] = scores[r + i] + j;
        P::template score<kRows, kFetch>(q + r, k + j, padded, kFetch ? next + j : nullptr, to);
      }
    });
}

// acc[r] += w[r][j] * v[j] for all keys, which are rounded up to an even number.
template <class P, class E>
IPEX_NOINLINE void add_rows(float* const* acc, int64_t rows, const typename P::Weight* const* w,
                            const E* const* v, int64_t keys, int64_t padded, const E* const* next) {
  constexpr int64_t kStep = 2 * kLanes;
  constexpr int64_t kKeys = 32;
  for (int64_t j = 0; j < keys; j += kKeys) {
    const int64_t end = keys - j < kKeys ? keys : j + kKeys;
    for (int64_t r = 0; r < rows; r += P::kQueries)
      with_tile<P::kQueries>(rows - r, r == 0 && next, [&]<int kRows, bool kFetch>() IPEX_LAMBDA {
        constexpr int kPairs = kRows == 1 && kLanes == 16 ? 4 : 2;
        int64_t d = 0;
        for (; d + kPairs * kStep <= padded; d += kPairs * kStep)
          P::template add_columns<kRows, kPairs, kFetch>(acc + r, w + r, v, j, end, d, next);
        for (; d < padded; d += kStep)
          P::template add_columns<kRows, 1, kFetch>(acc + r, w + r, v, j, end, d, next);
      });
  }
}

}  // namespace
}  // namespace ipex
