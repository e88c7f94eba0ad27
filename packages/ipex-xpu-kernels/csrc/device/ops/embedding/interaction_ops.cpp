// SPDX-License-Identifier: Apache-2.0
// The interaction of a recommendation model on the kernels of interaction.sycl.cpp.
#include <ATen/Functions.h>

#include "device/core/ipex_ops.h"

namespace ipex::xpu {
namespace {

using at::Tensor;
using at::TensorList;
using std::optional;

// As in interaction.sycl.cpp.
constexpr std::size_t kInteractionLanes = 16;
constexpr std::int64_t kItemRows = 8;

// On the CPU device 0.2 to 0.8 of the rate of the kernels for CPUs.
constexpr KernelSpeed kInteractionSpeed = KernelSpeed::Slower;

bool fits(TensorList inputs) {
  if (inputs.empty() || inputs[0].dim() != 2 || !kernel_dtype(inputs[0].scalar_type()))
    return false;
  for (const Tensor& input : inputs) {
    if (input.sizes() != inputs[0].sizes() || input.scalar_type() != inputs[0].scalar_type())
      return false;
  }
  return true;
}

std::int64_t width_of(TensorList inputs) {
  const auto count = static_cast<std::int64_t>(inputs.size());
  return inputs[0].size(1) + count * (count - 1) / 2;
}

// Addresses of the inputs and distances of their rows.
class Inputs {
 public:
  explicit Inputs(TensorList inputs) : count_(inputs.size()) {
    std::vector<Tensor> dense;
    for (const Tensor& input : inputs) dense.push_back(with_dense_rows(input));
    table_.add_addresses(dense);
    for (const Tensor& input : dense) table_.add(input.stride(0));
    table_.upload(inputs[0].device());
  }
  const void* pointers() const { return table_.column(0, count_); }
  const void* rows() const { return table_.column(1, count_); }

 private:
  std::size_t count_;
  Table table_;
};

optional<Tensor> interaction(TensorList inputs) {
  if (!fits(inputs)) return std::nullopt;
  const Tensor& first = inputs[0];
  const Tensor out = at::empty({first.size(0), width_of(inputs)}, first.options());
  if (out.numel() == 0) return out;
  const Inputs x(inputs);
  const auto device = static_cast<c10::DeviceIndex>(first.get_device());
  const std::size_t groups = (inputs.size() + kInteractionLanes - 1) / kInteractionLanes;
  launch<2>(
      current_queue(device), device, kernel_name("interaction", *kernel_dtype(first.scalar_type())),
      {static_cast<std::size_t>(first.size(0)), groups * kInteractionLanes}, {1, kInteractionLanes},
      out_data(out), x.pointers(), x.rows(), ulong(inputs.size()), ulong(first.size(1)));
  return out;
}

optional<Tensor> interaction_backward(const Tensor& grad, TensorList inputs) {
  if (!fits(inputs)) return std::nullopt;
  const Tensor& first = inputs[0];
  const std::int64_t batch = first.size(0), dim = first.size(1);
  if (grad.scalar_type() != first.scalar_type() ||
      grad.sizes() != at::IntArrayRef({batch, width_of(inputs)}))
    return std::nullopt;
  const auto count = static_cast<std::int64_t>(inputs.size());
  const Tensor out = at::empty({count, batch, dim}, first.options());
  if (out.numel() == 0) return out;
  const Inputs x(inputs);
  const Tensor grads = with_dense_rows(grad);
  const std::int64_t blocks = (count + kItemRows - 1) / kItemRows;
  launch_columns(first, kernel_name("interaction_backward", *kernel_dtype(first.scalar_type())),
                 batch * blocks, dim, out_data(out), data(grads), ulong(grads.stride(0)),
                 x.pointers(), x.rows(), ulong(batch), ulong(count), ulong(dim), ulong(blocks));
  return out;
}

}  // namespace

void register_interaction() {
  static torch::Library ours(torch::Library::IMPL, "ipex", c10::DispatchKey::XPU, __FILE__,
                             __LINE__);
  add_kernel<&interaction, kInteractionSpeed>(ours, "interaction");
  add_kernel<&interaction_backward, kInteractionSpeed>(ours, "interaction_backward");
}

}  // namespace ipex::xpu
