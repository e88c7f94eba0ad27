// SPDX-License-Identifier: Apache-2.0
// Sums over the rows of a matrix beside the main work of a kernel. Blocks of kRowsOfBlock rows add
// up in an array of their own, in the order of lanes of load2; finish_columns() adds the blocks, so
// that the result does not depend on the number of threads.
#pragma once

#include <cstdint>

#include "ipex/kernel/vec_loops.h"

namespace ipex {
namespace {

IPEX_INLINE void add_pair(float* sums, int64_t i, f32v2 v) {
  const f32v2 s = load2(sums + i);
  store2(sums + i, {s.a + v.a, s.b + v.b});
}
// Only the first n lanes of v count.
IPEX_INLINE void add_some(float* sums, int64_t i, f32v v, int64_t n) {
  store_n(sums + i, load_n(sums + i, n) + v, n);
}

// out[c] = sum of partial[b][c] over the blocks, whose arrays are `stride` numbers apart.
template <typename T>
IPEX_INLINE void finish_columns(const float* partial, int64_t blocks, int64_t stride, float* out,
                                int64_t cols) {
  for_pairs(
      cols,
      [&](int64_t i, int) IPEX_LAMBDA {
        f32v2 sum = {zero(), zero()};
        for (int64_t b = 0; b < blocks; ++b) {
          const f32v2 v = load2(partial + b * stride + i);
          sum = {sum.a + v.a, sum.b + v.b};
        }
        store2(out + i, kIsBFloat16<T> ? interleave(sum) : sum);
      },
      [&](int64_t i, int64_t count) IPEX_LAMBDA {
        f32v sum = zero();
        for (int64_t b = 0; b < blocks; ++b) sum = sum + load_n(partial + b * stride + i, count);
        store_n(out + i, sum, count);
      });
}

}  // namespace
}  // namespace ipex
