// SPDX-License-Identifier: Apache-2.0
// For kernels that multiply by joint_matrix and put the numbers of a matrix into it themselves,
// since an item knows which ones it holds: joint_matrix_load takes them one pair at a time, an item
// takes 16 bytes. joint/layout.sycl.cpp tells whether a device has this layout: item 4 g + t of a
// sub-group of 32 holds in pairs of neighbors
//   of a, 16 rows x 16 steps: (g, 2t), (g + 8, 2t), (g, 2t + 8), (g + 8, 2t + 8)
//   of b, 16 steps x 16 columns: (2t, g), (2t + 8, g), (2t, g + 8), (2t + 8, g + 8)
//   of the sums: (g, 2t), (g + 8, 2t), (g, 2t + 8), (g + 8, 2t + 8)
// and of 16 numbers in the place of 8, these again.
// A product does not depend on the order of steps, nor its numbers on the order of rows and
// columns. So a tile in the memory of a group is made of units of 16 bytes, which are what an item
// holds of a matrix: of two rows, neighbors as a rule, and four neighboring steps.
#pragma once

#include "joint.h"

constexpr int kDepth = 32;                  // steps of a tile: of two matrices
constexpr int kUnits = kSide * kDepth / 8;  // of 16 rows of a tile

// Puts a unit into a matrix, whose numbers are neighbors: all of them where the first one is (a
// loop over 16 numbers would stay one, and what it writes would be memory).
template <typename Matrix>
IPEX_INLINE inline void set_unit(const sycl::sub_group& sub_group, Matrix& matrix,
                                 const Vector& unit) {
  int count = 0;
  void* first = nullptr;
  joint::joint_matrix_apply(sub_group, matrix, [&](auto& element) IPEX_INLINE {
    if (count++ == 0) first = &element;
  });
  __builtin_memcpy(first, &unit, sizeof unit);
  if (count == 16) __builtin_memcpy(static_cast<Vector*>(first) + 1, &unit, sizeof unit);
}

// Of four steps of two rows, as pairs of steps.
template <bool left>
IPEX_INLINE inline Vector unit_of(unsigned int first0, unsigned int first1, unsigned int second0,
                                  unsigned int second1) {
  return left ? Vector{first0, second0, first1, second1} : Vector{first0, first1, second0, second1};
}

// Numbers `row` % 2 of two words, steps of which each has two rows.
IPEX_INLINE inline unsigned int pair_of_row(unsigned int a, unsigned int b, int row) {
  return row % 2 == 0 ? (a & 0xffffu) | (b << 16) : (a >> 16) | (b & 0xffff0000u);
}

// The first `count` of four numbers, `step` apart; at once if `dense`: neighbors at a multiple of
// their bytes.
template <typename T>
IPEX_INLINE inline void store_four(T* target, long step, int count, bool dense, const float* x) {
  using Bits = unsigned int __attribute__((ext_vector_type(2)));
  if (dense && count > 0) {
    *reinterpret_cast<Bits*>(target) = Bits{pair_of<T>(x[0], x[1]), pair_of<T>(x[2], x[3])};
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (i < count) store(target, i * step, x[i]);
  }
}

// Where the unit of item 4 g + t for the first or second matrix of steps lies among the ones of 16
// rows, so that neither who reads them nor who writes them waits for a bank.
IPEX_INLINE inline int unit_at(int g, int t, int matrix) {
  return g * 8 + ((matrix * 4 + t) ^ (g % 2 * 4) ^ ((g / 2 ^ g / 4) % 2 * 2));
}

// Rows 2 g and 2 g + 1 of 16 are one item's.
IPEX_INLINE inline int row_of(int block, int g, int half) { return block * kSide + 2 * g + half; }

