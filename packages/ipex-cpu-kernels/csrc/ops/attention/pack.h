// SPDX-License-Identifier: Apache-2.0
// Packs keys and values of one head into the panels that gemm.h multiplies with. Rows are given by
// their addresses, so that they may lie in pages.
#pragma once

#include <cstring>

#include "attention.h"
#include "ipex/kernel/gemm.h"
#include "ipex/kernel/kv_load.h"

namespace ipex {
namespace {

template <class T>
inline constexpr int64_t kInner = 1;
template <>
inline constexpr int64_t kInner<BFloat16> = 2;

// Keys are padded with zeros along the head up to a multiple of this.
template <class T>
inline constexpr int64_t kDepthStep = kInner<T>;
#if IPEX_HAVE_AMX
template <>
inline constexpr int64_t kDepthStep<BFloat16> = 32;
#endif

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

// Sixteen rows into sixteen columns of a panel; returns how many elements of each row are done.
template <class T>
IPEX_INLINE int64_t transpose_rows(const T* const* rows, int64_t size, T* panel) {
  constexpr int64_t elements = 4 / static_cast<int64_t>(sizeof(T));  // of one word
  int64_t d = 0;
  for (; d + 16 * elements <= size; d += 16 * elements) {
    __m512i words[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) words[i] = _mm512_loadu_si512(rows[i] + d);
    transpose_words(words);
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) {
      T* to = panel + (d + i * elements) * kPanel;
      if constexpr (elements == kInner<T>) {
        _mm512_storeu_si512(to, words[i]);
      } else {  // the two halves of a word belong to different rows of the panel
        store_u16(&to->bits, _mm512_cvtepi32_epi16(words[i]));
        store_u16(&to[kPanel].bits, _mm512_cvtepi32_epi16(_mm512_srli_epi32(words[i], 16)));
      }
    }
  }
  return d;
}

#endif  // IPEX_HAVE_AVX512

// Elements [0, size) of `count` <= 32 keys into the rows of a panel [size][32].
template <class T>
void pack_keys(const T* const* rows, int64_t count, int64_t size, T* panel) {
  constexpr int64_t inner = kInner<T>;
  if (count < kPanel || size % kDepthStep<T>)
    std::memset(panel, 0, sizeof(T) * static_cast<size_t>(kPanel * round_up(size, kDepthStep<T>)));
  for (int64_t first = 0; first < count; first += 16) {
    int64_t done = 0;
#if IPEX_HAVE_AVX512
    if (count - first >= 16) done = transpose_rows(rows + first, size, panel + first * inner);
#endif
    const int64_t last = count < first + 16 ? count : first + 16;
    for (int64_t j = first; j < last; ++j)
      for (int64_t d = done; d < size; ++d)
        panel[d / inner * inner * kPanel + j * inner + d % inner] = rows[j][d];
  }
}

#if IPEX_HAVE_AVX512
// Thirty-two elements of two rows, alternating.
IPEX_INLINE void interleave(const BFloat16* a, const BFloat16* b, BFloat16* to) {
  const __m512i x = _mm512_loadu_si512(a), y = _mm512_loadu_si512(b);
  const __m512i lower = _mm512_unpacklo_epi16(x, y), upper = _mm512_unpackhi_epi16(x, y);
  const __m512i first = _mm512_set_epi64(11, 10, 3, 2, 9, 8, 1, 0);
  const __m512i second = _mm512_set_epi64(15, 14, 7, 6, 13, 12, 5, 4);
  _mm512_storeu_si512(to, _mm512_permutex2var_epi64(lower, first, upper));
  _mm512_storeu_si512(to + 32, _mm512_permutex2var_epi64(lower, second, upper));
}
#endif

// Elements [0, size) of `count` <= 32 values into 32 rows of each panel of columns; panels are
// `distance` elements apart. Rows behind the last value become zero.
template <class T>
void pack_values(const T* const* rows, int64_t count, int64_t size, int64_t distance, T* to) {
  constexpr int64_t inner = kInner<T>;
  for (int64_t column = 0; column < size; column += kPanel) {
    const int64_t width = size - column < kPanel ? size - column : kPanel;
    T* panel = to + column / kPanel * distance;
    for (int64_t j = 0; j < kPanel; j += inner) {
      T* row = panel + j * kPanel;
      if (width == kPanel && j + inner <= count) {
        if constexpr (inner == 1) {
          std::memcpy(row, rows[j] + column, sizeof(T) * kPanel);
          continue;
        }
#if IPEX_HAVE_AVX512
        if constexpr (inner == 2) {
          interleave(rows[j] + column, rows[j + 1] + column, row);
          continue;
        }
#endif
      } else {
        std::memset(row, 0, sizeof(T) * kPanel * inner);
      }
      for (int64_t i = 0; i < inner && j + i < count; ++i) {
        const T* from = rows[j + i] + column;
        for (int64_t d = 0; d < width; ++d) row[d * inner + i] = from[d];
      }
    }
  }
}

// Columns of stored keys and values that are converted at a time.
inline constexpr int64_t kSlice = 128;

// `count` stored numbers, times the scale of their row, in the type of the query.
template <class E, class T>
IPEX_INLINE void convert(const E* from, float scale, int64_t count, T* to) {
  const f32v factor = set1(scale);
  int64_t d = 0;
  for (; d + kLanes <= count; d += kLanes) store(to + d, load(from + d) * factor);
  if (d < count) store_n(to + d, load_n(from + d, count - d) * factor, count - d);
}

// Rows of keys or values that were found in the cache.
template <class E>
struct Rows {
  const E* at[kPanel];
  float scale[kPanel];  // of rows that have one of their own
};

// The keys or values [first, first + count) of a head.
template <class E>
IPEX_INLINE void find_rows(const AttentionArgs& args, const AttentionSequence& sequence,
                           const KvPart& part, int64_t kv_head, int64_t first, int64_t count,
                           Rows<E>& rows) {
  first += sequence.kv_first;
  for_segments(args.kv, sequence.kv, first, first + count,
               [&](int64_t position, const KvSegment& segment) {
                 for (int64_t j = 0; j < segment.count; ++j) {
                   const int64_t to = position - first + j, row = segment.row + j;
                   rows.at[to] = kv_row<E>(part, segment.block, kv_head, row);
                   if (part.scales)
                     rows.scale[to] =
                         part.scales[kv_offset(part.scale_strides, segment.block, kv_head, row)];
                 }
               });
}

template <class T>
struct Packed {
  T* keys;
  T* values;
  int64_t panel;     // elements from one panel of keys to the next
  int64_t distance;  // and of values
};

template <class T>
IPEX_INLINE Packed<T> packed_head(const AttentionArgs& args, const AttentionSequence& sequence,
                                  char* packed) {
  const int64_t keys = sequence.end - sequence.begin;
  T* base = reinterpret_cast<T*>(packed);
  return {base, base + packed_keys(keys, args.size), kPanel * round_up(args.size, kDepthStep<T>),
          kPanel * round_up(keys, 32)};
}

// Calls f(rows, column, width) with the rows [first, first + count) of a head in the type of the
// query, all columns at once if they are stored so, else converted piece by piece.
template <class T, class F>
IPEX_INLINE void with_rows_of(const AttentionArgs& args, const AttentionSequence& sequence,
                              const KvPart& part, int64_t kv_head, int64_t first, int64_t count,
                              const F& f) {
  if (args.kv.type == KvType::kSame) {
    Rows<T> rows;
    find_rows(args, sequence, part, kv_head, first, count, rows);
    return f(static_cast<const T* const*>(rows.at), 0, args.size);
  }
  with_cache_type<T>(args.kv.type, [&]<class E>() IPEX_LAMBDA {
    alignas(64) T converted[kPanel * kSlice];
    const T* pieces[kPanel];
    for (int64_t j = 0; j < kPanel; ++j) pieces[j] = converted + j * kSlice;
    Rows<E> rows;
    find_rows(args, sequence, part, kv_head, first, count, rows);
    for (int64_t d = 0; d < args.size; d += kSlice) {
      const int64_t width = args.size - d < kSlice ? args.size - d : kSlice;
      for (int64_t j = 0; j < count; ++j)
        convert(rows.at[j] + d, part.scales ? rows.scale[j] : 1.0f, width, converted + j * kSlice);
      f(static_cast<const T* const*>(pieces), d, width);
    }
  });
}

// One block of keys and values.
template <class T>
void pack_block(const AttentionArgs& args, const AttentionPack& item, char* memory) {
  const AttentionSequence& sequence = args.sequences[item.sequence];
  const Packed<T> to = packed_head<T>(args, sequence, memory + item.packed);
  const int64_t last =
      item.first + kKeyBlock < sequence.end ? item.first + kKeyBlock : sequence.end;
  for (int64_t first = item.first; first < last; first += kPanel) {
    const int64_t count = last - first < kPanel ? last - first : kPanel;
    T* keys = to.keys + (first - sequence.begin) / kPanel * to.panel;
    T* values = to.values + (first - sequence.begin) * kPanel;
    with_rows_of<T>(args, sequence, args.kv.key, item.kv_head, first, count,
                    [&](const T* const* rows, int64_t column, int64_t width) {
                      pack_keys(rows, count, width, keys + column * kPanel);
                    });
    with_rows_of<T>(args, sequence, args.kv.value, item.kv_head, first, count,
                    [&](const T* const* rows, int64_t column, int64_t width) {
                      pack_values(rows, count, width, to.distance,
                                  values + column / kPanel * to.distance);
                    });
  }
}

}  // namespace
}  // namespace ipex
