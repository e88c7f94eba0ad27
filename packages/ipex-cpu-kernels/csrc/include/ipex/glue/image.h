// SPDX-License-Identifier: Apache-2.0
// Images [N, C, H, W] in the two memory formats. For glue.
#pragma once

#include "ipex/glue/dispatch.h"

namespace ipex {

// Strides of a tensor whose elements of dimension 1 lie side by side.
inline bool channels_are_innermost(const Tensor& x) {
  const int64_t order[4] = {1, 3, 2, 0};
  int64_t expected = 1;
  for (const int64_t dim : order) {
    if (x.size(dim) != 1 && x.stride(dim) != expected) return false;
    expected *= x.size(dim);
  }
  return true;
}

// Whether a tensor is stored with its channels side by side and not plainly; the same decision as
// in Python.
inline bool is_channels_last(const Tensor& x) {
  return x.dim() == 4 && x.numel() > 0 && !x.is_contiguous() && channels_are_innermost(x);
}

inline Tensor new_image(int64_t n, int64_t c, int64_t h, int64_t w, bool channels_last,
                        ScalarType dtype) {
  const int64_t sizes[4] = {n, c, h, w};
  const int64_t strides[4] = {h * w * c, 1, w * c, c};
  return channels_last ? new_tensor(sizes, strides, 4, dtype) : new_contiguous(sizes, 4, dtype);
}

// The tensor itself if its channels lie side by side, else a copy in which they do.
Tensor as_channels_last(const Tensor& x);

}  // namespace ipex