// The part of x[row, step] that a group needs, or of x[step, row] if swapped: kRows rows, kDepth
// steps at a time, on their way through registers to a tile of units, two tiles at once. 256
// pitches are below 2^31.
template <int kRows, int kItems, bool swapped, bool left>
struct Operand {
  static constexpr int kWords = kRows * kDepth / kItems / 2;  // that an item brings
  // An item's jobs are eight steps of two rows, kJump rows apart, or four steps of kWide rows.
  static constexpr int kWide = kWords < 16 ? 4 : 8;
  static constexpr int kJobs = swapped ? 1 : kWords / 8;
  static constexpr int kJump = kItems / 2;
  static_assert(kWords == (swapped ? 2 * kWide : 8 * kJobs));

  const unsigned short* x;  // the item's first number
  int pitch;
  int g;  // of the units of its first job, whose rows begin at 16 block
  int t;
  int matrix;  // if swapped
  int block;
  int rows;  // that there are from its first one on
  int steps;
  unsigned int words[2][kWords];

  IPEX_INLINE Operand(const void* first, long pitch_, int rows_, int steps_, int item)
      : pitch(static_cast<int>(pitch_)) {
    constexpr int kOfRows = kRows / kWide;
    const int row = swapped ? item / 4 % kOfRows * kWide : row_of(item / 32, item % 32 / 4, 0);
    const int step = swapped ? item / 4 / kOfRows * kSide + item % 4 * 4 : item % 4 * 8;
    x = static_cast<const unsigned short*>(first) +
        (swapped ? step * pitch_ + row : row * pitch_ + step);
    g = row % kSide / 2;
    t = step / 8;
    matrix = step / 4 % 2;
    block = row / kSide;
    rows = rows_ - row;
    steps = steps_ - step;
  }

  // Starts to load the next steps of a row for tile `set`; zeros where there is nothing.
  template <int set>
  IPEX_INLINE void fetch() {
    using Some = unsigned int __attribute__((ext_vector_type(swapped ? kWide / 2 : 4)));
    constexpr int kOfJob = swapped ? 4 : 2;
    constexpr int kEach = sizeof(Some) / 4;
#pragma unroll
    for (int i = 0; i < kJobs; ++i) {
      const int row = i * kJump;
#pragma unroll
      for (int j = 0; j < kOfJob; ++j) {
        const bool inside = swapped ? 0 < rows && j < steps : row + j < rows && 0 < steps;
        const int at = swapped ? j * pitch : (row + j) * pitch;
        const Some values = inside ? *reinterpret_cast<const Some*>(x + at) : Some(0);
#pragma unroll
        for (int k = 0; k < kEach; ++k) words[set][(i * kOfJob + j) * kEach + k] = values[k];
      }
    }
    x += swapped ? kDepth * static_cast<long>(pitch) : kDepth;
    steps -= kDepth;
  }
  template <int set>
  IPEX_INLINE void put(Vector* tile) const {
    const unsigned int* const all = words[set];
    if constexpr (swapped) {
      // Steps 2 k and 2 k + 1 of row j.
      const auto pair = [&](int j, int k) IPEX_INLINE {
        return pair_of_row(all[2 * k * (kWide / 2) + j / 2], all[(2 * k + 1) * (kWide / 2) + j / 2],
                           j);
      };
#pragma unroll
      for (int j = 0; j < kWide; j += 2) {
        tile[block * kUnits + unit_at(g + j / 2, t, matrix)] =
            unit_of<left>(pair(j, 0), pair(j, 1), pair(j + 1, 0), pair(j + 1, 1));
      }
    } else {
#pragma unroll
      for (int i = 0; i < kJobs; ++i) {
        const unsigned int* const w = all + 8 * i;
        Vector* const units = tile + (block + i * kJump / kSide) * kUnits;
        units[unit_at(g, t, 0)] = unit_of<left>(w[0], w[1], w[4], w[5]);
        units[unit_at(g, t, 1)] = unit_of<left>(w[2], w[3], w[6], w[7]);
      }
    }
  }
};
