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

template <typename T>
IPEX_INLINE inline unsigned int pair_of(float a, float b) {
  return sycl::bit_cast<unsigned short>(T(a)) |
         static_cast<unsigned int>(sycl::bit_cast<unsigned short>(T(b))) << 16;
}

// Of four steps of two rows, as pairs of steps.
template <bool left>
IPEX_INLINE inline Vector unit_of(unsigned int first0, unsigned int first1, unsigned int second0,
                                  unsigned int second1) {
  return left ? Vector{first0, second0, first1, second1} : Vector{first0, first1, second0, second1};
}

// Where the unit of item 4 g + t for the first or second matrix of steps lies among the ones of 16
// rows, so that neither who reads them nor who writes them waits for a bank.
IPEX_INLINE inline int unit_at(int g, int t, int matrix) {
  return g * 8 + ((matrix * 4 + t) ^ ((g ^ g / 4) % 2 * 4));
}

// Rows 2 g and 2 g + 1 of 16 are one item's.
IPEX_INLINE inline int row_of(int block, int g, int half) { return block * kSide + 2 * g + half; }

// The part of x[row, step] that a group needs, or of x[step, row] if swapped: kRows rows, kTiles
// times kDepth steps at a time, on their way through registers to tiles of units.
template <int kRows, int kTiles, int kItems, bool swapped, bool left>
struct Operand {
  static constexpr int kNumbers = kRows * kTiles * kDepth / kItems;  // that an item brings
  static constexpr int kLine = kTiles * kDepth / 8;                  // vectors of a row
  // Jobs of an item: eight steps of two rows, or four steps of kWide rows if swapped.
  static constexpr int kWide = kNumbers < 32 ? 4 : 8;
  static constexpr int kJobs = kNumbers / (swapped ? kWide * 4 : 16);
  static constexpr int kTile = kRows / kSide * kUnits;
  static_assert(kJobs * (swapped ? kWide * 4 : 16) == kNumbers);

  const unsigned short* x;
  long pitch;
  int item;
  int rows;  // that there are
  int steps;
  unsigned int words[kNumbers / 2];

  IPEX_INLINE Operand(const void* first, long pitch_, int rows_, int steps_, int item_)
      : x(static_cast<const unsigned short*>(first)),
        pitch(pitch_),
        item(item_),
        rows(rows_),
        steps(steps_) {}

  // Of a job: its first row if swapped, and its first step.
  IPEX_INLINE int job_row(int i) const { return (item + i * kItems) / 4 % (kRows / kWide) * kWide; }
  IPEX_INLINE int job_step(int i) const {
    const int job = item + i * kItems;
    return swapped ? (job / 4 / (kRows / kWide) * 4 + job % 4) * 4 : job % kLine * 8;
  }
  // Starts to load; zeros where there is nothing.
  IPEX_INLINE void fetch() {
#pragma unroll
    for (int i = 0; i < kJobs; ++i) {
      const int step = job_step(i);
      if constexpr (swapped) {
        using Some = unsigned int __attribute__((ext_vector_type(kWide / 2)));
        const int row = job_row(i);
        const unsigned short* const source = x + step * pitch + row;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const Some values = step + j < steps && row < rows
                                  ? *reinterpret_cast<const Some*>(source + j * pitch)
                                  : Some(0);
#pragma unroll
          for (int k = 0; k < kWide / 2; ++k) words[(4 * i + j) * (kWide / 2) + k] = values[k];
        }
      } else {
        const int job = (item + i * kItems) / kLine;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int row = row_of(job / 8, job % 8, half);
          const Vector values = row < rows && step < steps
                                    ? *reinterpret_cast<const Vector*>(x + row * pitch + step)
                                    : Vector(0);
#pragma unroll
          for (int k = 0; k < 4; ++k) words[8 * i + 4 * half + k] = values[k];
        }
      }
    }
    x += kTiles * kDepth * (swapped ? pitch : 1);
    steps -= kTiles * kDepth;
  }
  IPEX_INLINE void put(Vector* tiles) const {
#pragma unroll
    for (int i = 0; i < kJobs; ++i) {
      const int step = job_step(i);
      Vector* const tile = tiles + step / kDepth * kTile;
      const int t = step % kDepth / 8;
      if constexpr (swapped) {
        const int row = job_row(i);
        // Steps 2 k and 2 k + 1 of a row.
        const auto pair = [&](int j, int k) IPEX_INLINE {
          const unsigned int a = words[(4 * i + 2 * k) * (kWide / 2) + j / 2];
          const unsigned int b = words[(4 * i + 2 * k + 1) * (kWide / 2) + j / 2];
          return j % 2 == 0 ? (a & 0xffffu) | (b << 16) : (a >> 16) | (b & 0xffff0000u);
        };
#pragma unroll
        for (int j = 0; j < kWide; j += 2) {
          tile[row / kSide * kUnits + unit_at(row % kSide / 2 + j / 2, t, step / 4 % 2)] =
              unit_of<left>(pair(j, 0), pair(j, 1), pair(j + 1, 0), pair(j + 1, 1));
        }
      } else {
        const int job = (item + i * kItems) / kLine;
        const unsigned int* const w = words + 8 * i;
        Vector* const target = tile + job / 8 * kUnits;
        target[unit_at(job % 8, t, 0)] = unit_of<left>(w[0], w[1], w[4], w[5]);
        target[unit_at(job % 8, t, 1)] = unit_of<left>(w[2], w[3], w[6], w[7]);
      }
    }
  }
};
