// SPDX-License-Identifier: Apache-2.0
// Ops that have no kernel here run on the host: on the same memory where the host can read it, on
// copies elsewhere.
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>

#include "device/core/host_memory.h"
#include "device/core/runtime.h"

namespace ipex::xpu {
namespace {

using at::Tensor;
using c10::DeviceIndex;
using c10::IValue;

std::atomic<FallbackMode> g_fallback_mode{FallbackMode::Silent};

struct Statistics {
  std::mutex mutex;
  std::map<std::string, std::uint64_t> counts;
};
Statistics& statistics() {
  static auto* one = new Statistics;
  return *one;
}

// Lengths and indices may stay on the host, as torch wants or allows it on all devices.
bool takes_host_tensors(const std::string& op) {
  static const std::set<std::string> names{"aten::_pack_padded_sequence",
                                           "aten::_ctc_loss",
                                           "aten::_ctc_loss_backward",
                                           "aten::_cudnn_ctc_loss",
                                           "aten::index",
                                           "aten::index_put",
                                           "aten::index_put_",
                                           "aten::_index_put_impl_",
                                           "aten::_unsafe_index",
                                           "aten::_unsafe_index_put",
                                           "aten::_copy_from",
                                           "aten::_copy_from_and_resize"};
  return names.count(op) != 0;
}

// An op that runs on the host in place of one of the device.
class HostCall {
 public:
  HostCall(const c10::OperatorHandle& op, torch::jit::Stack* stack) : op_(op), stack_(stack) {}

  void run() {
    const auto& schema = op_.schema();
    const std::size_t count = schema.arguments().size();
    const std::size_t begin = stack_->size() - count;
    for (std::size_t i = 0; i < count; ++i) arguments_.push_back((*stack_)[begin + i]);
    for (std::size_t i = 0; i < count; ++i) find_device(arguments_[i]);
    if (!device_) device_ = current_device();
    const c10::DeviceGuard guard(c10::Device(c10::kXPU, *device_));
    for (std::size_t i = 0; i < count; ++i)
      (*stack_)[begin + i] = host_argument(arguments_[i], schema.arguments()[i]);
    try {
      op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack_);
    } catch (const c10::Error& e) {
      if (!lacks_small_floats(e.what_without_backtrace())) throw;
      run_wide(begin);
    }
    for (const auto& [host, tensor] : written_) from_host(host, tensor);
    const std::size_t first = stack_->size() - schema.returns().size();
    for (std::size_t i = 0; i < schema.returns().size(); ++i) {
      (*stack_)[first + i] = device_result((*stack_)[first + i], schema.returns()[i]);
    }
  }

 private:
  void find_device(const IValue& value) {
    if (device_) return;
    if (value.isTensor()) {
      if (value.toTensor().defined() && value.toTensor().is_xpu())
        device_ = value.toTensor().get_device();
    } else if (value.isTensorList()) {
      for (const Tensor& tensor : value.toTensorVector()) find_device(tensor);
    } else if (value.isOptionalTensorList()) {
      for (const std::optional<Tensor>& tensor : value.toOptionalTensorVector()) {
        if (tensor) find_device(*tensor);
      }
    } else if (value.isDevice()) {
      if (value.toDevice().is_xpu())
        device_ = value.toDevice().has_index() ? value.toDevice().index() : current_device();
    } else if (value.isGenerator()) {
      if (value.toGenerator().device().is_xpu()) device_ = value.toGenerator().device().index();
    }
  }

  Tensor host_tensor(const Tensor& tensor, const c10::Argument& argument) {
    const bool write = argument.alias_info() != nullptr && argument.alias_info()->isWrite();
    if (!tensor.defined()) return tensor;
    if (!tensor.is_xpu()) {
      TORCH_CHECK(
          (tensor.dim() == 0 && !write) || takes_host_tensors(op_.schema().name()),
          "Expected all tensors to be on the same device, but found at least two devices, xpu:",
          static_cast<int>(*device_), " and ", tensor.device(), "! (argument ", argument.name(),
          " of ", op_.schema().name(), ")");
      return tensor;
    }
    TORCH_CHECK(
        tensor.get_device() == *device_ || tensor.dim() == 0,
        "Expected all tensors to be on the same device, but found xpu:", static_cast<int>(*device_),
        " and ", tensor.device(), " (", op_.schema().name(), ")");
    // The same tensor twice stays the same tensor: ops look for that.
    for (const auto& [host, known] : seen_) {
      if (known.is_same(tensor)) {
        if (write) written_.emplace_back(host, tensor);
        return host;
      }
    }
    Tensor host = to_host(tensor);
    seen_.emplace_back(host, tensor);
    if (write) written_.emplace_back(host, tensor);
    return host;
  }

