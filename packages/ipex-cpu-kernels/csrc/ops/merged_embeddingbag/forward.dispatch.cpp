// SPDX-License-Identifier: Apache-2.0
// Sums of rows of embedding tables. The rows lie anywhere in memory, so what counts is that many of
// them are on their way at a time.
#include "bag_loop.h"

namespace ipex {
namespace {

// The lookups of one bag.
template <class T, class I>
struct Bag {
  const T* weight;
  int64_t stride;
  const I* rows;
  const T* factors;
  int64_t count;

  IPEX_INLINE const T* row(int64_t i) const {
    return weight + static_cast<int64_t>(rows[i]) * stride;
  }
};

// `kVectors` vectors of the sum from number `d` on; the last of them has n numbers.
template <int64_t kVectors, class T, class I>
IPEX_INLINE void add_rows(const Bag<T, I>& bag, f32v factor, int64_t d, int64_t n, T* out) {
  f32v sum[kVectors];
  const auto read = [&](const T* row, int64_t v) IPEX_LAMBDA {
    const T* from = row + d + v * kLanes;
    return n == kLanes ? load(from) : load_n(from, n);
  };
#pragma GCC unroll 8
  for (int64_t v = 0; v < kVectors; ++v) sum[v] = zero();
  for (int64_t i = 0; i < bag.count; ++i) {
    const T* row = bag.row(i);
    if (bag.factors) {
      const f32v scale = set1(load_n(bag.factors + i, 1)[0]);
#pragma GCC unroll 8
      for (int64_t v = 0; v < kVectors; ++v) sum[v] = fma(scale, read(row, v), sum[v]);
    } else {
#pragma GCC unroll 8
      for (int64_t v = 0; v < kVectors; ++v) sum[v] = sum[v] + read(row, v);
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

// A row as it is. Inline: a call of memcpy costs a good part of what so few bytes take.
template <class T>
IPEX_INLINE void copy_row(const T* from, int64_t dim, T* to) {
  constexpr int64_t kLine = 64 / static_cast<int64_t>(sizeof(T));
  int64_t d = 0;
  for (; d + kLine <= dim; d += kLine) __builtin_memcpy(to + d, from + d, 64);
  if (d < dim) __builtin_memcpy(to + d, from + d, static_cast<size_t>(dim - d) * sizeof(T));
}

template <class T, class I>
IPEX_INLINE void add_bag(const Bag<T, I>& bag, bool mean, int64_t dim, T* out) {
  if (bag.count == 1 && !bag.factors) return copy_row(bag.row(0), dim, out);
  const f32v factor = bag_factor(mean, bag.count);
  for_row_parts(dim, [&]<int64_t kVectors>(int64_t d, int64_t n)
                         IPEX_LAMBDA { add_rows<kVectors>(bag, factor, d, n, out); });
}

template <class T, class I>
IPEX_INLINE void run(const BagArgs& args, int64_t t, int64_t begin, int64_t end) {
  const BagTable& table = args.tables[t];
  const T* weight = static_cast<const T*>(table.weight);
  const I* indices = static_cast<const I*>(table.indices);
  const T* factors = static_cast<const T*>(table.factors);
  T* out = static_cast<T*>(args.out) + t * args.table_stride;
  for_each_bag<I>(
      args, table, begin, end,
      [&](int64_t row) IPEX_LAMBDA {
        fetch_row(weight + row * table.stride, args.dim * static_cast<int64_t>(sizeof(T)));
      },
      [&](int64_t b, int64_t first, int64_t last) IPEX_LAMBDA {
        const Bag<T, I> bag{weight, table.stride, indices + first,
                            factors ? factors + first : nullptr, last - first};
        add_bag(bag, args.mean, args.dim, out + b * args.bag_stride);
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

void ipex_k_merged_embeddingbag_f32(const ipex::BagArgs* args, int64_t table, int64_t begin,
                                    int64_t end) {
  ipex::run_any<float>(*args, table, begin, end);
}
void ipex_k_merged_embeddingbag_bf16(const ipex::BagArgs* args, int64_t table, int64_t begin,
                                     int64_t end) {
  ipex::run_any<ipex::BFloat16>(*args, table, begin, end);
}
void ipex_k_merged_embeddingbag_f16(const ipex::BagArgs* args, int64_t table, int64_t begin,
                                    int64_t end) {
  ipex::run_any<ipex::Half>(*args, table, begin, end);
}
