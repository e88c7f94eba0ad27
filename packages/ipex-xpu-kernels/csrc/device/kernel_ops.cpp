// SPDX-License-Identifier: Apache-2.0
#include "kernel_ops.h"

#include "core/core.h"
#include "runtime.h"

namespace ipex::xpu {

// Without the library of kernels everything runs on the host, which is what a broken build should
// look like, not a crash.
void register_kernels() {
  if (kernel_names().empty()) return;
  register_elementwise();
}

}  // namespace ipex::xpu
