// SPDX-License-Identifier: Apache-2.0
// Products of matrices by joint_matrix where the layout of ../pairs.h holds. A group makes 128 x
// 128 elements of the result, a sub-group 64 x 64 of them. While a tile in the memory of the group
// is multiplied, the two after it are on their way there. Two groups fit a unit: one multiplies
// while the other waits.
#include "pairs.h"

constexpr int kBlock = 64;              // rows and columns of a sub-group
constexpr int kSides = 2;               // sub-groups of a group, across and down
constexpr int kSize = kSides * kBlock;  // rows and columns of a group
constexpr int kItems = kSides * kSides * 32;
constexpr int kMatrices = kBlock / kSide;
constexpr int kTile = kSize * kDepth / 8;  // vectors of an operand
constexpr int kTiles = 3;
constexpr int kBand = 8;  // rows of groups that share columns while these are in a cache
here::experimental::work_group_static<Vector[kTiles * 2 * kTile]> tiles_of_group;

// Starts to copy a vector to the memory of the group, or zeros if it is not `there`. A device whose
// compiler has no such copy, for which SYCL has a name for whole rows alone, copies at once.
IPEX_INLINE inline void start_copy(Vector* to, const void* from, bool there) {
#ifdef __NVPTX__
  __nvvm_cp_async_cg_shared_global_16((__attribute__((address_space(3))) void*)to,
                                      (const __attribute__((address_space(1))) void*)from,
                                      there ? 16 : 0);
#else
  *to = there ? *static_cast<const Vector*>(from) : Vector(0);
#endif
}
// Ends a set of copies.
IPEX_INLINE inline void end_copies() {
#ifdef __NVPTX__
  __nvvm_cp_async_commit_group();
#endif
}
// Waits for the item's own copies but for the last `kLeft` sets.
template <int kLeft>
IPEX_INLINE inline void await_copies() {
#ifdef __NVPTX__
  __nvvm_cp_async_wait_group(kLeft);
#endif
}

// The part of x[row, step] that a group needs, or of x[step, row] if swapped: kSize rows, kDepth
// steps at a time. A tile has its vectors in the order of memory, but for the places of the ones
// that would meet in a bank: lines of 64 bytes of two rows change places, as do vectors of a step.
template <bool swapped>
struct Operand {
  static constexpr int kAcross = (swapped ? kSize : kDepth) / 8;  // vectors of a line
  static constexpr int kJobs = kTile / kItems;
  static constexpr int kJump = kItems / kAcross;  // lines between the jobs of an item

  const unsigned short* x;  // the item's first number
  long pitch;
  int lines;    // that there are from its first one on
  int numbers;  // of a line, from its first one on
  int places[kJobs];

  IPEX_INLINE Operand(const void* first, long pitch_, int rows, int steps, int item)
      : pitch(pitch_) {
    const int line = item / kAcross;
    const int vector = item % kAcross;
    x = static_cast<const unsigned short*>(first) + line * pitch + vector * 8;
    lines = (swapped ? steps : rows) - line;
    numbers = (swapped ? rows : steps) - vector * 8;
#pragma unroll
    for (int i = 0; i < kJobs; ++i) {
      const int own = line + i * kJump;
      places[i] = swapped ? own * kAcross + (vector ^ (own / 8 % 4 * 2))
                          : own / 2 * 8 + (own ^ own / 8) % 2 * 4 + vector;
    }
  }
  // Starts to copy the next steps; zeros where there is nothing.
  IPEX_INLINE void copy(Vector* tile) {
#pragma unroll
    for (int i = 0; i < kJobs; ++i) {
      start_copy(tile + places[i], x + i * kJump * pitch, i * kJump < lines && 0 < numbers);
    }
    x += swapped ? kDepth * pitch : kDepth;
    (swapped ? lines : numbers) -= kDepth;
  }
};

