// SPDX-License-Identifier: Apache-2.0
#include "program/reduce.h"

#include "ipex/kernel/vec_functions.h"
#include "ipex/kernel/vec_loops.h"

namespace ipex {
namespace {

template <bool kMaximum>
IPEX_INLINE f32v combine(f32v a, f32v b) {
  if constexpr (kMaximum) return maximum(a, b);
  return a + b;
}

template <bool kMaximum>
inline constexpr float kStart = kMaximum ? -__builtin_inff() : 0.0f;

template <bool kMaximum, typename T>
float reduce_row(const T* x, int64_t n) {
  f32v part[kParts];
#pragma GCC unroll 4
  for (int k = 0; k < kParts; ++k) part[k] = set1(kStart<kMaximum>);
  for_pairs(
      n,
      [&](int64_t i, int k) IPEX_LAMBDA {
        const f32v2 v = load2(x + i);
        part[k] = combine<kMaximum>(part[k], v.a);
        part[k + 1] = combine<kMaximum>(part[k + 1], v.b);
      },
      [&](int64_t i, int64_t count) IPEX_LAMBDA {
        const f32v v = keep_n(load_n(x + i, count), count, set1(kStart<kMaximum>));
        part[0] = combine<kMaximum>(part[0], v);
      });
  const f32v all =
      combine<kMaximum>(combine<kMaximum>(part[0], part[1]), combine<kMaximum>(part[2], part[3]));
  if constexpr (!kMaximum) return reduce_add(all);
  return any(is_nan(all)) ? __builtin_nanf("") : reduce_max(all);
}

// Rows whose sum is taken before it is added to the total: the rounding error of a long sum grows
// with the number of its terms.
constexpr int64_t kRun = 128;

template <bool kMaximum, int kVectors, typename T>
IPEX_INLINE void reduce_columns(const T* x, int64_t rows, int64_t stride, float divisor, T* y,
                                int64_t count) {
  f32v total[kVectors];
#pragma GCC unroll 4
  for (int k = 0; k < kVectors; ++k) total[k] = set1(kStart<kMaximum>);
  for (int64_t first = 0; first < rows; first += kRun) {
    f32v part[kVectors];
#pragma GCC unroll 4
    for (int k = 0; k < kVectors; ++k) part[k] = set1(kStart<kMaximum>);
    const int64_t end = rows - first < kRun ? rows : first + kRun;
    for (int64_t r = first; r < end; ++r) {
      const T* p = x + r * stride;
#pragma GCC unroll 4
      for (int k = 0; k < kVectors; ++k)
        part[k] =
            combine<kMaximum>(part[k], count < kLanes ? load_n(p, count) : load(p + k * kLanes));
    }
#pragma GCC unroll 4
    for (int k = 0; k < kVectors; ++k) total[k] = combine<kMaximum>(total[k], part[k]);
  }
#pragma GCC unroll 4
  for (int k = 0; k < kVectors; ++k) {
    if constexpr (!kMaximum) total[k] = total[k] / set1(divisor);
    if (count < kLanes)
      store_n(y, total[k], count);
    else
      store(y + k * kLanes, total[k]);
  }
}

template <bool kMaximum, typename T>
void columns(const T* x, int64_t rows, int64_t stride, int64_t n, float divisor, T* y) {
  int64_t c = 0;
  for (; c + 4 * kLanes <= n; c += 4 * kLanes)
    reduce_columns<kMaximum, 4>(x + c, rows, stride, divisor, y + c, kLanes);
  for (; c < n; c += kLanes)
    reduce_columns<kMaximum, 1>(x + c, rows, stride, divisor, y + c,
                                n - c < kLanes ? n - c : kLanes);
}

}  // namespace
}  // namespace ipex

#define IPEX_REDUCE(suffix, type)                                                             \
  float ipex_k_reduce_row_##suffix(const type* x, int64_t n, bool maximum) {                  \
    return maximum ? ipex::reduce_row<true>(x, n) : ipex::reduce_row<false>(x, n);            \
  }                                                                                           \
  void ipex_k_reduce_columns_##suffix(const type* x, int64_t rows, int64_t stride, int64_t n, \
                                      bool maximum, float divisor, type* y) {                 \
    if (maximum)                                                                              \
      ipex::columns<true>(x, rows, stride, n, divisor, y);                                    \
    else                                                                                      \
      ipex::columns<false>(x, rows, stride, n, divisor, y);                                   \
  }
IPEX_REDUCE(f32, float)
IPEX_REDUCE(bf16, ipex::BFloat16)
IPEX_REDUCE(f16, ipex::Half)
