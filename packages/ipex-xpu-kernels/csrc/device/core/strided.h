// SPDX-License-Identifier: Apache-2.0
// Kernels over operands of any strides: shapes, broadcasting and overlap are TensorIterator's
// business, the kernels get what it makes of them.
#pragma once

#include <ATen/TensorIterator.h>

#include <algorithm>
#include <array>
#include <optional>
#include <string>
#include <tuple>

#include "device/core/kernel_ops.h"

namespace ipex::xpu {

inline constexpr std::int64_t kMaxElements = std::int64_t{1} << 31;
inline constexpr std::size_t kMaxOperands = 5;

// Four sizes and strides in elements, the innermost first, of the operands of an iterator.
struct Layout {
  std::array<std::uint32_t, 4> size{1, 1, 1, 1};
  std::array<std::array<std::int32_t, 4>, kMaxOperands> stride{};
};
// Nothing for more than four dimensions that do not coalesce, and for offsets beyond 31 bits.
std::optional<Layout> layout_of(at::TensorIteratorBase& iter);

// The name of elements of this size in kernels that only move elements; nothing for more than 8
// bytes.
std::optional<std::string> bits_dtype(at::ScalarType dtype);
// What kernels call the dtype where whole numbers are among theirs: int, long, and bool as bytes.
std::optional<std::string> number_dtype(at::ScalarType dtype);

// Starts a kernel (Place of prelude.h) on the first N operands of the iterator, outputs first;
// false where layout_of() has nothing.
template <std::size_t N, typename... Extras>
bool launch_strided(at::TensorIteratorBase& iter, const std::string& name, Extras... extras) {
  if (iter.numel() == 0) return true;
  const auto found = layout_of(iter);
  if (!found) return false;
  const Layout& layout = *found;
  const std::size_t columns = layout.size[0];
  const std::size_t rows = std::size_t{layout.size[1]} * layout.size[2] * layout.size[3];
  constexpr std::size_t kGroup = 256;
  std::size_t width = 8;
  while (width < kGroup && width < columns) width *= 2;
  // Operands in another order: groups are tiles, which use whole cache lines of both.
  const bool turned = std::any_of(layout.stride.begin(), layout.stride.begin() + N,
                                  [](const auto& stride) { return stride[0] > 1; });
  if (turned && rows >= 16) width = std::min<std::size_t>(width, 16);
  const std::size_t height = kGroup / width;
  const sycl::range<2> global((rows + height - 1) / height * height,
                              (columns + width - 1) / width * width);
  const auto strides_of = [&](std::size_t arg) {
    const auto& s = layout.stride[arg];
    return std::tuple(s[0], s[1], s[2], s[3]);
  };
  const auto device = static_cast<c10::DeviceIndex>(iter.device(0).index());
  [&]<std::size_t... I>(std::index_sequence<I...>) {
    std::apply(
        [&](auto... strides) {
          launch<2>(current_queue(device), device, name, global, sycl::range<2>(height, width),
                    static_cast<const void*>(iter.data_ptr(static_cast<int>(I)))...,
                    static_cast<unsigned int>(rows), static_cast<unsigned int>(columns),
                    layout.size[1], layout.size[2], strides..., extras...);
        },
        std::tuple_cat(strides_of(I)...));
  }(std::make_index_sequence<N>());
  return true;
}

// Iterators over tensors of the device, whose dtypes the caller has looked at.
template <typename... Inputs>
at::TensorIterator iterator(const at::Tensor& out, const Inputs&... inputs) {
  at::TensorIteratorConfig config;
  config.check_all_same_dtype(false).set_check_mem_overlap(true).add_output(out);
  config.resize_outputs(sizeof...(Inputs) != 0);  // alone, it keeps its shape
  (config.add_const_input(inputs), ...);
  return config.build();
}

}  // namespace ipex::xpu
