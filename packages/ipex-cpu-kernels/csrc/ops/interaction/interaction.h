// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "ipex/kernel.h"

namespace ipex {

struct InteractionArgs {
  const void* const* inputs;  // [count]: rows of dim numbers, one per sample
  const int64_t* strides;     // [count]: between rows, in elements
  int64_t count, dim, batch;
  const void* grad;     // backward only: rows of interaction_width() numbers
  int64_t grad_stride;  // between them
  void* out;            // forward: [batch][width]; backward: [count][batch][dim]
};

inline int64_t interaction_width(int64_t count, int64_t dim) {
  return dim + count * (count - 1) / 2;
}

// With tiles: the most vectors, and the most numbers in one.
inline constexpr int64_t kInteractionTileCount = 32, kInteractionTileDim = 512;

// Bytes of working memory of one thread.
inline int64_t interaction_scratch_bytes(int64_t count, int64_t dim) {
  int64_t floats = count * count + 16;
  if (count <= kInteractionTileCount && dim <= kInteractionTileDim) {
    // Both operands and what they give.
    const int64_t tiles = (dim + 31) / 32 * 32 * 32 + 1024;
    floats = floats < tiles ? tiles : floats;
  }
  return floats * static_cast<int64_t>(sizeof(float));
}

}  // namespace ipex

// Samples [begin, end).
#define IPEX_DECLARE_INTERACTION(suffix)                                                        \
  IPEX_KERNEL_API void ipex_k_interaction_##suffix(const ipex::InteractionArgs* args,           \
                                                   int64_t begin, int64_t end, float* scratch); \
  IPEX_KERNEL_API void ipex_k_interaction_backward_##suffix(                                    \
      const ipex::InteractionArgs* args, int64_t begin, int64_t end, float* scratch)
IPEX_DECLARE_INTERACTION(f32);
IPEX_DECLARE_INTERACTION(bf16);
IPEX_DECLARE_INTERACTION(f16);
#undef IPEX_DECLARE_INTERACTION
