// SPDX-License-Identifier: Apache-2.0
// Products of matrices. A work-group makes a tile of the result, kRows x kItemRows rows of
// kStrips x kColumns columns, from tiles of the right operand in local memory, in float32. An item
// makes kItemRows x kStrips elements: neighbouring items have neighbouring columns, so that a
// compiler for a CPU turns items into lanes, elements of the left operand into broadcasts and the
// sums into registers. The left operand is read where it is, in float32: to convert one in every
// item of every tile takes longer than to convert it once before.
#include "names.h"

namespace here = sycl::ext::oneapi;

// As wide as positions are: a compiler for a CPU does not see that neighbours stay neighbours when
// a position is cut to 32 bits.
using Index = unsigned long;

constexpr Index kColumns = 16;  // items in a row of the work-group
constexpr Index kRows = 16;     // rows of items
constexpr Index kItemRows = 8;  // rows of the result for each item
constexpr Index kStrips = 2;    // columns of the result for each item
constexpr Index kTileM = kRows * kItemRows;
constexpr Index kTileN = kStrips * kColumns;
constexpr Index kTileK = 256;

here::experimental::work_group_static<float[kTileK * kTileN]> right_tile;

// Fills `steps` rows of the tile from a matrix of which `columns` columns are left, `row` and
// `column` being its strides, and with zeros beyond. Neighbouring items read neighbouring
// addresses, and the compiler must see it: hence indices from the position in the work-group, and
// branches for strides of 1.
template <typename T>
inline void fill_tile(float* tile, const T* x, Index steps, long columns, long row, long column,
                      Index item_row, Index item_column) {
  if (columns >= kTileN && column == 1) {
    for (Index r = item_row; r < steps; r += kRows) {
#pragma unroll
      for (Index j = 0; j < kTileN; j += kColumns)
        tile[r * kTileN + j + item_column] = load(x + r * row + j, item_column);
    }
  } else if (columns >= kTileN && row == 1) {
    for (Index c = item_row; c < kTileN; c += kRows) {
      Index j = 0;
      for (; j + kColumns <= steps; j += kColumns)
        tile[(j + item_column) * kTileN + c] = load(x + c * column + j, item_column);
      if (j + item_column < steps)
        tile[(j + item_column) * kTileN + c] = load(x + c * column + j, item_column);
    }
  } else {
    for (Index r = item_row; r < steps; r += kRows) {
      for (Index c = item_column; c < kTileN; c += kColumns)
        tile[r * kTileN + c] = c < columns ? load(x, r * row + c * column) : 0.f;
    }
  }
}

// Adds `steps` products to the sums of an item; at(i) is where the rows of the left operand have
// their element i.
template <typename At>
inline void add_products(const float* const (&left)[kItemRows], At at, const float* right,
                         Index steps, float (&sums)[kStrips][kItemRows]) {
  for (Index i = 0; i < steps; ++i) {
    float values[kStrips];
#pragma unroll
    for (Index s = 0; s < kStrips; ++s) values[s] = right[i * kTileN + s * kColumns];
#pragma unroll
    for (Index r = 0; r < kItemRows; ++r) {
      const float value = left[r][at(i)];
#pragma unroll
      for (Index s = 0; s < kStrips; ++s) sums[s][r] += value * values[s];
    }
  }
}

// y = alpha * a b + beta * c for each matrix of a batch; strides are in elements.
template <typename T>
IPEX_KERNEL(3)
void matmul(const float* a, const T* b, const T* c, T* y, long m, long n, long k, long a_batch,
            long a_row, long a_column, long b_batch, long b_row, long b_column, long c_batch,
            long c_row, long c_column, long y_batch, long y_row, long y_column, float alpha,
            float beta) {
  const auto position = here::this_work_item::get_nd_item<3>();
  const Index column = position.get_local_id(2);
  const Index row = position.get_local_id(1);
  const long batch = position.get_group(0);
  const long first_row = position.get_group(1) * kTileM + row * kItemRows;
  const long first_column = position.get_group(2) * kTileN;
  a += batch * a_batch;
  b += batch * b_batch + first_column * b_column;
  float* right = *&right_tile;
  // Rows beyond the last one are computed as the last one, and dropped.
  const float* left[kItemRows];
#pragma unroll
  for (Index r = 0; r < kItemRows; ++r) {
    const long i = first_row + r;
    left[r] = a + (i < m ? i : m - 1) * a_row;
  }
  const bool plain = a_column == 1;
  float sums[kStrips][kItemRows] = {};
  for (long start = 0; start < k; start += kTileK) {
    const Index steps = k - start < static_cast<long>(kTileK) ? k - start : kTileK;
    fill_tile(right, b + start * b_row, steps, n - first_column, b_row, b_column, row, column);
    sycl::group_barrier(position.get_group());
    if (first_row < m) {
      if (plain) {
        add_products(left, [=](Index i) { return start + i; }, right + column, steps, sums);
      } else {
        add_products(
            left, [=](Index i) { return (start + i) * a_column; }, right + column, steps, sums);
      }
    }
    sycl::group_barrier(position.get_group());
  }
  if (first_row + kItemRows <= m && first_column + kTileN <= n && y_column == 1 && beta == 0.f) {
    T* out = y + batch * y_batch + first_row * y_row + first_column;
#pragma unroll
    for (Index r = 0; r < kItemRows; ++r) {
#pragma unroll
      for (Index s = 0; s < kStrips; ++s)
        store(out + r * y_row + s * kColumns, column, alpha * sums[s][r]);
    }
    return;
  }
#pragma unroll
  for (Index s = 0; s < kStrips; ++s) {
    const long j = first_column + column + s * kColumns;
#pragma unroll
    for (Index r = 0; r < kItemRows; ++r) {
      const long i = first_row + r;
      if (i < m && j < n) {
        float value = alpha * sums[s][r];
        if (beta != 0.f) value += beta * load(c, batch * c_batch + i * c_row + j * c_column);
        store(y, batch * y_batch + i * y_row + j * y_column, value);
      }
    }
  }
}

#define MATMUL(T)                                                                             \
  template void matmul<T>(const float*, const T*, const T*, T*, long, long, long, long, long, \
                          long, long, long, long, long, long, long, long, long, long, float,  \
                          float);
MATMUL(float)
MATMUL(half)
MATMUL(bf16)
