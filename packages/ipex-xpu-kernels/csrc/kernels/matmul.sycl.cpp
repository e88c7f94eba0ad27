// SPDX-License-Identifier: Apache-2.0
// Products of matrices. Both operands are packed first, to panels in float32 whose numbers lie in
// the order in which they are used: that costs one pass, and no stride of the operands makes the
// lines of a cache collide afterwards. An item makes kRows x kStrips elements of the result:
// neighboring items have neighboring columns, so that a compiler for a CPU turns items into
// lanes, elements of the left operand into broadcasts and the sums into registers, of which AVX-512
// has 32.
#include "names.h"

namespace here = sycl::ext::oneapi;

// As wide as positions are: a compiler for a CPU does not see that neighbors stay neighbors when
// a position is cut to 32 bits.
using Index = unsigned long;

constexpr Index kLanes = 16;
constexpr Index kRows = 12;   // rows of a left panel: what an item makes
constexpr Index kStrips = 2;  // strips of kLanes columns of a right panel
constexpr Index kColumns = kStrips * kLanes;
constexpr Index kSteps = 16;  // steps of the sums in a block of a panel, the last one filled with 0
constexpr Index kSmallRows = 8;  // rows of the result that an item makes of small operands
inline Index smaller(Index a, Index b) { return a < b ? a : b; }

// A block of a panel of kWidth rows of x[batch, row, step], whose strides are x_batch,
// `along` and `by`.
template <typename T, Index kWidth>
struct Block {
  const T* x;  // its first element
  float* to;
  Index rows;   // that there are, of kWidth
  Index steps;  // that there are, of kSteps
  Index lane;

  Block(const T* x_, float* panels, long count, long all_steps, long x_batch, long along, long by) {
    const auto item = here::this_work_item::get_nd_item<3>();
    const Index index = item.get_global_id(0);
    const Index block = item.get_global_id(1);
    const Index parts = (count + kWidth - 1) / kWidth;
    const Index blocks = (all_steps + kSteps - 1) / kSteps;
    const Index batch = index / parts;
    const Index first = (index - batch * parts) * kWidth;
    lane = item.get_local_id(2);
    rows = smaller(count - first, kWidth);
    steps = block < blocks ? smaller(all_steps - block * kSteps, kSteps) : 0;
    x = x_ + batch * x_batch + first * along + block * kSteps * by;
    to = panels + (index * blocks + block) * kSteps * kWidth;
  }
  bool whole() const { return rows == kWidth && steps == kSteps; }
};

// Blocks of the left operand, whose steps are neighbors, hold a row after the other.
template <typename T>
IPEX_KERNEL(3)
void pack_left(const T* x, float* panels, long count, long all_steps, long x_batch, long along) {
  const Block<T, kRows> block(x, panels, count, all_steps, x_batch, along, 1);
  const Index lane = block.lane;
  if (block.steps == 0) return;
  if (block.whole()) {
#pragma unroll
    for (Index r = 0; r < kRows; ++r) block.to[r * kSteps + lane] = load(block.x + r * along, lane);
  } else {
    for (Index r = 0; r < kRows; ++r)
      block.to[r * kSteps + lane] =
          r < block.rows && lane < block.steps ? load(block.x + r * along, lane) : 0.f;
  }
}

// Blocks of the right operand hold a step after the other.
template <typename T>
IPEX_KERNEL(3)
void pack_right(const T* x, float* panels, long count, long all_steps, long x_batch, long along,
                long by) {
  const Block<T, kColumns> block(x, panels, count, all_steps, x_batch, along, by);
  const Index lane = block.lane;
  if (block.steps == 0) return;
  if (block.whole() && along == 1) {
#pragma unroll
    for (Index i = 0; i < kSteps; ++i) {
#pragma unroll
      for (Index j = 0; j < kColumns; j += kLanes)
        block.to[i * kColumns + j + lane] = load(block.x + i * by + j, lane);
    }
  } else if (block.whole() && by == 1) {
#pragma unroll
    for (Index j = 0; j < kColumns; ++j)
      block.to[lane * kColumns + j] = load(block.x + j * along, lane);
  } else {
    for (Index i = 0; i < kSteps; ++i) {
      for (Index j = lane; j < kColumns; j += kLanes)
        block.to[i * kColumns + j] =
            j < block.rows && i < block.steps ? load(block.x, i * by + j * along) : 0.f;
    }
  }
}

