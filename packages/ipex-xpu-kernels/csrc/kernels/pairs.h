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

// Joins the numbers of the items that share rows of a left matrix.
template <typename F>
IPEX_INLINE inline float shared(const sycl::sub_group& sub_group, float value, F join) {
  value = join(value, sycl::permute_group_by_xor(sub_group, value, 1));
  return join(value, sycl::permute_group_by_xor(sub_group, value, 2));
}
