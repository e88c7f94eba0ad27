// SPDX-License-Identifier: Apache-2.0
// Products with packed quantized weights, for Python, which knows the format.
#include <c10/core/DeviceGuard.h>
#include <c10/util/Exception.h>

#include <string>

#include "core/core.h"
#include "device/core/kernel_ops.h"
#include "device/core/runtime.h"

namespace ipex::xpu {

void woq_kernel(const at::Tensor& x, const at::Tensor& packed, const at::Tensor& y,
                const WoqLayout& layout) {
  const auto dtype = kernel_dtype(x.scalar_type());
  TORCH_CHECK(dtype && y.scalar_type() == at::kFloat && x.dim() == 2 && x.stride(1) == 1 &&
                  y.is_contiguous() && x.get_device() == packed.get_device(),
              "woq_kernel: x and y must be matrices on the device of the weight");
  constexpr std::int64_t kStrip = 16;
  const std::int64_t m = y.size(0);
  const std::int64_t n = y.size(1);
  if (m == 0 || n == 0) return;
  const std::int64_t rows = m == 1 ? 1 : 8;
  const auto device = static_cast<c10::DeviceIndex>(x.get_device());
  const c10::DeviceGuard guard(x.device());
  launch<2>(current_queue(device), device,
            "woq_product<" + *dtype + (layout.nibbles ? ",true," : ",false,") +
                std::to_string(rows) + ">",
            {static_cast<std::size_t>((m + rows - 1) / rows),
             static_cast<std::size_t>((n + kStrip - 1) / kStrip * kStrip)},
            {1, static_cast<std::size_t>(kStrip)}, x.const_data_ptr(),
            static_cast<const void*>(packed.const_data_ptr<std::uint8_t>() + layout.offset),
            y.mutable_data_ptr(), m, n, x.stride(0), layout.blocks, layout.blocks_of_group,
            layout.strip_bytes, layout.zero_offset, layout.weight_offset, layout.scale_kind,
            layout.scale_columns, layout.zero_kind);
}

}  // namespace ipex::xpu