// What an item of a sub-group needs of a tile: rows 8 g to 8 g + 7 of 64, steps 8 t to 8 t + 7.
template <bool swapped, bool left>
struct Reader {
  static constexpr int kAcross = kSize / 8;
  int places[2];
  Vector vectors[8];  // of rows, or of steps if swapped
  unsigned int zero;

  // `zero_` is 0, which the compiler does not know: vectors of a left operand would be copied for
  // each product, since four numbers of two of them have to be neighbors.
  IPEX_INLINE Reader(int first, int g, int t, unsigned int zero_) : zero(zero_) {
    if (swapped) {
      places[0] = 8 * t * kAcross + first / 8 + (g ^ 2 * t);
    } else {
      places[0] = (first / 2 + 4 * g) * 8 + g % 2 * 4 + t;
      places[1] = (first / 2 + 4 * g) * 8 + (1 - g % 2) * 4 + t;
    }
  }
  IPEX_INLINE void read(const Vector* tile) {
#pragma unroll
    for (int i = 0; i < 8; ++i)
      vectors[i] = swapped ? tile[places[0] + i * kAcross] : tile[places[i % 2] + i / 2 * 8];
  }
  // Steps 2 k and 2 k + 1 of a half of them.
  IPEX_INLINE unsigned int pair(int row, int half, int k) const {
    if (!swapped) return left ? vectors[row][2 * half + k] ^ zero : vectors[row][2 * half + k];
    const int step = 4 * half + 2 * k;
    return pair_of_row(vectors[step][row / 2], vectors[step + 1][row / 2], row);
  }
  // Rows 2 i and 2 i + 1 of every eight are the ones of matrix i.
  IPEX_INLINE Vector unit(int i, int half) const {
    return unit_of<left>(pair(2 * i, half, 0), pair(2 * i, half, 1), pair(2 * i + 1, half, 0),
                         pair(2 * i + 1, half, 1));
  }
};

// The first `count` of eight numbers, `step` apart; at once if `dense`: neighbors at a multiple of
// their bytes.
template <typename T>
IPEX_INLINE inline void store_eight(T* target, long step, int count, bool dense, const float* x) {
  if (dense && count > 0) {
    *reinterpret_cast<Vector*>(target) = Vector{pair_of<T>(x[0], x[1]), pair_of<T>(x[2], x[3]),
                                                pair_of<T>(x[4], x[5]), pair_of<T>(x[6], x[7])};
    return;
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (i < count) store(target, i * step, x[i]);
  }
}

