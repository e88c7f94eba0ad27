// SPDX-License-Identifier: Apache-2.0
// Products with few rows read b once and where it lies: to pack it would cost more than the
// product.
//
// Each element of y is summed in an order that depends on K only, so that columns may be cut
// anywhere.
#include "few_rows.h"

#include "ipex/gemm.h"
#include "ipex/transpose.h"
#include "ipex/vec.h"

namespace ipex {
namespace {

constexpr int kRowsMost = 4;  // at a time

template <class T>
struct Product {
  const FewRowsArgs& args;

  const T* a(int64_t row) const { return static_cast<const T*>(args.a) + row * args.a_stride; }
  const T* b(int64_t row) const { return static_cast<const T*>(args.b) + row * args.b_stride; }
  T* y(int64_t row) const { return static_cast<T*>(args.y) + row * args.y_stride; }
  const T* add(int64_t row) const {
    return args.add ? static_cast<const T*>(args.add) + row * args.add_stride : nullptr;
  }

  // Finishes `n` numbers of a row from `column` on, at most a vector.
  IPEX_INLINE void finish(f32v sum, int64_t row, int64_t column, int64_t n) const {
    f32v v = set1(args.alpha) * sum;
    if (n >= kLanes) {
      if (args.add) v = v + load(add(row) + column);
      store(y(row) + column, v);
    } else {
      if (args.add) v = v + load_n(add(row) + column, n);
      store_n(y(row) + column, v, n);
    }
  }

  // The same for two vectors as load2 gives them.
  IPEX_INLINE void finish(f32v2 sum, int64_t row, int64_t column) const {
    const f32v alpha = set1(args.alpha);
    f32v2 v{alpha * sum.a, alpha * sum.b};
    if (args.add) {
      const f32v2 more = load2(add(row) + column);
      v = {v.a + more.a, v.b + more.b};
    }
    store2(y(row) + column, v);
  }

  // Calls each(x, i) for the rows i of b in order; x[r] is element i of row `row + r` of a.
  template <int kRows, class F>
  IPEX_INLINE void for_rows_of_b(int64_t row, const F& each) const {
    const auto run = [&](const float* x, int64_t stride, int64_t first, int64_t depth) IPEX_LAMBDA {
      for (int64_t i = 0; i < depth; ++i) {
        f32v v[kRows];
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) v[r] = set1(x[r * stride + i]);
        each(v, first + i);
      }
    };
    if constexpr (sizeof(T) == sizeof(float)) {
      run(a(row), args.a_stride, 0, args.k);
    } else {
      // Converted a piece at a time: a broadcast from memory is free, a conversion is not.
      alignas(64) float copy[kRows * kDepth];
      for (int64_t d = 0; d < args.k; d += kDepth) {
        const int64_t depth = args.k - d < kDepth ? args.k - d : kDepth;
        convert_rows(a(row) + d, args.a_stride, kRows, depth, copy);
        run(copy, kDepth, d, depth);
      }
    }
  }

  // b by rows: kRows rows of y, kPairs * 2 vectors of columns.
  template <int kRows, int kPairs>
  void rows_block(int64_t row, int64_t column) const {
    f32v2 sum[kRows][kPairs];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
      for (int p = 0; p < kPairs; ++p) sum[r][p] = {zero(), zero()};
    const T* const from = b(0) + column;
    for_rows_of_b<kRows>(row, [&](const f32v(&x)[kRows], int64_t i) IPEX_LAMBDA {
      const T* at = from + i * args.b_stride;
#pragma GCC unroll 4
      for (int p = 0; p < kPairs; ++p) {
        const f32v2 w = load2(at + p * 2 * kLanes);
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r)
          sum[r][p] = {fma(x[r], w.a, sum[r][p].a), fma(x[r], w.b, sum[r][p].b)};
      }
    });
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
      for (int p = 0; p < kPairs; ++p) finish(sum[r][p], row + r, column + p * 2 * kLanes);
  }

