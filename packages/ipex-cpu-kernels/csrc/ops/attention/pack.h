// SPDX-License-Identifier: Apache-2.0
// Packs keys and values of one head into the panels that gemm.h multiplies with.
#pragma once

#include <cstring>

#include "attention.h"
#include "ipex/gemm.h"

namespace ipex {
namespace {

template <class T>
inline constexpr int64_t kInner = 1;
template <>
inline constexpr int64_t kInner<BFloat16> = 2;

#if IPEX_HAVE_AVX512

// Transposes 16 x 16 words: row r of the result is column r of the rows.
IPEX_INLINE void transpose_words(__m512i (&r)[16]) {
  __m512i t[16];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
    r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0x88);
    t[4 + i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0xdd);
    t[8 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0x88);
    t[12 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0xdd);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0x88);
    r[8 + i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0xdd);
    r[4 + i] = _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0x88);
    r[12 + i] = _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0xdd);
  }
}

// Sixteen rows of 32-bit words into columns of a panel; returns how many words of each row are
// done.
IPEX_INLINE int64_t transpose_rows(const char* from, int64_t stride, int64_t words, char* to) {
  int64_t w = 0;
  for (; w + 16 <= words; w += 16) {
    __m512i rows[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) rows[i] = _mm512_loadu_si512(from + i * stride + w * 4);
    transpose_words(rows);
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) _mm512_storeu_si512(to + (w + i) * kPanel * 4, rows[i]);
  }
  return w;
}

#endif  // IPEX_HAVE_AVX512

// Keys [begin, begin + count) of a head, count <= 32, into one panel [size][32].
template <class T>
void pack_keys(const T* keys, int64_t stride, int64_t count, int64_t size, T* panel) {
  constexpr int64_t inner = kInner<T>;
  if (count < kPanel || size % inner)
    std::memset(panel, 0, sizeof(T) * static_cast<size_t>(panel_size<T>(size)));
  for (int64_t first = 0; first < count; first += 16) {
    int64_t done = 0;
#if IPEX_HAVE_AVX512
    if constexpr (sizeof(T) * inner == 4) {
      if (count - first >= 16)
        done = inner * transpose_rows(reinterpret_cast<const char*>(keys + first * stride),
                                      stride * static_cast<int64_t>(sizeof(T)), size / inner,
                                      reinterpret_cast<char*>(panel + first * inner));
    }
#endif
    const int64_t last = count < first + 16 ? count : first + 16;
    for (int64_t j = first; j < last; ++j)
      for (int64_t d = done; d < size; ++d)
        panel[d / inner * inner * kPanel + j * inner + d % inner] = keys[j * stride + d];
  }
}

// Values [begin, end) of a head into all panels of columns; `to` is the start of the head, `depth`
// its padded keys. begin is a multiple of 32; rows behind `keys` become zero up to the next
// multiple of 32.
template <class T>
void pack_values(const T* values, int64_t stride, int64_t begin, int64_t end, int64_t keys,
                 int64_t size, int64_t depth, T* to) {
  constexpr int64_t inner = kInner<T>;
  for (int64_t column = 0; column < size; column += kPanel) {
    const int64_t width = size - column < kPanel ? size - column : kPanel;
    T* panel = to + column * depth;
    for (int64_t j = begin; j < end; j += inner) {
      T* row = panel + j * kPanel;
      if (width < kPanel || j + inner > keys) std::memset(row, 0, sizeof(T) * kPanel * inner);
      for (int64_t i = 0; i < inner && j + i < keys; ++i) {
        const T* from = values + (j + i) * stride + column;
        for (int64_t d = 0; d < width; ++d) row[d * inner + i] = from[d];
      }
    }
  }
}

}  // namespace
}  // namespace ipex
