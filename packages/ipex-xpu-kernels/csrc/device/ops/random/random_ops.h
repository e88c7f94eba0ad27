// SPDX-License-Identifier: Apache-2.0
// Random numbers: what ops that draw them share.
#pragma once

#include "device/core/kernel_ops.h"

namespace ipex::xpu {

// A stream of numbers, each of which it has at one position.
struct Philox {
  unsigned long seed;
  unsigned long offset;
};
// The next numbers of a generator, by default of the tensor's device; raises for one of
// another kind of device.
Philox draw_from(const at::Tensor& like, const std::optional<at::Generator>& generator);

void register_dropout(torch::Library& aten);  // dropout_ops.cpp

}  // namespace ipex::xpu
