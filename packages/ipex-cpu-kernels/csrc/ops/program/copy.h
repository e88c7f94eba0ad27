// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "ipex/kernel.h"

namespace ipex {

// A copy between two layouts, cut into tiles: tile_i elements of the innermost dimension of the
// result times tile_j of another one.
struct CopyCall {
  static constexpr int64_t kMaxDim = 16;

  const void* from;
  void* to;
  int64_t item;            // bytes of an element: 1, 2, 4 or 8
  int64_t outer;           // dimensions besides i and j
  int64_t sizes[kMaxDim];  // theirs, as the strides, which count elements
  int64_t from_strides[kMaxDim], to_strides[kMaxDim];
  int64_t size_i, from_i, to_i, tile_i;
  int64_t size_j, from_j, to_j, tile_j;

  int64_t tiles_i() const { return (size_i + tile_i - 1) / tile_i; }
  int64_t tiles_j() const { return (size_j + tile_j - 1) / tile_j; }
};

}  // namespace ipex

// Copies the tiles [begin, end), of which the last numbers are those along i, then j.
IPEX_KERNEL_API void ipex_k_copy(const ipex::CopyCall* call, int64_t begin, int64_t end);
