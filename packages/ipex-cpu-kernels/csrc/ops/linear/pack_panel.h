// SPDX-License-Identifier: Apache-2.0
// Packs 32 columns of a matrix into a panel (see packed.h). Data movement with instructions that
// every level has: one version for all of them.
#pragma once

#include <emmintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "linear/packed.h"

namespace ipex {

// A matrix [k][n] as it lies in memory. Strides are in bytes; one of them is the size of an
// element.
struct MatrixView {
  const char* data;
  int64_t k, n, k_stride, n_stride;
};

namespace pack_detail {

inline __m128i load(const char* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }
inline void store(void* p, __m128i v) { _mm_storeu_si128(static_cast<__m128i*>(p), v); }

// Transposes a square of 16 bytes a side: column r of the square at `to`, whose rows lie
// `to_stride` numbers apart, is row r of `from`.
inline void square(const char* from, int64_t stride, uint32_t* to, int64_t to_stride) {
  const __m128i r0 = load(from), r1 = load(from + stride);
  const __m128i r2 = load(from + 2 * stride), r3 = load(from + 3 * stride);
  const __m128i a = _mm_unpacklo_epi32(r0, r1), b = _mm_unpacklo_epi32(r2, r3);
  const __m128i c = _mm_unpackhi_epi32(r0, r1), d = _mm_unpackhi_epi32(r2, r3);
  store(to, _mm_unpacklo_epi64(a, b));
  store(to + to_stride, _mm_unpackhi_epi64(a, b));
  store(to + 2 * to_stride, _mm_unpacklo_epi64(c, d));
  store(to + 3 * to_stride, _mm_unpackhi_epi64(c, d));
}

inline void square(const char* from, int64_t stride, uint16_t* to, int64_t to_stride) {
  __m128i r[8], t[8];
  for (int i = 0; i < 8; ++i) r[i] = load(from + i * stride);
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm_unpacklo_epi16(r[2 * i], r[2 * i + 1]);
    t[4 + i] = _mm_unpackhi_epi16(r[2 * i], r[2 * i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {  // columns i .. i + 3
    const __m128i a = _mm_unpacklo_epi32(t[i], t[i + 1]);
    const __m128i b = _mm_unpacklo_epi32(t[i + 2], t[i + 3]);
    const __m128i c = _mm_unpackhi_epi32(t[i], t[i + 1]);
    const __m128i d = _mm_unpackhi_epi32(t[i + 2], t[i + 3]);
    store(to + i * to_stride, _mm_unpacklo_epi64(a, b));
    store(to + (i + 1) * to_stride, _mm_unpackhi_epi64(a, b));
    store(to + (i + 2) * to_stride, _mm_unpacklo_epi64(c, d));
    store(to + (i + 3) * to_stride, _mm_unpackhi_epi64(c, d));
  }
}

// `words` words W of each column, which lie side by side, become rows `to_stride` words apart. A
// word is a number, or a pair of neighbors along K.
template <class W>
void pack_columns(const char* from, int64_t stride, int64_t columns, int64_t words, W* to,
                  int64_t to_stride = kPackedPanel) {
  constexpr int64_t kSide = 16 / static_cast<int64_t>(sizeof(W));
  for (int64_t j = 0; j < columns; j += kSide) {
    const char* at = from + j * stride;
    const int64_t wide = std::min(kSide, columns - j);
    int64_t i = 0;
    if (wide == kSide)
      for (; i + kSide <= words; i += kSide)
        square(at + i * static_cast<int64_t>(sizeof(W)), stride, to + i * to_stride + j, to_stride);
    for (; i < words; ++i)
      for (int64_t c = 0; c < wide; ++c)
        std::memcpy(to + i * to_stride + j + c,
                    at + c * stride + i * static_cast<int64_t>(sizeof(W)), sizeof(W));
  }
}

// Two rows of 16-bit numbers as pairs; the second row may be null, for zeros.
inline void pack_pairs(const char* row, const char* next, int64_t columns, uint32_t* to) {
  int64_t j = 0;
  for (; j + 8 <= columns; j += 8) {
    const __m128i a = load(row + 2 * j), b = next ? load(next + 2 * j) : _mm_setzero_si128();
    store(to + j, _mm_unpacklo_epi16(a, b));
    store(to + j + 4, _mm_unpackhi_epi16(a, b));
  }
  for (; j < columns; ++j) {
    uint16_t pair[2] = {};
    std::memcpy(pair, row + 2 * j, 2);
    if (next) std::memcpy(pair + 1, next + 2 * j, 2);
    std::memcpy(to + j, pair, 4);
  }
}

}  // namespace pack_detail

// Packs columns [32 * panel, 32 * panel + 32) of `b`; those behind n become zero.
inline void pack_panel(const MatrixView& b, uint32_t format, int64_t panel, void* to) {
  const int64_t size = format == 0 ? 4 : 2, inner = packed_inner(format);
  const int64_t columns = std::min(kPackedPanel, b.n - panel * kPackedPanel);
  const char* from = b.data + panel * kPackedPanel * b.n_stride;
  if (columns < kPackedPanel || b.k % inner)
    std::memset(to, 0,
                static_cast<size_t>((b.k + inner - 1) / inner * inner * kPackedPanel * size));
  if (b.k_stride == size) {
    const int64_t words = b.k / inner;
    if (size * inner == 2) {
      pack_detail::pack_columns(from, b.n_stride, columns, words, static_cast<uint16_t*>(to));
      return;
    }
    pack_detail::pack_columns(from, b.n_stride, columns, words, static_cast<uint32_t*>(to));
    if (b.k % inner == 0) return;
    auto* last = static_cast<uint32_t*>(to) + words * kPackedPanel;
    for (int64_t j = 0; j < columns; ++j)
      std::memcpy(last + j, from + j * b.n_stride + words * 4, 2);
    return;
  }
  char* row = static_cast<char*>(to);
  for (int64_t i = 0; i < b.k; i += inner, row += kPackedPanel * size * inner) {
    const char* at = from + i * b.k_stride;
    if (inner == 2)
      pack_detail::pack_pairs(at, i + 1 < b.k ? at + b.k_stride : nullptr, columns,
                              reinterpret_cast<uint32_t*>(row));
    else
      std::memcpy(row, at, static_cast<size_t>(columns * size));
  }
}

}  // namespace ipex
