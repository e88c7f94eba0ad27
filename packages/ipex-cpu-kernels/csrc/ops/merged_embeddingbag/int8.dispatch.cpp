// SPDX-License-Identifier: Apache-2.0
// Sums of rows of int8 embedding tables with a scale for each row.
#include "ipex/kv_load.h"
#include "ipex/vec.h"
#include "merged_embeddingbag.h"

namespace ipex {
namespace {

// Lookups from one to the row that is asked for ahead of its use.
inline constexpr int64_t kAhead = 12;

template <class I>
struct Bag {
  const BagTable* table;
  const I* rows;
  int64_t count;

  IPEX_INLINE const Int8* row(int64_t i) const {
    return static_cast<const Int8*>(table->weight) + static_cast<int64_t>(rows[i]) * table->stride;
  }
};

// `kVectors` vectors of the sum from number `d` on; the last of them has n numbers.
template <int64_t kVectors, class T, class I>
IPEX_INLINE void add_rows(const Bag<I>& bag, f32v factor, int64_t d, int64_t n, T* out) {
  f32v sum[kVectors];
#pragma GCC unroll 8
  for (int64_t v = 0; v < kVectors; ++v) sum[v] = zero();
  for (int64_t i = 0; i < bag.count; ++i) {
    const Int8* row = bag.row(i) + d;
    const f32v scale = set1(bag.table->scales[bag.rows[i]]);
#pragma GCC unroll 8
    for (int64_t v = 0; v < kVectors; ++v) {
      const Int8* from = row + v * kLanes;
      sum[v] = fma(scale, n == kLanes ? load(from) : load_n(from, n), sum[v]);
    }
  }
#pragma GCC unroll 8
  for (int64_t v = 0; v < kVectors; ++v) {
    if (n == kLanes)
      store(out + d + v * kLanes, sum[v] * factor);
    else
      store_n(out + d + v * kLanes, sum[v] * factor, n);
  }
}

template <class T, class I>
IPEX_INLINE void run(const BagArgs& args, int64_t t, int64_t begin, int64_t end) {
  constexpr int64_t kVectors = kLanes == 16 ? 8 : 4;
  const BagTable& table = args.tables[t];
  const I* indices = static_cast<const I*>(table.indices);
  const I* offsets = static_cast<const I*>(table.offsets);
  T* out = static_cast<T*>(args.out) + t * args.table_stride;
  for (int64_t b = begin; b < end; ++b) {
    const int64_t first = offsets[b];
    const int64_t last = b + 1 < args.bags || args.include_last ? offsets[b + 1] : table.lookups;
    const Bag<I> bag{&table, indices + first, last - first};
    const int64_t ahead = last + kAhead < table.lookups ? last + kAhead : table.lookups;
    for (int64_t i = first + kAhead; i < ahead; ++i) {
      const char* row =
          static_cast<const char*>(table.weight) + static_cast<int64_t>(indices[i]) * table.stride;
      for (int64_t at = 0; at < args.dim; at += 64) __builtin_prefetch(row + at);
      __builtin_prefetch(table.scales + indices[i]);
    }
    const f32v factor =
        set1(args.mean && bag.count > 1 ? 1.0f / static_cast<float>(bag.count) : 1.0f);
    T* to = out + b * args.bag_stride;
    int64_t d = 0;
    for (; d + kVectors * kLanes <= args.dim; d += kVectors * kLanes)
      add_rows<kVectors>(bag, factor, d, kLanes, to);
    for (; d + kLanes <= args.dim; d += kLanes) add_rows<1>(bag, factor, d, kLanes, to);
    if (d < args.dim) add_rows<1>(bag, factor, d, args.dim - d, to);
  }
}

template <class T>
void run_any(const BagArgs& args, int64_t table, int64_t begin, int64_t end) {
  if (args.wide)
    run<T, int64_t>(args, table, begin, end);
  else
    run<T, int32_t>(args, table, begin, end);
}

}  // namespace
}  // namespace ipex

void ipex_k_merged_embeddingbag_int8_f32(const ipex::BagArgs* args, int64_t table, int64_t begin,
                                         int64_t end) {
  ipex::run_any<float>(*args, table, begin, end);
}
void ipex_k_merged_embeddingbag_int8_bf16(const ipex::BagArgs* args, int64_t table, int64_t begin,
                                          int64_t end) {
  ipex::run_any<ipex::BFloat16>(*args, table, begin, end);
}
void ipex_k_merged_embeddingbag_int8_f16(const ipex::BagArgs* args, int64_t table, int64_t begin,
                                         int64_t end) {
  ipex::run_any<ipex::Half>(*args, table, begin, end);
}
