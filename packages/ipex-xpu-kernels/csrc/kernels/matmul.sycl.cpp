// SPDX-License-Identifier: Apache-2.0
// Products of matrices. A work-group makes a tile of the result from tiles of the operands in local
// memory, in float32. An item makes kItemRows x 2 elements: neighbouring items have neighbouring
// columns, so that a compiler for a CPU turns items into lanes, rows of the left operand into
// broadcasts and the sums into registers.
#include "names.h"

namespace here = sycl::ext::oneapi;

// As wide as positions are: a compiler for a CPU does not see that neighbours stay neighbours when
// a position is cut to 32 bits.
using Index = unsigned long;

constexpr Index kColumns = 32;  // items in a row of the work-group
constexpr Index kRows = 8;      // rows of items
constexpr Index kItemRows = 8;  // rows of the result for each item
constexpr Index kTileM = kRows * kItemRows;
constexpr Index kTileN = 2 * kColumns;
constexpr Index kTileK = 64;

here::experimental::work_group_static<float[kTileM * kTileK]> left_tile;
here::experimental::work_group_static<float[kTileK * kTileN]> right_tile;

// Fills a tile of kTileRows x kTileColumns from a matrix of rows x columns, `row` and `column`
// being its strides, and with zeros beyond. Neighbouring items read neighbouring addresses, and the
// compiler must see it: hence indices from the position in the work-group, and branches for strides
// of 1.
template <Index kTileRows, Index kTileColumns, typename T>
inline void fill_tile(float* tile, const T* x, long rows, long columns, long row, long column,
                      Index item_row, Index item_column) {
  if (rows >= kTileRows && columns >= kTileColumns && column == 1) {
    for (Index r = item_row; r < kTileRows; r += kRows) {
#pragma unroll
      for (Index j = 0; j < kTileColumns; j += kColumns)
        tile[r * kTileColumns + j + item_column] = load(x + r * row + j, item_column);
    }
  } else if (rows >= kTileRows && columns >= kTileColumns && row == 1) {
    for (Index c = item_row; c < kTileColumns; c += kRows) {
#pragma unroll
      for (Index j = 0; j < kTileRows; j += kColumns)
        tile[(j + item_column) * kTileColumns + c] = load(x + c * column + j, item_column);
    }
  } else {
    for (Index r = item_row; r < kTileRows; r += kRows) {
      for (Index c = item_column; c < kTileColumns; c += kColumns)
        tile[r * kTileColumns + c] = r < rows && c < columns ? load(x, r * row + c * column) : 0.f;
    }
  }
}

// Adds the products of a tile to the sums of an item; steps of the left tile from row to row and
// from column to column.
template <Index kRowStep, Index kColumnStep>
inline void add_products(const float* left, const float* right, float (&sums)[2][kItemRows]) {
  for (Index i = 0; i < kTileK; ++i) {
    const float b0 = right[i * kTileN];
    const float b1 = right[i * kTileN + kColumns];
#pragma unroll
    for (Index r = 0; r < kItemRows; ++r) {
      const float value = left[r * kRowStep + i * kColumnStep];
      sums[0][r] += value * b0;
      sums[1][r] += value * b1;
    }
  }
}

// y = alpha * a b + beta * c for each matrix of a batch; strides are in elements.
template <typename T>
IPEX_KERNEL(3)
void matmul(const T* a, const T* b, const T* c, T* y, long m, long n, long k, long a_batch,
            long a_row, long a_column, long b_batch, long b_row, long b_column, long c_batch,
            long c_row, long c_column, long y_batch, long y_row, long y_column, float alpha,
            float beta) {
  const auto position = here::this_work_item::get_nd_item<3>();
  const Index column = position.get_local_id(2);
  const Index row = position.get_local_id(1);
  const long batch = position.get_group(0);
  const long first_row = position.get_group(1) * kTileM;
  const long first_column = position.get_group(2) * kTileN;
  a += batch * a_batch + first_row * a_row;
  b += batch * b_batch + first_column * b_column;
  float* left = *&left_tile;
  float* right = *&right_tile;
  const bool left_by_columns = a_row == 1;
  float sums[2][kItemRows] = {};
  for (long start = 0; start < k; start += kTileK) {
    if (left_by_columns) {
      fill_tile<kTileK, kTileM>(left, a + start * a_column, k - start, m - first_row, a_column,
                                a_row, row, column);
    } else {
      fill_tile<kTileM, kTileK>(left, a + start * a_column, m - first_row, k - start, a_row,
                                a_column, row, column);
    }
    fill_tile<kTileK, kTileN>(right, b + start * b_row, k - start, n - first_column, b_row,
                              b_column, row, column);
    sycl::group_barrier(position.get_group());
    if (left_by_columns) {
      add_products<1, kTileM>(left + row * kItemRows, right + column, sums);
    } else {
      add_products<kTileK, 1>(left + row * kItemRows * kTileK, right + column, sums);
    }
    sycl::group_barrier(position.get_group());
  }
#pragma unroll
  for (Index half_tile = 0; half_tile < 2; ++half_tile) {
    const long j = first_column + column + half_tile * kColumns;
#pragma unroll
    for (Index r = 0; r < kItemRows; ++r) {
      const long i = first_row + row * kItemRows + r;
      if (i < m && j < n) {
        float value = alpha * sums[half_tile][r];
        if (beta != 0.f) value += beta * load(c, batch * c_batch + i * c_row + j * c_column);
        store(y, batch * y_batch + i * y_row + j * y_column, value);
      }
    }
  }
}

#define MATMUL(T)                                                                               \
  template void matmul<T>(const T*, const T*, const T*, T*, long, long, long, long, long, long, \
                          long, long, long, long, long, long, long, long, long, float, float);
MATMUL(float)
MATMUL(half)
MATMUL(bf16)
