// SPDX-License-Identifier: Apache-2.0
// Products with few rows read b once and where it lies: to pack it would cost more than the
// product.
//
// Each element of y is summed in an order that depends on K only, so that columns may be cut
// anywhere.
#include "few_rows.h"

#include "ipex/kernel/gemm.h"
#include "ipex/kernel/transpose.h"
#include "ipex/kernel/vec.h"

namespace ipex {
namespace {

constexpr int kRowsMost = 4;     // of a, at a time
constexpr int64_t kRowsOfB = 8;  // at a time, where they are long; divides kDepth
static_assert(kDepth % kRowsOfB == 0);

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

  // Some rows of b and the columns of a that belong to them, as float.
  struct Part {
    const float* a;
    int64_t a_stride;
    int64_t first, depth;  // rows of b
    float* sums;           // what the parts before gave: [rows][kFewRowsColumns] from `begin` on
    int64_t begin;
    bool last;

    float* sum(int64_t r, int64_t column) const {
      return sums + r * kFewRowsColumns + column - begin;
    }
  };

  // b by rows: kRows rows of y, kPairs * 2 vectors of columns.
  template <int kRows, int kPairs>
  void rows_block(const Part& part, int64_t row, int64_t column) const {
    f32v2 sum[kRows][kPairs];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
      for (int p = 0; p < kPairs; ++p) {
        const float* from = part.sum(r, column + p * 2 * kLanes);
        sum[r][p] = part.first ? f32v2{load(from), load(from + kLanes)} : f32v2{zero(), zero()};
      }
    const T* at = b(part.first) + column;
    for (int64_t i = 0; i < part.depth; ++i, at += args.b_stride) {
      f32v x[kRows];
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) x[r] = set1(part.a[r * part.a_stride + i]);
#pragma GCC unroll 4
      for (int p = 0; p < kPairs; ++p) {
        const f32v2 w = load2(at + p * 2 * kLanes);
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r)
          sum[r][p] = {fma(x[r], w.a, sum[r][p].a), fma(x[r], w.b, sum[r][p].b)};
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
      for (int p = 0; p < kPairs; ++p) {
        const int64_t c = column + p * 2 * kLanes;
        if (part.last) {
          finish(sum[r][p], row + r, c);
        } else {
          store(part.sum(r, c), sum[r][p].a);
          store(part.sum(r, c) + kLanes, sum[r][p].b);
        }
      }
  }

  // b by rows, at most one vector of columns.
  template <int kRows>
  void rows_rest(const Part& part, int64_t row, int64_t column, int64_t n) const {
    f32v sum[kRows];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) sum[r] = part.first ? load(part.sum(r, column)) : zero();
    const T* at = b(part.first) + column;
    for (int64_t i = 0; i < part.depth; ++i, at += args.b_stride) {
      const f32v w = n >= kLanes ? load(at) : load_n(at, n);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) sum[r] = fma(set1(part.a[r * part.a_stride + i]), w, sum[r]);
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      if (part.last)
        finish(sum[r], row + r, column, n);
      else
        store(part.sum(r, column), sum[r]);
    }
  }

  template <int kRows>
  void rows(int64_t row, int64_t begin, int64_t end) const {
    // 8 to 16 sums (8 where there are 16 registers), enough to hide the latency of an addition.
    constexpr int kSums = kLanes == 16 ? 16 : 8;
    constexpr int kPairs = kRows == 1 ? 4 : kSums / (kRows == 2 ? 2 : 4) / 2;
    constexpr int64_t kWide = kPairs * 2 * kLanes;
    // Long rows are read as long stretches of memory, a few at a time; the sums wait in L1. Down
    // the columns of a block each row would be in another page.
    const int64_t step = end - begin > kWide ? kRowsOfB : kDepth;
    alignas(64) float sums[kRows * kFewRowsColumns];
    for (int64_t d = 0; d == 0 || d < args.k; d += kDepth) {  // k = 0 gives zeros
      const int64_t depth = args.k - d < kDepth ? args.k - d : kDepth;
      // Converted a piece at a time: a broadcast from memory is free, a conversion is not.
      alignas(64) float copy[sizeof(T) < sizeof(float) ? kRows * kDepth : 1];
      const float* x = copy;
      int64_t x_stride = kDepth;
      if constexpr (sizeof(T) < sizeof(float)) {
        convert_rows(a(row) + d, args.a_stride, kRows, depth, copy);
      } else {
        x = a(row) + d;
        x_stride = args.a_stride;
      }
      for (int64_t i = 0; i == 0 || i < depth; i += step) {
        const int64_t left = depth - i;
        const Part part{
            x + i, x_stride, d + i, left < step ? left : step, sums, begin, d + i + step >= args.k};
        int64_t c = begin;
        for (; c + kWide <= end; c += kWide) rows_block<kRows, kPairs>(part, row, c);
        for (; c + 2 * kLanes <= end; c += 2 * kLanes) rows_block<kRows, 1>(part, row, c);
        for (; c < end; c += kLanes)
          rows_rest<kRows>(part, row, c, end - c < kLanes ? end - c : kLanes);
      }
    }
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

  // Adds the lanes of neighbors, so that lane i of sum[0] becomes the sum of sum[i].
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
