// SPDX-License-Identifier: Apache-2.0
// The bags of a table one after the other, for kernels whose rows lie anywhere in memory: the rows
// of later lookups are asked for ahead of their use.
#pragma once

#include "fetch_row.h"
#include "ipex/kernel/vec.h"
#include "merged_embeddingbag.h"

namespace ipex {
namespace {

// Lookups from one to the row that is asked for ahead of its use.
inline constexpr int64_t kAhead = 16;

// add(b, first, last) sums the lookups [first, last) of bag b; fetch(row) asks for a row by its
// number.
template <class I, class Fetch, class Add>
IPEX_INLINE void for_each_bag(const BagArgs& args, const BagTable& table, int64_t begin,
                              int64_t end, const Fetch& fetch, const Add& add) {
  const I* indices = static_cast<const I*>(table.indices);
  const I* offsets = static_cast<const I*>(table.offsets);
  for (int64_t b = begin; b < end; ++b) {
    const int64_t first = offsets[b];
    const int64_t last = b + 1 < args.bags || args.include_last ? offsets[b + 1] : table.lookups;
    const int64_t ahead = last + kAhead < table.lookups ? last + kAhead : table.lookups;
    for (int64_t i = first + kAhead; i < ahead; ++i) fetch(static_cast<int64_t>(indices[i]));
    add(b, first, last);
  }
}

// Calls f<count>() unless `count`, up to kMost, is 0.
template <int64_t kMost, class F>
IPEX_INLINE void with_count(int64_t count, const F& f) {
  if constexpr (kMost > 0) {
    if (count == kMost)
      f.template operator()<kMost>();
    else
      with_count<kMost - 1>(count, f);
  }
}

// Cuts a row into parts that registers have sums for, as few as can be, since each part reads all
// numbers of rows again. f<kVectors>(d, n) has kVectors vectors from number d on, the last of n
// numbers.
template <class F>
IPEX_INLINE void for_row_parts(int64_t dim, const F& f) {
  constexpr int64_t kMost = kLanes == 16 ? 8 : 4;
  int64_t d = 0;
  for (; d + kMost * kLanes <= dim; d += kMost * kLanes) f.template operator()<kMost>(d, kLanes);
  const int64_t vectors = (dim - d) / kLanes;
  with_count<kMost - 1>(
      vectors, [&]<int64_t kVectors>() IPEX_LAMBDA { f.template operator()<kVectors>(d, kLanes); });
  d += vectors * kLanes;
  if (d < dim) f.template operator()<1>(d, dim - d);
}

IPEX_INLINE f32v bag_factor(bool mean, int64_t count) {
  return set1(mean && count > 1 ? 1.0f / static_cast<float>(count) : 1.0f);
}

}  // namespace
}  // namespace ipex
