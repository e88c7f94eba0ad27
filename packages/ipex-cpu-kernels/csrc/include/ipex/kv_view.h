// SPDX-License-Identifier: Apache-2.0
// Where the rows of keys and values of sequences lie, and how a row of each storage type is read.
//
// All caches are addressed by (block, head, row):
//   contiguous  block = sequence,                  row = position
//   paged       block = table[sequence][position / block_size], row = position % block_size
//   indirect    block = table[sequence][position], row = position   (beams share history)
// so one kernel reads all of them. Positions that follow each other in a block form a segment of
// equally spaced rows.
#pragma once

#include <cstdint>
#include <cstring>

#include "ipex/kernel.h"

namespace ipex {

enum class KvLayout : int32_t { kContiguous, kPaged, kIndirect };

// What a cache holds: the type of the query, int8, float8_e5m2 or float8_e4m3fn.
enum class KvType : int32_t { kSame, kInt8, kE5m2, kE4m3 };

// Storage types of quantized caches, beside float, BFloat16 and Half.
struct Int8 {
  int8_t bits;
};
struct E5m2 {
  uint8_t bits;
};
struct E4m3 {
  uint8_t bits;
};

// Calls f.operator()<E>() with the type of a cache's elements; T is the type of the query.
template <class T, class F>
inline __attribute__((always_inline)) void with_cache_type(KvType type, const F& f) {
  switch (type) {
    case KvType::kInt8:
      return f.template operator()<Int8>();
    case KvType::kE5m2:
      return f.template operator()<E5m2>();
    case KvType::kE4m3:
      return f.template operator()<E4m3>();
    default:
      return f.template operator()<T>();
  }
}

// Distances in elements.
struct KvStrides {
  int64_t block, head, row;
};

// Keys, or values. Elements of a row are consecutive. A row's value is its elements times `scale`
// times its own entry of `scales`, where there are any.
struct KvPart {
  const void* data;
  KvStrides strides;
  const float* scales;
  KvStrides scale_strides;
  float scale;
};

struct KvView {
  KvPart key, value;
  KvLayout layout;
  KvType type;
  const int32_t* table;  // block numbers (paged, indirect)
  int64_t table_stride;  // from one sequence to the next
  int64_t block_size;    // rows of a block (paged)
};

// `count` rows of one block from `row` on.
struct KvSegment {
  int64_t block, row, count;
};

// The segment that holds `position`, ending before `last`.
inline KvSegment kv_segment(const KvView& kv, int64_t sequence, int64_t position, int64_t last) {
  switch (kv.layout) {
    case KvLayout::kPaged: {
      const int64_t row = position % kv.block_size;
      const int64_t left = kv.block_size - row;
      return {kv.table[sequence * kv.table_stride + position / kv.block_size], row,
              last - position < left ? last - position : left};
    }
    case KvLayout::kIndirect: {
      const int32_t* table = kv.table + sequence * kv.table_stride;
      int64_t end = position + 1;
      while (end < last && table[end] == table[position]) ++end;
      return {table[position], position, end - position};
    }
    default:
      return {sequence, position, last - position};
  }
}

inline int64_t kv_offset(const KvStrides& strides, int64_t block, int64_t head, int64_t row) {
  return block * strides.block + head * strides.head + row * strides.row;
}

template <class E>
inline const E* kv_row(const KvPart& part, int64_t block, int64_t head, int64_t row) {
  return static_cast<const E*>(part.data) + kv_offset(part.strides, block, head, row);
}

// Factor on the elements of a row.
inline float kv_scale(const KvPart& part, int64_t block, int64_t head, int64_t row) {
  return part.scales ? part.scale * part.scales[kv_offset(part.scale_strides, block, head, row)]
                     : part.scale;
}

// Calls f(position, segment) for the segments of positions [first, last) of a sequence.
template <class F>
inline void for_segments(const KvView& kv, int64_t sequence, int64_t first, int64_t last,
                         const F& f) {
  while (first < last) {
    const KvSegment segment = kv_segment(kv, sequence, first, last);
    f(first, segment);
    first += segment.count;
  }
}

}  // namespace ipex
