// SPDX-License-Identifier: Apache-2.0
// Ops of torch on kernels of the device, one file per family.
#pragma once

#include <ATen/core/TensorBody.h>

#include <optional>
#include <string>

namespace ipex::xpu {

// What kernels call the dtype; nothing for those that they do not have.
std::optional<std::string> kernel_dtype(at::ScalarType dtype);

// Copies with a kernel of the device; false if there is none for these dtypes and shapes.
bool copy_kernel(const at::Tensor& to, const at::Tensor& from);

void register_elementwise();  // elementwise_ops.cpp

}  // namespace ipex::xpu