// y = alpha * a b + beta * c for each matrix of a batch, of packed a and b of so many blocks;
// strides are in elements.
template <typename T>
IPEX_KERNEL(3)
void matmul(const float* a, const float* b, const T* c, T* y, long m, long n, long blocks,
            long a_batch, long b_batch, long c_batch, long c_row, long c_column, long y_batch,
            long y_row, long y_column, float alpha, float beta) {
  const auto item = here::this_work_item::get_nd_item<3>();
  const Index lane = item.get_local_id(2);
  const Index batch = item.get_group(0);
  const long first_row = item.get_global_id(1) * kRows;
  const long first_column = item.get_group(2) * kColumns;
  if (first_row >= m) return;
  const float* left = a + batch * a_batch + first_row * blocks * kSteps;
  const float* right = b + batch * b_batch + first_column * blocks * kSteps + lane;
  float sums[kStrips][kRows] = {};
  for (Index block = 0; block < static_cast<Index>(blocks); ++block) {
    for (Index i = 0; i < kSteps; ++i) {
      float values[kStrips];
#pragma unroll
      for (Index s = 0; s < kStrips; ++s) values[s] = right[i * kColumns + s * kLanes];
#pragma unroll
      for (Index r = 0; r < kRows; ++r) {
        const float value = left[r * kSteps + i];
#pragma unroll
        for (Index s = 0; s < kStrips; ++s) sums[s][r] += value * values[s];
      }
    }
    left += kRows * kSteps;
    right += kColumns * kSteps;
  }
  const bool whole =
      first_row + static_cast<long>(kRows) <= m && first_column + static_cast<long>(kColumns) <= n;
  if (whole && y_column == 1 && beta == 0.f) {
    T* out = y + batch * y_batch + first_row * y_row + first_column;
#pragma unroll
    for (Index r = 0; r < kRows; ++r) {
#pragma unroll
      for (Index s = 0; s < kStrips; ++s)
        store(out + r * y_row + s * kLanes, lane, alpha * sums[s][r]);
    }
    return;
  }
#pragma unroll
  for (Index s = 0; s < kStrips; ++s) {
    const long j = first_column + lane + s * kLanes;
#pragma unroll
    for (Index r = 0; r < kRows; ++r) {
      const long i = first_row + r;
      if (i < m && j < n) {
        float value = alpha * sums[s][r];
        if (beta != 0.f) value += beta * load(c, batch * c_batch + i * c_row + j * c_column);
        store(y, batch * y_batch + i * y_row + j * y_column, value);
      }
    }
  }
}

// The same of operands where they are, which small ones need not leave: to pack them takes longer
// than their product. Neighboring columns of the right one are neighbors.
template <typename T>
IPEX_KERNEL(3)
void matmul_small(const T* a, const T* b, const T* c, T* y, long m, long n, long steps,
                  long a_batch, long a_row, long a_step, long b_batch, long b_step, long c_batch,
                  long c_row, long c_column, long y_batch, long y_row, long y_column, float alpha,
                  float beta) {
  const auto item = here::this_work_item::get_nd_item<3>();
  const Index lane = item.get_local_id(2);
  const long batch = item.get_group(0);
  const long first_row = item.get_group(1) * kSmallRows;
  const long first_column = item.get_group(2) * kLanes;
  // Rows and columns beyond the last one are computed as the last one, and dropped.
  const T* left[kSmallRows];
#pragma unroll
  for (Index r = 0; r < kSmallRows; ++r) {
    const long i = first_row + r;
    left[r] = a + batch * a_batch + (i < m ? i : m - 1) * a_row;
  }
  const T* right = b + batch * b_batch + first_column;
  float sums[kSmallRows] = {};
  const auto add = [&](Index column) {
    for (long i = 0; i < steps; ++i) {
      const float value = load(right + i * b_step, column);
#pragma unroll
      for (Index r = 0; r < kSmallRows; ++r) sums[r] += load(left[r], i * a_step) * value;
    }
  };
  if (first_column + static_cast<long>(kLanes) <= n) {
    add(lane);
  } else {
    add(smaller(lane, n - 1 - first_column));
  }
  const long j = first_column + lane;
  if (j >= n) return;
#pragma unroll
  for (Index r = 0; r < kSmallRows; ++r) {
    const long i = first_row + r;
    if (i < m) {
      float value = alpha * sums[r];
      if (beta != 0.f) value += beta * load(c, batch * c_batch + i * c_row + j * c_column);
      store(y, batch * y_batch + i * y_row + j * y_column, value);
    }
  }
}

// The product of a matrix, whose steps are neighbors, and a vector: y[i] = alpha * a[i] x +
// beta * c[i]. A group sums a row.
template <typename T>
IPEX_KERNEL(1)
void dot_rows(const T* a, const T* x, const T* c, T* y, unsigned long steps, long rows,
              long a_batch, long a_row, long x_batch, long c_batch, long c_row, long y_batch,
              long y_row, float alpha, float beta) {
  const Row row(steps);
  const long batch = static_cast<long>(row.index) / rows;
  const long i = static_cast<long>(row.index) - batch * rows;
  a += batch * a_batch + i * a_row;
  x += batch * x_batch;
  float value;
#ifdef IPEX_GPU
  constexpr int kCount = ipex::Wide<T>::count;
  if (steps % kCount == 0 && ipex::aligned(a, x)) {  // 16 bytes of both at once
    float total = 0.f;
    row.each_of(steps / kCount, [&](unsigned long part) IPEX_INLINE {
      const auto left = ipex::load_wide(a + part * kCount);
      const auto right = ipex::load_wide(x + part * kCount);
#pragma unroll
      for (int j = 0; j < kCount; ++j) total += left.get(j) * right.get(j);
    });
    value = row.joined(total, sycl::plus<float>());
  } else
#endif
    value = row.sum([=](unsigned long step) { return load(a, step) * load(x, step); });
  value *= alpha;
  if (!row.leader()) return;
  if (beta != 0.f) value += beta * load(c, batch * c_batch + i * c_row);
  store(y, batch * y_batch + i * y_row, value);
}

#define MATMUL(T)                                                                                 \
  template void pack_left<T>(const T*, float*, long, long, long, long);                           \
  template void pack_right<T>(const T*, float*, long, long, long, long, long);                    \
  template void matmul<T>(const float*, const float*, const T*, T*, long, long, long, long, long, \
                          long, long, long, long, long, long, float, float);                      \
  template void matmul_small<T>(const T*, const T*, const T*, T*, long, long, long, long, long,   \
                                long, long, long, long, long, long, long, long, long, float,      \
                                float);                                                           \
  template void dot_rows<T>(const T*, const T*, const T*, T*, unsigned long, long, long, long,    \
                            long, long, long, long, long, float, float);
MATMUL(float)
MATMUL(half)
MATMUL(bf16)
