// SPDX-License-Identifier: Apache-2.0
// Ops of torch on kernels of the device, one file per family.
#pragma once

#include <ATen/core/TensorBody.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <optional>
#include <string>

namespace ipex::xpu {

// What kernels call the dtype; nothing for those that they do not have.
std::optional<std::string> kernel_dtype(at::ScalarType dtype);

// Copies with a kernel of the device; false if there is none for these dtypes and shapes.
bool copy_kernel(const at::Tensor& to, const at::Tensor& from);

// When a kernel is used whose op the host does faster (IPEX_XPU_KERNELS).
enum class KernelMode : std::uint8_t { Auto, Always };
void set_kernel_mode(KernelMode mode);

// How a kernel compares with the host's op on a CPU device, as measured.
enum class KernelSpeed : std::uint8_t { NotSlower, Slower };
// Whether an op that has a kernel uses it. A slower one is left to the host, and counted as a
// fallback by the caller, only where the host works on the same memory and may do so.
bool use_kernel(c10::DeviceIndex device, KernelSpeed speed);

void register_elementwise();  // elementwise_ops.cpp

}  // namespace ipex::xpu
