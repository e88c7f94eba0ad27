// SPDX-License-Identifier: Apache-2.0
#include "kernel_ops.h"

#include "runtime.h"

namespace ipex::xpu {

void register_kernels() { register_elementwise(); }

}  // namespace ipex::xpu