  // b by rows, at most one vector of columns.
  template <int kRows>
  void rows_rest(int64_t row, int64_t column, int64_t n) const {
    f32v sum[kRows];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) sum[r] = zero();
    for_rows_of_b<kRows>(row, [&](const f32v(&x)[kRows], int64_t i) IPEX_LAMBDA {
      const T* at = b(i) + column;
      const f32v w = n >= kLanes ? load(at) : load_n(at, n);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) sum[r] = fma(x[r], w, sum[r]);
    });
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) finish(sum[r], row + r, column, n);
  }

  template <int kRows>
  void rows(int64_t row, int64_t begin, int64_t end) const {
    // 8 to 16 sums (8 where there are 16 registers), enough to hide the latency of an addition.
    constexpr int kSums = kLanes == 16 ? 16 : 8;
    constexpr int kPairs = kRows == 1 ? 4 : kSums / (kRows == 2 ? 2 : 4) / 2;
    constexpr int64_t kWide = kPairs * 2 * kLanes;
    int64_t c = begin;
    for (; c + kWide <= end; c += kWide) rows_block<kRows, kPairs>(row, c);
    for (; c + 2 * kLanes <= end; c += 2 * kLanes) rows_block<kRows, 1>(row, c);
    for (; c < end; c += kLanes) rows_rest<kRows>(row, c, end - c < kLanes ? end - c : kLanes);
  }

  // sum[c] = the products of a row with the column at b[c], lane by lane.
  template <int kColumns>
  IPEX_INLINE void dots(const T* x, const T* const (&w)[kColumns], f32v* to) const {
    f32v sum[kColumns];
#pragma GCC unroll 8
    for (int c = 0; c < kColumns; ++c) sum[c] = zero();
    int64_t i = 0;
    for (; i + 2 * kLanes <= args.k; i += 2 * kLanes) {
#if IPEX_HAVE_AVX512_BF16
      if constexpr (kIsBFloat16<T>) {
        const auto u = reinterpret_cast<__m512bh>(_mm512_loadu_si512(x + i));
#pragma GCC unroll 8
        for (int c = 0; c < kColumns; ++c)
          sum[c] =
              _mm512_dpbf16_ps(sum[c], u, reinterpret_cast<__m512bh>(_mm512_loadu_si512(w[c] + i)));
        continue;
      }
#endif
      const f32v2 u = load2(x + i);
#pragma GCC unroll 8
      for (int c = 0; c < kColumns; ++c) {
        const f32v2 v = load2(w[c] + i);
        sum[c] = fma(u.b, v.b, fma(u.a, v.a, sum[c]));
      }
    }
    for (; i < args.k; i += kLanes) {
      const int64_t n = args.k - i < kLanes ? args.k - i : kLanes;
      const f32v u = load_n(x + i, n);
#pragma GCC unroll 8
      for (int c = 0; c < kColumns; ++c) sum[c] = fma(u, load_n(w[c] + i, n), sum[c]);
    }
#pragma GCC unroll 8
    for (int c = 0; c < kColumns; ++c) to[c] = sum[c];
  }

  // Adds the lanes of neighbours, so that lane i of sum[0] becomes the sum of sum[i].
  template <int kBit = 1>
  static IPEX_INLINE void add_lanes(f32v (&sum)[kLanes]) {
#pragma GCC unroll 16
    for (int i = 0; i < static_cast<int>(kLanes); i += 2 * kBit) {
      exchange<kBit>(sum[i], sum[i + kBit]);
      sum[i] = sum[i] + sum[i + kBit];
    }
    if constexpr (2 * kBit < static_cast<int>(kLanes)) add_lanes<2 * kBit>(sum);
  }

  // b by columns: a vector of columns at a time, which all rows read while it is in L1.
  void columns(int64_t begin, int64_t end) const {
    constexpr int kColumns = kLanes < 8 ? kLanes : 8;
    for (int64_t column = begin; column < end; column += kLanes) {
      const int64_t n = end - column < kLanes ? end - column : kLanes;
      for (int64_t row = 0; row < args.m; ++row) {
        f32v sum[kLanes];
        for (int first = 0; first < kLanes; first += kColumns) {
          const T* w[kColumns];
          // Behind the last column it is read again; the result is not stored.
#pragma GCC unroll 8
          for (int c = 0; c < kColumns; ++c) w[c] = b(column + (first + c < n ? first + c : n - 1));
          dots<kColumns>(a(row), w, sum + first);
        }
        add_lanes(sum);
        finish(sum[0], row, column, n);
      }
    }
  }

  void run(int64_t begin, int64_t end) const {
    if (args.by_column) return columns(begin, end);
    for (int64_t row = 0; row < args.m; row += kRowsMost) {
      const int64_t n = args.m - row < kRowsMost ? args.m - row : kRowsMost;
      with_rows<kRowsMost>(n, [&]<int kRows>() IPEX_LAMBDA { rows<kRows>(row, begin, end); });
    }
  }
};

}  // namespace
}  // namespace ipex

void ipex_k_bmm_few_rows_f32(const ipex::FewRowsArgs* args, int64_t begin, int64_t end) {
  ipex::Product<float>{*args}.run(begin, end);
}

void ipex_k_bmm_few_rows_bf16(const ipex::FewRowsArgs* args, int64_t begin, int64_t end) {
  ipex::Product<ipex::BFloat16>{*args}.run(begin, end);
}

void ipex_k_bmm_few_rows_f16(const ipex::FewRowsArgs* args, int64_t begin, int64_t end) {
  ipex::Product<ipex::Half>{*args}.run(begin, end);
}
