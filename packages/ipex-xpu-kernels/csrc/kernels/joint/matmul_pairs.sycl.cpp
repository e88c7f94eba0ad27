// SPDX-License-Identifier: Apache-2.0
// Products of matrices by joint_matrix where the layout of ../pairs.h holds. A group makes
// 64 kParts x 128 elements of the result, a sub-group 64 x 64 of them. While tiles in the memory of
// the group are multiplied, the next ones are written beside them from registers, to which the two
// after these are on their way.
#include "pairs.h"

constexpr int kBlock = 64;     // rows and columns of a sub-group
constexpr int kColumns = 128;  // of a group
constexpr int kMatrices = kBlock / kSide;
constexpr int kMostParts = 4;
constexpr int kBand = 8;  // rows of groups that share columns while these are in a cache
here::experimental::work_group_static<Vector[2 * (kMostParts * kBlock + kColumns) * kDepth / 8]>
    tiles_of_group;

// y[batch, i, j] = alpha * sum of a[batch, i, step] b[batch, j, step] + beta * c[batch, i, j], with
// rows and steps of a or b swapped where their names say so. Pitches and batches of a and b are
// multiples of 8, and so are their sizes in the dimension of neighboring numbers.
template <typename T, int kParts, bool a_swapped, bool b_swapped>
IPEX_KERNEL(3)
void matmul_pairs(const T* a, const T* b, const T* c, T* y, int m, int n, int steps, long a_batch,
                  long a_pitch, long b_batch, long b_pitch, long c_batch, long c_row, long c_column,
                  long y_batch, long y_row, long y_column, float alpha, float beta) {
  using E = typename Element<T>::type;
  constexpr int kRows = kParts * kBlock;
  constexpr int kItems = kParts * (kColumns / kBlock) * 32;
  constexpr int kLefts = kRows / kSide * kUnits;  // of a tile
  constexpr int kRights = kColumns / kSide * kUnits;
  constexpr int kStored = kLefts + kRights;  // to the next tiles
  const auto position = here::this_work_item::get_nd_item<3>();
  const auto group = position.get_group();
  const auto sub_group = position.get_sub_group();
  const int item = static_cast<int>(position.get_local_id(2));
  const long batch = position.get_group(0);
  const auto down_groups = static_cast<unsigned int>(position.get_group_range(1));
  const auto across_groups = static_cast<unsigned int>(position.get_group_range(2));
  const unsigned int index = static_cast<unsigned int>(position.get_group(1)) * across_groups +
                             static_cast<unsigned int>(position.get_group(2));
  const unsigned int band = index / (kBand * across_groups) * kBand;
  const unsigned int height = down_groups - band < kBand ? down_groups - band : kBand;
  const unsigned int of_band = index - band * across_groups;
  const int first_row = static_cast<int>(band + of_band % height) * kRows;
  const int first_column = static_cast<int>(of_band / height) * kColumns;
  Operand<kRows, kItems, a_swapped, true> left(
      a + batch * a_batch + (a_swapped ? first_row : first_row * a_pitch), a_pitch, m - first_row,
      steps, item);
  Operand<kColumns, kItems, b_swapped, false> right(
      b + batch * b_batch + (b_swapped ? first_column : first_column * b_pitch), b_pitch,
      n - first_column, steps, item);
  const int down = item / 64 * kBlock;
  const int across = item / 32 % 2 * kBlock;
  const int g = item % 32 / 4;
  const int t = item % 4;
  Vector* const tiles = *&tiles_of_group;
  const Vector* const lefts = tiles + down / kSide * kUnits;
  const Vector* const rights = tiles + kLefts + across / kSide * kUnits;
  const int own[2] = {unit_at(g, t, 0), unit_at(g, t, 1)};
  Sums sums[kMatrices][kMatrices];
#pragma unroll
  for (int i = 0; i < kMatrices; ++i) {
#pragma unroll
    for (int j = 0; j < kMatrices; ++j) joint::joint_matrix_fill(sub_group, sums[i][j], 0.f);
  }
  const auto multiply = [&](int now) IPEX_INLINE {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      Right<E> columns[kMatrices];
#pragma unroll
      for (int j = 0; j < kMatrices; ++j)
        set_unit(sub_group, columns[j], rights[now + j * kUnits + own[half]]);
#pragma unroll
      for (int i = 0; i < kMatrices; ++i) {
        Left<E> rows;
        set_unit(sub_group, rows, lefts[now + i * kUnits + own[half]]);
#pragma unroll
        for (int j = 0; j < kMatrices; ++j)
          joint::joint_matrix_mad(sub_group, sums[i][j], rows, columns[j], sums[i][j]);
      }
    }
  };
  const auto fetch = [&](auto set) IPEX_INLINE {  // zeros behind the last step
    left.template fetch<decltype(set)::value>();
    right.template fetch<decltype(set)::value>();
  };
  const auto put = [&](auto set, int to) IPEX_INLINE {
    left.template put<decltype(set)::value>(tiles + to);
    right.template put<decltype(set)::value>(tiles + to + kLefts);
  };
  constexpr std::integral_constant<int, 0> even;
  constexpr std::integral_constant<int, 1> odd;
  fetch(even);
  fetch(odd);
  put(even, 0);
  fetch(even);
  sycl::group_barrier(group);
#pragma unroll 1
  for (int first = 0; first < steps; first += 2 * kDepth) {
    multiply(0);
    put(odd, kStored);
    fetch(odd);
    sycl::group_barrier(group);
    if (first + kDepth < steps) multiply(kStored);
    put(even, 0);
    fetch(even);
    sycl::group_barrier(group);
  }

  // The item's numbers: four neighbors of rows 2 g and 2 g + 1 of each matrix.
  y += batch * y_batch;
  if (beta != 0.f) c += batch * c_batch;
  const bool dense = y_column == 1 && y_row % 4 == 0 && y_batch % 4 == 0 && n % 4 == 0 &&
                     reinterpret_cast<unsigned long>(y) % 8 == 0;
#pragma unroll
  for (int i = 0; i < kMatrices; ++i) {
#pragma unroll
    for (int j = 0; j < kMatrices; ++j) {
      const int column = first_column + across + kSide * j + 4 * t;
      float values[2][4];
      int e = 0;
      joint::joint_matrix_apply(sub_group, sums[i][j], [&](float& value) IPEX_INLINE {
        values[e / 2 % 2][e % 2 * 2 + e / 4] = alpha * value;
        ++e;
      });
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = first_row + down + row_of(i, g, half);
        if (row >= m) continue;
        if (beta != 0.f) {
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            if (column + k < n)
              values[half][k] += beta * load(c, row * c_row + (column + k) * c_column);
          }
        }
        store_four(y + row * y_row + column * y_column, y_column, n - column, dense, values[half]);
      }
    }
  }
}

#define MATMUL_PAIRS(T, kParts, a_swapped, b_swapped)                                            \
  template void matmul_pairs<T, kParts, a_swapped, b_swapped>(                                   \
      const T*, const T*, const T*, T*, int, int, int, long, long, long, long, long, long, long, \
      long, long, long, float, float);
#define OF_ROWS(T, kParts)              \
  MATMUL_PAIRS(T, kParts, false, false) \
  MATMUL_PAIRS(T, kParts, false, true)  \
  MATMUL_PAIRS(T, kParts, true, false)  \
  MATMUL_PAIRS(T, kParts, true, true)
#define ALL(T)  \
  OF_ROWS(T, 2) \
  OF_ROWS(T, 4)
ALL(half)
ALL(bf16)
