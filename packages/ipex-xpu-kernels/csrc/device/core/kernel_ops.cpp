// SPDX-License-Identifier: Apache-2.0
#include "device/core/kernel_ops.h"

#include <ATen/Functions.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>

#include "device/core/ipex_ops.h"
#include "device/ops/conv/pooling_ops.h"

namespace ipex::xpu {
namespace {

std::atomic<KernelMode> g_kernel_mode{KernelMode::Auto};

}  // namespace

void set_kernel_mode(KernelMode mode) { g_kernel_mode = mode; }

bool joint_pairs(c10::DeviceIndex device) {
  static std::mutex mutex;
  static std::map<c10::DeviceIndex, bool> known;
  if (device_info(device).joint_sub_group != 32) return false;
  const std::lock_guard lock(mutex);
  if (const auto found = known.find(device); found != known.end()) return found->second;
  const at::Tensor wrong =
      at::zeros({2}, at::TensorOptions().device(at::kXPU, device).dtype(at::kInt));
  int* const counts = wrong.mutable_data_ptr<int>();
  bool holds = false;
  try {
    launch<1>(current_queue(device), device, "joint_layout<half>", {32}, {32}, counts);
    launch<1>(current_queue(device), device, "joint_layout<bf16>", {32}, {32}, counts + 1);
    holds = wrong.cpu().sum().item<std::int64_t>() == 0;
  } catch (const std::runtime_error&) {
    // A compiler that does not take it: such a device has another layout.
  }
  return known.emplace(device, holds).first->second;
}

bool use_kernel(c10::DeviceIndex device, KernelSpeed speed, std::int64_t elements) {
  const bool slower =
      speed == KernelSpeed::Slower || (speed == KernelSpeed::SlowerIfSmall && elements < kSmall);
  return !slower || g_kernel_mode == KernelMode::Always || fallback_mode() == FallbackMode::Error ||
         !host_readable(device);
}

namespace detail {
namespace {

using c10::IValue;

// False for a tensor of another device than the first one.
bool joins(const at::Tensor& tensor, bool numbers, Tensors& all) {
  if (!tensor.defined()) return true;
  if (!tensor.is_xpu()) return numbers && tensor.is_cpu() && tensor.dim() == 0;
  if (!all.device) all.device = static_cast<c10::DeviceIndex>(tensor.get_device());
  all.largest = std::max(all.largest, tensor.numel());
  return tensor.get_device() == *all.device;
}

}  // namespace

Tensors common_device(const torch::jit::Stack& stack, std::size_t count, bool numbers) {
  Tensors all;
  for (std::size_t i = stack.size() - count; i < stack.size(); ++i) {
    const IValue& value = stack[i];
    if (value.isTensor()) {
      if (!joins(value.toTensor(), numbers, all)) return {};
    } else if (value.isTensorList()) {
      for (const at::Tensor& tensor : value.toTensorVector()) {
        if (!joins(tensor, numbers, all)) return {};
      }
    } else if (value.isOptionalTensorList()) {
      for (const auto& tensor : value.toOptionalTensorVector()) {
        if (tensor && !joins(*tensor, numbers, all)) return {};
      }
    }
  }
  return all;
}

void return_written(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const std::size_t count = schema.arguments().size();
  const std::size_t begin = stack->size() - count;
  std::vector<IValue> written;
  if (!schema.returns().empty()) {
    for (std::size_t i = 0; i < count; ++i) {
      const auto* alias = schema.arguments()[i].alias_info();
      if (alias != nullptr && alias->isWrite()) written.push_back((*stack)[begin + i]);
    }
  }
  torch::jit::drop(*stack, count);
  for (IValue& value : written) stack->push_back(std::move(value));
}

}  // namespace detail

std::string kernel_name(const char* kernel, const std::string& first, const std::string& second) {
  return std::string(kernel) + '<' + first + (second.empty() ? "" : ",") + second + '>';
}

void register_kernels() {
  register_elementwise();
  register_compare();
  register_moving();
  register_rows();
  register_reduce();
  register_index();
  register_optim();
  register_random();
  register_matmul();
  register_attention();
  register_cells();
  register_pooling();
  register_embedding_bag();
}

void register_ipex_kernels() {
  register_gated();
  register_norms();
  register_rope();
  register_interaction();
  register_bags();
  register_bags_update();
  register_detection();
  register_experts();
  register_chain();
}

}  // namespace ipex::xpu
