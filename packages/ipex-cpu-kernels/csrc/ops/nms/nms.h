// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "ipex/kernel.h"

struct NmsArgs {
  const void* boxes;      // of one group
  int64_t stride;         // elements from one box to the next; the four coordinates are consecutive
  const uint32_t* order;  // boxes from the best to the worst
  int64_t count;          // of them
  float threshold, offset;
  int64_t max_output;
};

// From so many boxes on, those that stay lie in the cells of a grid: at most one cell for
// kNmsPerCell boxes, and kNmsCopies places for each box, since a box lies in all cells that it
// touches.
inline constexpr int64_t kNmsGrid = 1024;
inline constexpr int64_t kNmsPerCell = 16;
inline constexpr int64_t kNmsCopies = 4;

// Places for boxes that stay, with vectors filled up.
inline int64_t nms_places(int64_t count) {
  const int64_t all = (count + 15) / 16 * 16;
  return count < kNmsGrid ? all : kNmsCopies * all + 16 * (count / kNmsPerCell);
}
// Working memory in floats: five arrays of places (four sides and the area), and for each cell
// where it begins and how many boxes it has.
inline int64_t nms_scratch(int64_t count) {
  return 5 * nms_places(count) + (count < kNmsGrid ? 0 : 2 * (count / kNmsPerCell + 1));
}

// Sets keep[box] to true for the boxes that stay.
IPEX_KERNEL_API void ipex_k_nms_f32(const NmsArgs* args, bool* keep, float* scratch);
IPEX_KERNEL_API void ipex_k_nms_bf16(const NmsArgs* args, bool* keep, float* scratch);
IPEX_KERNEL_API void ipex_k_nms_f16(const NmsArgs* args, bool* keep, float* scratch);
