// SPDX-License-Identifier: Apache-2.0
// Sums of rows of int8 embedding tables with a scale for each row.
#include "bag_loop.h"
#include "ipex/kernel/kv_load.h"

namespace ipex {
namespace {

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
  const BagTable& table = args.tables[t];
  const Int8* weight = static_cast<const Int8*>(table.weight);
  const I* indices = static_cast<const I*>(table.indices);
  T* out = static_cast<T*>(args.out) + t * args.table_stride;
  for_each_bag<I>(
      args, table, begin, end,
      [&](int64_t row) IPEX_LAMBDA {
        fetch_row(weight + row * table.stride, args.dim);
        __builtin_prefetch(table.scales + row);
      },
      [&](int64_t b, int64_t first, int64_t last) IPEX_LAMBDA {
        const Bag<I> bag{&table, indices + first, last - first};
        const f32v factor = bag_factor(args.mean, bag.count);
        T* to = out + b * args.bag_stride;
        for_row_parts(args.dim, [&]<int64_t kVectors>(int64_t d, int64_t n)
                                    IPEX_LAMBDA { add_rows<kVectors>(bag, factor, d, n, to); });
      });
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
