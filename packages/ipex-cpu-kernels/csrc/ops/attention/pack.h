// SPDX-License-Identifier: Apache-2.0
// Packs keys and values of one head into the panels that gemm.h multiplies with. Rows are given by
// their addresses, so that they may lie in pages.
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

// The bits of the Half that a float8 stands for; e4m3 needs a factor of 256 afterwards.
IPEX_INLINE uint16_t half_bits_e4m3(uint8_t code) {
  const auto sign = static_cast<uint16_t>((code & 0x80) << 8);
  const auto rest = static_cast<uint16_t>((code & 0x7f) << 7);
  return static_cast<uint16_t>(sign | ((code & 0x7f) == 0x7f ? 0x7fff : rest));
}

// `count` <= kSlice stored numbers in the type of the query. All three formats fit all three types.
template <class T>
IPEX_INLINE void convert(KvKind kind, const uint8_t* from, int64_t count, T* to) {
  alignas(64) float values[kSlice + kLanes];
  if (kind == KvKind::kInt8) {
    for (int64_t d = 0; d < count; ++d)
      values[d] = static_cast<float>(static_cast<int8_t>(from[d]));
  } else {
    alignas(64) Half halves[kSlice + kLanes];
    if (kind == KvKind::kFp8E5M2) {
      for (int64_t d = 0; d < count; ++d) halves[d].bits = static_cast<uint16_t>(from[d] << 8);
    } else {
      for (int64_t d = 0; d < count; ++d) halves[d].bits = half_bits_e4m3(from[d]);
    }
    const f32v factor = set1(kind == KvKind::kFp8E4M3 ? 256.0f : 1.0f);
    for (int64_t d = 0; d < count; d += kLanes)
      store(values + d, load_n(halves + d, count - d < kLanes ? count - d : kLanes) * factor);
  }
  for (int64_t d = 0; d < count; d += kLanes)
    store_n(to + d, load(values + d), count - d < kLanes ? count - d : kLanes);
}

// Addresses of the rows of the keys [first, first + count) of a head.
template <class U>
IPEX_INLINE void find_rows(const AttentionArgs& args, const AttentionSequence& sequence,
                           const void* base, const HeadStrides& strides, int64_t block_stride,
                           int64_t kv_head, int64_t first, int64_t count, const U** rows) {
  const U* head = static_cast<const U*>(base) + kv_head * strides.head;
  if (!sequence.blocks) {
    for (int64_t j = 0; j < count; ++j) rows[j] = head + (first + j) * strides.row;
    return;
  }
  int64_t block = first / args.block_size, place = first % args.block_size;
  for (int64_t j = 0; j < count; ++j) {
    rows[j] = head + sequence.blocks[block] * block_stride + place * strides.row;
    if (++place == args.block_size) {
      ++block;
      place = 0;
    }
  }
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
    if (args.kv_kind == KvKind::kSame) {
      const T* rows[kPanel];
      find_rows(args, sequence, sequence.key, args.key_strides, args.key_block_stride, item.kv_head,
                first, count, rows);
      pack_keys(rows, count, args.size, keys);
      find_rows(args, sequence, sequence.value, args.value_strides, args.value_block_stride,
                item.kv_head, first, count, rows);
      pack_values(rows, count, args.size, to.distance, values);
      continue;
    }
    alignas(64) T converted[kPanel * kSlice];
    const T* rows[kPanel];
    for (int64_t j = 0; j < kPanel; ++j) rows[j] = converted + j * kSlice;
    const uint8_t* stored[kPanel];
    for (int64_t d = 0; d < args.size; d += kSlice) {
      const int64_t width = args.size - d < kSlice ? args.size - d : kSlice;
      find_rows(args, sequence, sequence.key, args.key_strides, args.key_block_stride, item.kv_head,
                first, count, stored);
      for (int64_t j = 0; j < count; ++j)
        convert(args.kv_kind, stored[j] + d, width, converted + j * kSlice);
      pack_keys(rows, count, width, keys + d * kPanel);
      find_rows(args, sequence, sequence.value, args.value_strides, args.value_block_stride,
                item.kv_head, first, count, stored);
      for (int64_t j = 0; j < count; ++j)
        convert(args.kv_kind, stored[j] + d, width, converted + j * kSlice);
      pack_values(rows, count, width, to.distance, values + d / kPanel * to.distance);
    }
  }
}

}  // namespace
}  // namespace ipex
