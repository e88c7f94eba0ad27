// SPDX-License-Identifier: Apache-2.0
// Integer matrix product with a packed right-hand side: C[rows][columns] = A[rows][K] * W, A uint8,
// W int8, C int32 and exact for K up to kMaxDepth8.
//
// W lies in panels of 32 columns, [K / 4][32][4]: four neighbors along K side by side, the operand
// order of the dot-product and tile instructions. K is a multiple of 4; callers pad A and W. Signed
// activations are passed as code + 128 and the product with 128 is taken off again with the sums of
// the columns of W.
//
// Every level has one way: AMX tiles, VPDPBUSD (AVX-512 or AVX-VNNI), or else products of 16-bit
// numbers, whose pairs cannot saturate as pairs of 8-bit numbers do.
#pragma once

#include "ipex/kernel/gemm.h"

namespace ipex {
namespace {

inline constexpr bool kHaveVnni = IPEX_HAVE_AVX512_VNNI || IPEX_HAVE_AVX_VNNI;

// Largest K for which no sum of uint8 * int8 products leaves int32.
inline constexpr int64_t kMaxDepth8 = 65536;

// Register tile: accumulators of kTileRows8 rows and kTileVectors8 vectors of columns.
inline constexpr int kTileRows8 = kHaveVnni ? 6 : 4;
inline constexpr int kTileVectors8 = kLanes == 16 ? 4 : 2;

// Rows that callers should pass at a time; see kRowStep.
inline constexpr int kRowStep8 = IPEX_HAVE_AMX ? 32 : 24;

IPEX_INLINE i32v load_ints(const void* p) {
  i32v v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}
IPEX_INLINE void store_ints(int32_t* p, i32v v) { std::memcpy(p, &v, sizeof(v)); }

template <int kRows, int kVectors>
IPEX_INLINE void load_tile8(i32v (&acc)[kRows][kVectors], const int32_t* c, int64_t ldc,
                            bool accumulate) {
#pragma GCC unroll 6
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v)
      acc[r][v] = accumulate ? load_ints(c + r * ldc + v * kLanes) : iset1(0);
}

template <int kRows, int kVectors>
IPEX_INLINE void store_tile8(const i32v (&acc)[kRows][kVectors], int32_t* c, int64_t ldc) {
#pragma GCC unroll 6
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) store_ints(c + r * ldc + v * kLanes, acc[r][v]);
}

#if IPEX_HAVE_AVX512_VNNI || IPEX_HAVE_AVX_VNNI

// sum + the four products of each lane, `a` unsigned bytes, `w` signed ones.
IPEX_INLINE i32v dot4(i32v sum, i32v a, i32v w) {
#if IPEX_HAVE_AVX512_VNNI
  return reinterpret_cast<i32v>(_mm512_dpbusd_epi32(raw(sum), raw(a), raw(w)));
#else
  return reinterpret_cast<i32v>(_mm256_dpbusd_avx_epi32(raw(sum), raw(a), raw(w)));
#endif
}

template <int kRows, int kVectors>
IPEX_INLINE void tile_dot8(const uint8_t* a, int64_t lda, const int8_t* p0, const int8_t* p1,
                           int first, int64_t k, int32_t* c, int64_t ldc, bool accumulate) {
  i32v acc[kRows][kVectors];
  load_tile8(acc, c, ldc, accumulate);
  const int8_t* w[kVectors];
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) w[v] = column(p0, p1, first + v, 4);
  for (int64_t i = 0; i < k; i += 4) {
    i32v b[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      b[v] = load_ints(w[v] + i * kPanel);
      fetch_ahead<kRows>(w[v] + i * kPanel);
    }
#pragma GCC unroll 6
    for (int r = 0; r < kRows; ++r) {
      int32_t four;
      std::memcpy(&four, a + r * lda + i, sizeof(four));
      const i32v x = iset1(four);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) acc[r][v] = dot4(acc[r][v], x, b[v]);
    }
  }
  store_tile8(acc, c, ldc);
}