// y[batch, i, j] = alpha * sum of a[batch, i, step] b[batch, j, step] + beta * c[batch, i, j], with
// rows and steps of a or b swapped where their names say so. Pitches and batches of a and b are
// multiples of 8, and so are their sizes in the dimension of neighboring numbers. (If only b is
// swapped, the transposed product is faster.)
template <typename T, bool a_swapped, bool b_swapped>
IPEX_KERNEL(3)
void matmul_pairs(const T* a, const T* b, const T* c, T* y, int m, int n, int steps, long a_batch,
                  long a_pitch, long b_batch, long b_pitch, long c_batch, long c_row, long c_column,
                  long y_batch, long y_row, long y_column, float alpha, float beta) {
  using E = typename Element<T>::type;
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
  const int first_row = static_cast<int>(band + of_band % height) * kSize;
  const int first_column = static_cast<int>(of_band / height) * kSize;
  Operand<a_swapped> left(a + batch * a_batch + (a_swapped ? first_row : first_row * a_pitch),
                          a_pitch, m - first_row, steps, item);
  Operand<b_swapped> right(
      b + batch * b_batch + (b_swapped ? first_column : first_column * b_pitch), b_pitch,
      n - first_column, steps, item);
  const int down = item / 64 * kBlock;
  const int across = item / 32 % 2 * kBlock;
  const int g = item % 32 / 4;
  const int t = item % 4;
  const auto zero = static_cast<unsigned int>(m >> 31);
  Reader<a_swapped, true> lefts(down, g, t, zero);
  Reader<b_swapped, false> rights(across, g, t, zero);
  Sums sums[kMatrices][kMatrices];
#pragma unroll
  for (int i = 0; i < kMatrices; ++i) {
#pragma unroll
    for (int j = 0; j < kMatrices; ++j) joint::joint_matrix_fill(sub_group, sums[i][j], 0.f);
  }
  Vector* const tiles = *&tiles_of_group;
  const auto copy = [&](int to) IPEX_INLINE {
    left.copy(tiles + to);
    right.copy(tiles + to + kTile);
    end_copies();
  };
#pragma unroll
  for (int i = 0; i < kTiles - 1; ++i) copy(2 * kTile * i);
  int now = 0;
  int unused = 2 * kTile * (kTiles - 1);
#pragma unroll 1
  for (int first = 0; first < steps; first += kDepth) {
    await_copies<kTiles - 2>();
    sycl::group_barrier(group);  // all have copied this tile, and have read the one before
    copy(unused);
    rights.read(tiles + now + kTile);
    lefts.read(tiles + now);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      Right<E> columns[kMatrices];
#pragma unroll
      for (int j = 0; j < kMatrices; ++j) set_unit(sub_group, columns[j], rights.unit(j, half));
#pragma unroll
      for (int i = 0; i < kMatrices; ++i) {
        Left<E> rows;
        set_unit(sub_group, rows, lefts.unit(i, half));
#pragma unroll
        for (int j = 0; j < kMatrices; ++j)
          joint::joint_matrix_mad(sub_group, sums[i][j], rows, columns[j], sums[i][j]);
      }
    }
    unused = now;
    now = now == 2 * kTile * (kTiles - 1) ? 0 : now + 2 * kTile;
  }

  // The item's numbers: eight neighboring rows of 16 neighboring columns.
  float values[8][16];
#pragma unroll
  for (int i = 0; i < kMatrices; ++i) {
#pragma unroll
    for (int j = 0; j < kMatrices; ++j) {
      int e = 0;
      joint::joint_matrix_apply(sub_group, sums[i][j], [&](float& value) IPEX_INLINE {
        values[2 * i + e / 2 % 2][2 * j + e / 4 + e % 2 * 8] = alpha * value;
        ++e;
      });
    }
  }
  const int row = first_row + down + 8 * g;
  const int column = first_column + across + 16 * t;
  if (beta != 0.f) {
    c += batch * c_batch;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
#pragma unroll
      for (int j = 0; j < 16; ++j) {
        if (row + i < m && column + j < n)
          values[i][j] += beta * load(c, (row + i) * c_row + (column + j) * c_column);
      }
    }
  }
  y += batch * y_batch;
  const bool by_columns = y_row == 1;
  const bool dense = (by_columns || y_column == 1) && (by_columns ? y_column : y_row) % 8 == 0 &&
                     y_batch % 8 == 0 && (by_columns ? m : n) % 8 == 0 &&
                     reinterpret_cast<unsigned long>(y) % 16 == 0;
  y += row * y_row + column * y_column;
  if (by_columns && dense) {
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      float x[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) x[i] = values[i][j];
      if (column + j < n) store_eight(y + j * y_column, 1, m - row, true, x);
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (row + i >= m) break;
#pragma unroll
    for (int j = 0; j < 16; j += 8)
      store_eight(y + i * y_row + j * y_column, y_column, n - column - j, dense, values[i] + j);
  }
}

#define MATMUL_PAIRS(T, a_swapped, b_swapped)                                                     \
  template void matmul_pairs<T, a_swapped, b_swapped>(const T*, const T*, const T*, T*, int, int, \
                                                      int, long, long, long, long, long, long,    \
                                                      long, long, long, long, float, float);
#define ALL(T)                  \
  MATMUL_PAIRS(T, false, false) \
  MATMUL_PAIRS(T, true, false)  \
  MATMUL_PAIRS(T, true, true)
ALL(half)
ALL(bf16)
