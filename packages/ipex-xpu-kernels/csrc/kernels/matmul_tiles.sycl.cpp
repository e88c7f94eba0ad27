// SPDX-License-Identifier: Apache-2.0
// Products of matrices on a GPU: a group makes kTile x kTile elements of the result, an item 8 x 8
// of them. Each round brings kDepth steps of both operands into the memory of the group, as float
// and a step after the other, while the numbers of the next round are on their way to registers.
#include "names.h"

namespace here = sycl::ext::oneapi;

constexpr int kTile = 128;
constexpr int kDepth = 16;
constexpr int kItems = 256;
constexpr int kEach = kTile * kDepth / kItems;  // numbers of an operand that an item brings
constexpr int kPitch = kTile + 4;               // neighboring steps begin in different banks
using Four = sycl::vec<float, 4>;

here::experimental::work_group_static<Four[kDepth * kPitch / 4]> left_tile;
here::experimental::work_group_static<Four[kDepth * kPitch / 4]> right_tile;

// The part of x[row, step] that a group needs: rows from `x` on, of which there are `rows`.
// Neighboring items bring neighboring numbers. Inlined, or its numbers would lie in memory.
template <typename T>
struct Operand {
  const T* x;
  long jump;  // from a number of an item to its next one
  long advance;
  long left;  // steps from the item's first one to the last
  int rows;   // from the item's first one
  int row;
  int step;
  bool by_steps;
  float values[kEach];

  __attribute__((always_inline)) Operand(const T* first, long row_stride, long step_stride,
                                         long rows_, long steps, int item)
      : advance(kDepth * step_stride), by_steps(step_stride == 1) {
    row = by_steps ? item / kDepth : item % kTile;
    step = by_steps ? item % kDepth : item / kTile;
    x = first + row * row_stride + step * step_stride;
    jump = by_steps ? kItems / kDepth * row_stride : kItems / kTile * step_stride;
    rows = static_cast<int>(rows_ < kTile ? rows_ : kTile) - row;
    left = steps - step;
  }
  __attribute__((always_inline)) void fetch() {
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const bool inside = by_steps ? i * (kItems / kDepth) < rows && left > 0
                                   : rows > 0 && i * (kItems / kTile) < left;
      values[i] = inside ? load(x, i * jump) : 0.f;
    }
    x += advance;
    left -= kDepth;
  }
  __attribute__((always_inline)) void put(Four* tile) const {
    float* numbers = reinterpret_cast<float*>(tile) + step * kPitch + row;
    if (by_steps) {
#pragma unroll
      for (int i = 0; i < kEach; ++i) numbers[i * (kItems / kDepth)] = values[i];
    } else {
#pragma unroll
      for (int i = 0; i < kEach; ++i) numbers[i * (kItems / kTile) * kPitch] = values[i];
    }
  }
};

// y[batch, i, j] = alpha * sum of a[batch, i, step] b[batch, j, step] + beta * c[batch, i, j];
// strides are in elements.
template <typename T>
IPEX_KERNEL(3)
void matmul_tiles(const T* a, const T* b, const T* c, T* y, long m, long n, long steps,
                  long a_batch, long a_row, long a_step, long b_batch, long b_row, long b_step,
                  long c_batch, long c_row, long c_column, long y_batch, long y_row, long y_column,
                  float alpha, float beta) {
  const auto item = here::this_work_item::get_nd_item<3>();
  const auto group = item.get_group();
  const int lane = static_cast<int>(item.get_local_id(2));
  const long batch = item.get_group(0);
  const long first_row = item.get_group(1) * kTile;
  const long first_column = item.get_group(2) * kTile;
  Operand<T> left(a + batch * a_batch + first_row * a_row, a_row, a_step, m - first_row, steps,
                  lane);
  Operand<T> right(b + batch * b_batch + first_column * b_row, b_row, b_step, n - first_column,
                   steps, lane);
  const int down = lane / 16 * 4;    // the item's rows are down + 0..3 and 64 + down + 0..3
  const int across = lane % 16 * 4;  // and its columns alike
  Four* const lefts = *&left_tile;
  Four* const rights = *&right_tile;
  float sums[8][8] = {};
  left.fetch();
  right.fetch();
  for (long first = 0; first < steps; first += kDepth) {
    left.put(lefts);
    right.put(rights);
    sycl::group_barrier(group);
    if (first + kDepth < steps) {
      left.fetch();
      right.fetch();
    }
#pragma unroll
    for (int step = 0; step < kDepth; ++step) {
      const Four* const l = lefts + (step * kPitch + down) / 4;
      const Four* const r = rights + (step * kPitch + across) / 4;
      const Four rows[2] = {l[0], l[kTile / 8]};
      const Four columns[2] = {r[0], r[kTile / 8]};
#pragma unroll
      for (int i = 0; i < 8; ++i) {
#pragma unroll
        for (int j = 0; j < 8; ++j) sums[i][j] += rows[i / 4][i % 4] * columns[j / 4][j % 4];
      }
    }
    sycl::group_barrier(group);
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const long row = first_row + down + i / 4 * (kTile / 2) + i % 4;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const long column = first_column + across + j / 4 * (kTile / 2) + j % 4;
      if (row < m && column < n) {
        float value = alpha * sums[i][j];
        if (beta != 0.f) value += beta * load(c, batch * c_batch + row * c_row + column * c_column);
        store(y, batch * y_batch + row * y_row + column * y_column, value);
      }
    }
  }
}

#define MATMUL_TILES(T)                                                                            \
  template void matmul_tiles<T>(const T*, const T*, const T*, T*, long, long, long, long, long,    \
                                long, long, long, long, long, long, long, long, long, long, float, \
                                float);
MATMUL_TILES(float)
MATMUL_TILES(half)
MATMUL_TILES(bf16)