inline void panels_dot8(const uint8_t* a, int64_t lda, int64_t rows, const int8_t* p0,
                        const int8_t* p1, int64_t k, int32_t* c, int64_t ldc, bool accumulate) {
  const int vectors = (p1 ? 2 : 1) * kPanel / static_cast<int>(kLanes);
  for (int64_t r = 0; r < rows; r += kTileRows8) {
    const int64_t n = rows - r < kTileRows8 ? rows - r : kTileRows8;
    int v = 0;
    for (; v + kTileVectors8 <= vectors; v += kTileVectors8)
      with_rows<kTileRows8>(n, [&]<int kRows>() IPEX_LAMBDA {
        tile_dot8<kRows, kTileVectors8>(a + r * lda, lda, p0, p1, v, k, c + r * ldc + v * kLanes,
                                        ldc, accumulate);
      });
    if constexpr (kTileVectors8 > 2) {
      for (; v < vectors; v += 2)
        with_rows<kTileRows8>(n, [&]<int kRows>() IPEX_LAMBDA {
          tile_dot8<kRows, 2>(a + r * lda, lda, p0, p1, v, k, c + r * ldc + v * kLanes, ldc,
                              accumulate);
        });
    }
  }
}

#else  // no dot product of bytes

IPEX_INLINE i32v multiply_add16(i32v a, i32v b) {
#if IPEX_HAVE_AVX512
  return reinterpret_cast<i32v>(_mm512_madd_epi16(raw(a), raw(b)));
#elif IPEX_HAVE_AVX2
  return reinterpret_cast<i32v>(_mm256_madd_epi16(raw(a), raw(b)));
#else
  return reinterpret_cast<i32v>(_mm_madd_epi16(raw(a), raw(b)));
#endif
}

// Elements of K that are widened at a time, so that the copies of A stay in L1.
inline constexpr int64_t kDepth8 = 2048;

// The bytes of A at even and at odd places as 16-bit numbers, two to a word, which meet the bytes
// of W at those places.
struct Split {
  alignas(64) int32_t even[kTileRows8][kDepth8 / 4];
  alignas(64) int32_t odd[kTileRows8][kDepth8 / 4];
};

inline void split_rows(const uint8_t* a, int64_t lda, int64_t rows, int64_t k, Split* to) {
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t i = 0; i < k / 4; ++i) {
      uint32_t four;
      std::memcpy(&four, a + r * lda + 4 * i, sizeof(four));
      to->even[r][i] = static_cast<int32_t>(four & 0x00ff00ff);
      to->odd[r][i] = static_cast<int32_t>((four >> 8) & 0x00ff00ff);
    }
}

template <int kRows, int kVectors>
IPEX_INLINE void tile_words(const Split& a, const int8_t* p0, const int8_t* p1, int first,
                            int64_t k, int32_t* c, int64_t ldc, bool accumulate) {
  i32v acc[kRows][kVectors];
  load_tile8(acc, c, ldc, accumulate);
  const int8_t* w[kVectors];
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) w[v] = column(p0, p1, first + v, 4);
  for (int64_t i = 0; i < k / 4; ++i) {
    i32v even[kRows], odd[kRows];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      even[r] = iset1(a.even[r][i]);
      odd[r] = iset1(a.odd[r][i]);
    }
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      typedef int16_t Words __attribute__((vector_size(kLanes * 4)));
      const Words four = reinterpret_cast<Words>(load_ints(w[v] + i * 4 * kPanel));
      const i32v low = reinterpret_cast<i32v>((four << 8) >> 8);
      const i32v high = reinterpret_cast<i32v>(four >> 8);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r)
        acc[r][v] += multiply_add16(even[r], low) + multiply_add16(odd[r], high);
    }
  }
  store_tile8(acc, c, ldc);
}

inline void panels_words(const uint8_t* a, int64_t lda, int64_t rows, const int8_t* p0,
                         const int8_t* p1, int64_t k, int32_t* c, int64_t ldc, bool accumulate) {
  Split split;
  const int vectors = (p1 ? 2 : 1) * kPanel / static_cast<int>(kLanes);
  // The weights of a product with few rows come from memory: whole lines are read, and the second
  // pair of rows finds them in L1.
  const bool few = kLanes < 16 && rows <= kTileRows8;
  const int64_t height = few ? 2 : kTileRows8;
  const int64_t most = few ? 512 : kDepth8;
  for (int64_t d = 0; d < k; d += most) {
    const int64_t depth = k - d < most ? k - d : most;
    const int8_t* q0 = p0 + d * kPanel;
    const int8_t* q1 = p1 ? p1 + d * kPanel : nullptr;
    for (int64_t r = 0; r < rows; r += height) {
      const int64_t n = rows - r < height ? rows - r : height;
      split_rows(a + r * lda + d, lda, n, depth, &split);
      with_rows<kTileRows8>(n, [&]<int kRows>() IPEX_LAMBDA {
        constexpr int kVectors = kLanes < 16 && kRows <= 2 ? 4 : 2;
        for (int v = 0; v < vectors; v += kVectors)
          tile_words<kRows, kVectors>(split, q0, q1, v, depth, c + r * ldc + v * kLanes, ldc,
                                      accumulate || d > 0);
      });
    }
  }
}