  // Devices have float16 and bfloat16 of more ops than the host: those it computes in float32.
  static bool lacks_small_floats(const std::string& message) {
    for (const char* part :
         {"not implemented for 'Half'", "not implemented for 'BFloat16'",
          "not implemented for 'ComplexHalf'", "doesn't support tensors of type: Half"}) {
      if (message.find(part) != std::string::npos) return true;
    }
    return false;
  }
  void run_wide(std::size_t begin) {
    const auto& arguments = op_.schema().arguments();
    seen_.clear();
    written_.clear();
    stack_->resize(begin);
    bool named = false;  // whether the caller says what the results' dtype is
    for (std::size_t i = 0; i < arguments.size(); ++i) {
      named = named || (arguments[i].name() == "dtype" && !arguments_[i].isNone());
      stack_->push_back(wide(host_argument(arguments_[i], arguments[i])));
    }
    op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack_);
    for (const auto& [host, tensor] : wide_) {
      const bool write = std::any_of(written_.begin(), written_.end(), [&host](const auto& pair) {
        return pair.first.is_same(host);
      });
      if (write) host.resize_(tensor.sizes()).copy_(tensor);
    }
    for (std::size_t i = stack_->size() - op_.schema().returns().size(); i < stack_->size(); ++i) {
      IValue& result = (*stack_)[i];
      if (result.isTensor()) result = narrow(result.toTensor(), named);
    }
  }
  IValue wide(const IValue& value) {
    if (value.isTensor()) return wide(value.toTensor());
    if (!value.isTensorList()) return value;
    std::vector<Tensor> tensors;
    for (const Tensor& tensor : value.toTensorVector()) tensors.push_back(wide(tensor));
    return tensors;
  }
  Tensor wide(const Tensor& host) {
    if (!host.defined()) return host;
    const at::ScalarType dtype = host.scalar_type();
    if (!c10::isReducedFloatingType(dtype) && dtype != at::kComplexHalf) return host;
    for (const auto& [known, tensor] : wide_) {
      if (known.is_same(host)) return tensor;
    }
    wide_.emplace_back(host, host.to(dtype == at::kComplexHalf ? at::kComplexFloat : at::kFloat));
    return wide_.back().second;
  }
  // A result in the dtype of the arguments.
  Tensor narrow(const Tensor& result, bool named) {
    if (!result.defined() || wide_.empty()) return result;
    for (const auto& [host, tensor] : wide_) {
      if (tensor.is_same(result)) return host;
    }
    const at::ScalarType small = c10::toRealValueType(wide_.front().first.scalar_type());
    if (named) return result;
    if (result.scalar_type() == at::kFloat) return result.to(small);
    return result.scalar_type() == at::kComplexFloat && small == at::kHalf
               ? result.to(at::kComplexHalf)
               : result;
  }

  IValue host_argument(const IValue& value, const c10::Argument& argument) {
    if (value.isTensor()) return host_tensor(value.toTensor(), argument);
    if (value.isTensorList()) {
      std::vector<Tensor> tensors;
      for (const Tensor& tensor : value.toTensorVector())
        tensors.push_back(host_tensor(tensor, argument));
      return tensors;
    }
    if (value.isOptionalTensorList()) {
      std::vector<std::optional<Tensor>> tensors;
      for (const std::optional<Tensor>& tensor : value.toOptionalTensorVector()) {
        tensors.push_back(tensor ? std::optional(host_tensor(*tensor, argument)) : std::nullopt);
      }
      return c10::impl::toList(c10::List<std::optional<Tensor>>(tensors));
    }
    if (value.isDevice()) return value.toDevice().is_xpu() ? IValue(c10::Device(c10::kCPU)) : value;
    if (value.isGenerator()) {
      const auto type = value.toGenerator().device().type();
      TORCH_CHECK(type == c10::kXPU, "Expected a 'xpu' device type for generator but found '", type,
                  "'");
      return host_generator(value.toGenerator());
    }
    if (value.isNone() && argument.name() == "generator")
      return host_generator(default_generator(*device_));
    return value;
  }

