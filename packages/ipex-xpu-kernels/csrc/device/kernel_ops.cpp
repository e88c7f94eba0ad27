// SPDX-License-Identifier: Apache-2.0
#include "kernel_ops.h"

#include <atomic>

#include "runtime.h"

namespace ipex::xpu {
namespace {

std::atomic<KernelMode> g_mode{KernelMode::Auto};

}  // namespace

void set_kernel_mode(KernelMode mode) { g_mode = mode; }

bool use_kernel(c10::DeviceIndex device, KernelSpeed speed) {
  return speed == KernelSpeed::NotSlower || g_mode == KernelMode::Always ||
         fallback_mode() == FallbackMode::Error || !host_readable(device);
}

void register_kernels() { register_elementwise(); }

}  // namespace ipex::xpu