#endif

#if IPEX_HAVE_AMX

// One panel, up to 32 rows, k a multiple of 64; as panel_amx of gemm.h.
inline void panel_amx8(const uint8_t* a, int64_t lda, int64_t rows, const int8_t* p, int64_t k,
                       int32_t* c, int64_t ldc, bool accumulate) {
  const int64_t c_stride = ldc * 4;
  constexpr int64_t w_stride = kPanel * 4;
  const bool two = rows > 16;
  tile_fence(a);
  tile_fence(p);
  tile_fence(c);
  if (accumulate) {
    _tile_loadd(0, c, c_stride);
    _tile_loadd(1, c + 16, c_stride);
    if (two) {
      _tile_loadd(2, c + 16 * ldc, c_stride);
      _tile_loadd(3, c + 16 * ldc + 16, c_stride);
    }
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  if (two) {
    for (int64_t i = 0; i < k; i += 64) {
      _tile_loadd(6, p + i * kPanel, w_stride);
      _tile_loadd(4, a + i, lda);
      _tile_dpbusd(0, 4, 6);
      _tile_loadd(7, p + i * kPanel + 64, w_stride);
      _tile_dpbusd(1, 4, 7);
      _tile_loadd(5, a + 16 * lda + i, lda);
      _tile_dpbusd(2, 5, 6);
      _tile_dpbusd(3, 5, 7);
    }
  } else {
    for (int64_t i = 0; i < k; i += 64) {
      const char* ahead = reinterpret_cast<const char*>(p + i * kPanel) + kFetchAhead;
      for (int64_t line = 0; line < 2048; line += 64) __builtin_prefetch(ahead + line);
      _tile_loadd(4, a + i, lda);
      _tile_loadd(6, p + i * kPanel, w_stride);
      _tile_dpbusd(0, 4, 6);
      _tile_loadd(7, p + i * kPanel + 64, w_stride);
      _tile_dpbusd(1, 4, 7);
    }
  }
  _tile_stored(0, c, c_stride);
  _tile_stored(1, c + 16, c_stride);
  if (two) {
    _tile_stored(2, c + 16 * ldc, c_stride);
    _tile_stored(3, c + 16 * ldc + 16, c_stride);
  }
}

#endif

// C[rows][32 or 64] (+)= A[rows][k] * panels, k a multiple of 4. `scope` must live around a series
// of calls.
inline void multiply8([[maybe_unused]] TileScope& scope, const uint8_t* a, int64_t lda,
                      int64_t rows, const int8_t* p0, const int8_t* p1, int64_t k, int32_t* c,
                      int64_t ldc, bool accumulate) {
#if IPEX_HAVE_AMX
  const int64_t whole = k / 64 * 64;
  if (whole) {
    for (int64_t r = 0; r < rows; r += 32) {
      const int64_t n = rows - r < 32 ? rows - r : 32;
      scope.configure(n);
      panel_amx8(a + r * lda, lda, n, p0, whole, c + r * ldc, ldc, accumulate);
      if (p1) panel_amx8(a + r * lda, lda, n, p1, whole, c + r * ldc + kPanel, ldc, accumulate);
    }
    if (whole < k)
      panels_dot8(a + whole, lda, rows, p0 + whole * kPanel, p1 ? p1 + whole * kPanel : nullptr,
                  k - whole, c, ldc, true);
    return;
  }
#endif
#if IPEX_HAVE_AVX512_VNNI || IPEX_HAVE_AVX_VNNI
  panels_dot8(a, lda, rows, p0, p1, k, c, ldc, accumulate);
#else
  panels_words(a, lda, rows, p0, p1, k, c, ldc, accumulate);
#endif
}

}  // namespace
}  // namespace ipex
