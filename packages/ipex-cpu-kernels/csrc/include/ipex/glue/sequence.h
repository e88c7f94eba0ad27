// SPDX-License-Identifier: Apache-2.0
// Sequences [B, D, L] in either order of their last two dimensions, for glue.
#pragma once

#include "ipex/glue/dispatch.h"

namespace ipex {

// Whether channels lie side by side, as a projection leaves them.
inline bool channels_last(const Tensor& x) { return x.stride(1) == 1 && x.stride(2) != 1; }

// x, or a contiguous copy if neither its channels nor its steps lie side by side.
inline Tensor dense_either_way(const Tensor& x) {
  return x.stride(1) == 1 || x.stride(2) == 1 ? x : torch::stable::contiguous(x);
}

// A new tensor like x, dense in the order of x.
inline Tensor new_sequence_like(const Tensor& x) {
  const int64_t batch = x.size(0), channels = x.size(1), steps = x.size(2);
  if (!channels_last(x)) {
    const int64_t sizes[3] = {batch, channels, steps};
    return new_contiguous(sizes, 3, x.scalar_type());
  }
  const int64_t sizes[3] = {batch, steps, channels};
  return torch::stable::transpose(new_contiguous(sizes, 3, x.scalar_type()), 1, 2);
}

}  // namespace ipex