  IValue device_result(const IValue& value, const c10::Argument& result) {
    if (value.isTensor()) return device_tensor(value.toTensor(), result);
    if (value.isTensorList()) {
      std::vector<Tensor> tensors;
      for (const Tensor& tensor : value.toTensorVector())
        tensors.push_back(device_tensor(tensor, result));
      return tensors;
    }
    return value;
  }

  Tensor device_tensor(const Tensor& host, const c10::Argument& result) {
    if (!host.defined()) return host;
    for (const auto& [known, tensor] : seen_) {
      if (known.is_same(host)) return tensor;
    }
    TORCH_CHECK(result.alias_info() == nullptr, "xpu: ", op_.schema().name(),
                " returns a view, which cannot run on the host");
    return to_device(host, *device_);
  }

  const c10::OperatorHandle& op_;
  torch::jit::Stack* stack_;
  std::vector<IValue> arguments_;
  std::optional<DeviceIndex> device_;
  std::vector<std::pair<Tensor, Tensor>> seen_;
  std::vector<std::pair<Tensor, Tensor>> written_;
  std::vector<std::pair<Tensor, Tensor>> wide_;  // of the host, and as float32
};

std::string full_name(const c10::OperatorHandle& op) {
  const auto& name = op.schema().operator_name();
  return name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
}

void not_strided(const c10::OperatorHandle& op, torch::jit::Stack*) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, "xpu: ", full_name(op), ": ", kStridedOnly);
}
void not_nested(const c10::OperatorHandle& op, torch::jit::Stack*) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      false, "xpu: ", full_name(op),
      ": nested tensors of the strided layout are not offered on xpu: use layout=torch.jagged");
}

}  // namespace

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  count_fallback(full_name(op).c_str());
  HostCall(op, stack).run();
}

void set_fallback_mode(FallbackMode mode) { g_fallback_mode = mode; }
FallbackMode fallback_mode() { return g_fallback_mode; }

void count_fallback(const char* op) {
  const FallbackMode mode = g_fallback_mode;
  TORCH_CHECK_NOT_IMPLEMENTED(
      mode != FallbackMode::Error, "xpu: ", op,
      " has no kernel for xpu, and IPEX_XPU_FALLBACK=error forbids to run it on the host");
  bool first = false;
  {
    Statistics& s = statistics();
    const std::lock_guard lock(s.mutex);
    first = s.counts[op]++ == 0;
  }
  if (first && mode == FallbackMode::WarnOnce) {
    TORCH_WARN("xpu: ", op,
               " has no kernel for xpu and runs on the host (ipex.xpu.fallback_stats() counts such "
               "calls)");
  }
}

std::vector<std::pair<std::string, std::uint64_t>> fallback_stats() {
  Statistics& s = statistics();
  const std::lock_guard lock(s.mutex);
  return {s.counts.begin(), s.counts.end()};
}

void reset_fallback_stats() {
  Statistics& s = statistics();
  const std::lock_guard lock(s.mutex);
  s.counts.clear();
}

void register_fallback() {
  static torch::Library library(torch::Library::IMPL, "_", c10::DispatchKey::XPU, __FILE__,
                                __LINE__);
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
  const auto refuse = [](c10::DispatchKey key, torch::CppFunction how) {
    static std::vector<std::unique_ptr<torch::Library>> kept;
    kept.push_back(
        std::make_unique<torch::Library>(torch::Library::IMPL, "_", key, __FILE__, __LINE__));
    kept.back()->fallback(std::move(how));
  };
  for (const auto key : {c10::DispatchKey::SparseXPU, c10::DispatchKey::SparseCsrXPU,
                         c10::DispatchKey::QuantizedXPU})
    refuse(key, torch::CppFunction::makeFromBoxedFunction<&not_strided>());
  refuse(c10::DispatchKey::NestedTensorXPU,
         torch::CppFunction::makeFromBoxedFunction<&not_nested>());
  // Of these torch has a composite for devices unknown to it, which is not as precise (it rounds
  // between its steps) or slower.
  static torch::Library aten(torch::Library::IMPL, "aten", c10::DispatchKey::XPU, __FILE__,
                             __LINE__);
  for (const char* name :
       {"addr", "addr.out", "native_group_norm", "native_channel_shuffle", "mish_backward"}) {
    aten.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
  }
}

}  // namespace ipex::xpu
