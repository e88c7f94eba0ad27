// SPDX-License-Identifier: Apache-2.0
#include "device/core/strided.h"

#include <cstdlib>

namespace ipex::xpu {

std::optional<Layout> layout_of(at::TensorIteratorBase& iter) {
  const auto operands = static_cast<std::size_t>(iter.ntensors());
  if (iter.ndim() > 4 || operands > kMaxOperands || iter.numel() >= kMaxElements)
    return std::nullopt;
  Layout layout;
  for (std::size_t d = 0; d < static_cast<std::size_t>(iter.ndim()); ++d) {
    layout.size[d] = static_cast<std::uint32_t>(iter.shape()[d]);
    for (std::size_t arg = 0; arg < operands; ++arg) {
      const std::int64_t stride =
          iter.strides(static_cast<int>(arg))[d] / iter.element_size(static_cast<int>(arg));
      if (stride > INT32_MAX || stride < INT32_MIN) return std::nullopt;
      layout.stride[arg][d] = static_cast<std::int32_t>(stride);
    }
  }
  // The largest offset must fit, too.
  for (std::size_t arg = 0; arg < operands; ++arg) {
    std::int64_t last = 0;
    for (std::size_t d = 0; d < 4; ++d)
      last += std::abs(std::int64_t{layout.stride[arg][d]}) * (layout.size[d] - std::int64_t{1});
    if (last >= kMaxElements) return std::nullopt;
  }
  return layout;
}

std::optional<std::string> kernel_dtype(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
      return "float";
    case at::kHalf:
      return "half";
    case at::kBFloat16:
      return "bf16";
    default:
      return std::nullopt;
  }
}

std::optional<std::string> bits_dtype(at::ScalarType dtype) {
  switch (c10::elementSize(dtype)) {
    case 1:
      return "unsignedchar";
    case 2:
      return "unsignedshort";
    case 4:
      return "unsignedint";
    case 8:
      return "unsignedlong";
    default:
      return std::nullopt;
  }
}

std::optional<std::string> number_dtype(at::ScalarType dtype) {
  switch (dtype) {
    case at::kLong:
      return "long";
    case at::kInt:
      return "int";
    case at::kBool:
      return "unsignedchar";
    default:
      return kernel_dtype(dtype);
  }
}

}  // namespace ipex::xpu
