// SPDX-License-Identifier: Apache-2.0
// Ops that have no kernel here run on the host: on the same memory where the host can read it, on
// copies elsewhere.
#include <ATen/Functions.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/CPUFallback.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>

#include "core/core.h"
#include "runtime.h"

namespace ipex::xpu {
namespace {

using at::Tensor;
using c10::DeviceIndex;
using c10::IValue;

std::atomic<FallbackMode> g_mode{FallbackMode::Silent};
std::atomic<bool> g_zero_copy{true};

struct Statistics {
  std::mutex mutex;
  std::map<std::string, std::uint64_t> counts;
};
Statistics& statistics() {
  static auto* one = new Statistics;
  return *one;
}

void nothing(void*) {}

// Elements that the tensor may touch, from its first one on.
std::int64_t span_of(const Tensor& tensor) {
  if (tensor.numel() == 0) return 0;
  std::int64_t last = 0;
  for (std::int64_t i = 0; i < tensor.dim(); ++i) last += (tensor.size(i) - 1) * tensor.stride(i);
  return last + 1;
}

// Conjugation and negation that are only noted, not yet done.
Tensor with_bits_of(const Tensor& tensor, Tensor host) {
  host._set_conj(tensor.is_conj());
  host._set_neg(tensor.is_neg());
  return host;
}

Tensor view_on_host(const Tensor& tensor) {
  // Of the tensor's own elements only: an op that makes it larger gets other memory, which
  // from_host() then notices.
  const std::size_t bytes = static_cast<std::size_t>(span_of(tensor)) * tensor.element_size();
  void* data = bytes == 0 ? nullptr : const_cast<void*>(tensor.const_data_ptr());
  c10::Storage storage(c10::Storage::use_byte_size_t(), bytes,
                       c10::DataPtr(data, nullptr, &nothing, c10::Device(c10::kCPU)),
                       c10::GetAllocator(c10::kCPU), /*resizable=*/true);
  Tensor host = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  host.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides());
  return host;
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
          tensor.dim() == 0 || takes_host_tensors(op_.schema().name()),
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
    for (const char* part : {"not implemented for 'Half'", "not implemented for 'BFloat16'",
                             "doesn't support tensors of type: Half"}) {
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
    if (!host.defined() || !c10::isReducedFloatingType(host.scalar_type())) return host;
    for (const auto& [known, tensor] : wide_) {
      if (known.is_same(host)) return tensor;
    }
    wide_.emplace_back(host, host.to(at::kFloat));
    return wide_.back().second;
  }
  // A result in the dtype of the arguments.
  Tensor narrow(const Tensor& result, bool named) {
    if (!result.defined() || wide_.empty()) return result;
    for (const auto& [host, tensor] : wide_) {
      if (tensor.is_same(result)) return host;
    }
    const at::ScalarType small = wide_.front().first.scalar_type();
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

constexpr const char* kStridedOnly =
    "sparse and quantised tensors are not offered on xpu: keep them on the host";

void not_strided(const c10::OperatorHandle& op, torch::jit::Stack*) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, "xpu: ", full_name(op), ": ", kStridedOnly);
}

}  // namespace

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  count_fallback(full_name(op).c_str());
  HostCall(op, stack).run();
}

void set_fallback_mode(FallbackMode mode) { g_mode = mode; }
FallbackMode fallback_mode() { return g_mode; }
void set_zero_copy(bool on) { g_zero_copy = on; }

bool host_readable(DeviceIndex device) {
  return g_zero_copy && device_info(device).host_accessible;
}

void count_fallback(const char* op) {
  const FallbackMode mode = g_mode;
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

Tensor to_host(const Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_xpu()) return tensor;
  const DeviceIndex device = static_cast<DeviceIndex>(tensor.get_device());
  const std::int64_t span = span_of(tensor);
  // By torch's guard, which knows the streams of a torch that has XPU itself.
  const c10::impl::VirtualGuardImpl guard(c10::kXPU);
  if (host_readable(device)) {
    guard.synchronizeDevice(device);
    return with_bits_of(tensor, view_on_host(tensor));
  }
  // All that lies between the first and the last element in one copy.
  Tensor host =
      at::detail::empty_strided_cpu(tensor.sizes(), tensor.strides(), tensor.scalar_type());
  if (span != 0) {
    guard.synchronizeDevice(device);
    current_queue(device)
        .memcpy(host.mutable_data_ptr(), tensor.const_data_ptr(),
                static_cast<std::size_t>(span) * tensor.element_size())
        .wait();
  }
  return with_bits_of(tensor, host);
}

void from_host(const Tensor& host, const Tensor& tensor) {
  const DeviceIndex device = static_cast<DeviceIndex>(tensor.get_device());
  auto* impl = tensor.unsafeGetTensorImpl();
  const bool same_memory = host.numel() == 0 || host.const_data_ptr() == tensor.const_data_ptr();
  const bool same_shape = host.sizes() == tensor.sizes() && host.strides() == tensor.strides();
  if (same_shape && same_memory) return;
  const auto bytes = static_cast<std::size_t>(span_of(host)) * host.element_size();
  if (!same_shape) {
    // The op has given its output a size. The storage keeps its identity: others may share it.
    auto* storage = impl->unsafe_storage().unsafeGetStorageImpl();
    const std::size_t offset =
        static_cast<std::size_t>(impl->storage_offset()) * host.element_size();
    if (storage->nbytes() < offset + bytes) {
      c10::DataPtr data = allocator().allocate(offset + bytes);
      if (storage->nbytes() != 0) {
        current_queue(device).memcpy(data.get(), storage->data(), storage->nbytes()).wait();
      }
      storage->set_data_ptr_noswap(std::move(data));
      storage->set_nbytes(offset + bytes);
    }
    impl->set_sizes_and_strides(host.sizes(), host.strides());
  }
  if (bytes != 0)
    current_queue(device).memcpy(tensor.mutable_data_ptr(), host.const_data_ptr(), bytes).wait();
}

Tensor to_device(const Tensor& host, DeviceIndex device) {
  TORCH_CHECK_NOT_IMPLEMENTED(host.layout() == at::kStrided && !host.is_quantized(),
                              "xpu: ", kStridedOnly);
  const bool dense = host.is_non_overlapping_and_dense();
  const Tensor source = (dense ? host : host.contiguous()).resolve_conj().resolve_neg();
  Tensor result = at::empty_strided(source.sizes(), source.strides(),
                                    source.options().device(c10::Device(c10::kXPU, device)));
  if (source.numel() != 0) {
    current_queue(device)
        .memcpy(result.mutable_data_ptr(), source.const_data_ptr(), source.nbytes())
        .wait();
  }
  return result;
}

void register_fallback() {
  static torch::Library library(torch::Library::IMPL, "_", c10::DispatchKey::XPU, __FILE__,
                                __LINE__);
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
  for (const auto key : {c10::DispatchKey::SparseXPU, c10::DispatchKey::SparseCsrXPU,
                         c10::DispatchKey::QuantizedXPU}) {
    static std::vector<std::unique_ptr<torch::Library>> kept;
    kept.push_back(
        std::make_unique<torch::Library>(torch::Library::IMPL, "_", key, __FILE__, __LINE__));
    kept.back()->fallback(torch::CppFunction::makeFromBoxedFunction<&not_strided>());
  }
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
