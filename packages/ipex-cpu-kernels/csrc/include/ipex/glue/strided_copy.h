// SPDX-License-Identifier: Apache-2.0
// Copies between layouts on the threads of a program: torch's copy runs on one thread there.
#pragma once

#include "ipex/glue/dispatch.h"

namespace ipex {

// Elements from `from` to `to`, which do not overlap. At most 16 dimensions; strides in elements;
// a stride of 0 in the source repeats it. `item`: bytes of an element, 1, 2, 4 or 8.
void strided_copy(const void* from, const int64_t* from_strides, void* to,
                  const int64_t* to_strides, const int64_t* sizes, int64_t dim, int64_t item);

// x into a new tensor of its shape, or of one that it broadcasts to.
void copy_to(const Tensor& x, const Tensor& to);

}  // namespace ipex
