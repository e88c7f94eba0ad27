// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "ipex/glue/dispatch.h"

namespace ipex::program {

// Whether convert() takes this dtype: float32, bfloat16, float16 and bool.
bool is_pointwise_dtype(ScalarType dtype);

// x in another dtype, rounded once, with its strides, which must leave no holes.
Tensor convert(const Tensor& x, ScalarType dtype);

}  // namespace ipex::program
