// SPDX-License-Identifier: Apache-2.0
// Tensors of the device as tensors of the host, and back: the same memory where the host can read
// it, copies elsewhere.
#include <ATen/Functions.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <atomic>

#include "core/core.h"
#include "device/core/host_memory.h"
#include "device/core/runtime.h"

namespace ipex::xpu {
namespace {

using at::Tensor;
using c10::DeviceIndex;

std::atomic<bool> g_zero_copy{true};

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

}  // namespace

void set_zero_copy(bool on) { g_zero_copy = on; }

bool host_readable(DeviceIndex device) {
  return g_zero_copy && device_info(device).host_accessible;
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
    submit_copy(current_queue(device), host.mutable_data_ptr(), tensor.const_data_ptr(),
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
  with_bits_of(host, tensor);  // an op may leave its result to be conjugated
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
        submit_copy(current_queue(device), data.get(), storage->data(), storage->nbytes()).wait();
      }
      storage->set_data_ptr_noswap(std::move(data));
      storage->set_nbytes(offset + bytes);
    }
    impl->set_sizes_and_strides(host.sizes(), host.strides());
  }
  if (bytes != 0)
    submit_copy(current_queue(device), tensor.mutable_data_ptr(), host.const_data_ptr(), bytes)
        .wait();
}

Tensor to_device(const Tensor& host, DeviceIndex device) {
  TORCH_CHECK_NOT_IMPLEMENTED(host.layout() == at::kStrided && !host.is_quantized(),
                              "xpu: ", kStridedOnly);
  const bool dense = host.is_non_overlapping_and_dense();
  const Tensor source = (dense ? host : host.contiguous()).resolve_conj().resolve_neg();
  Tensor result = at::empty_strided(source.sizes(), source.strides(),
                                    source.options().device(c10::Device(c10::kXPU, device)));
  if (source.numel() != 0) {
    submit_copy(current_queue(device), result.mutable_data_ptr(), source.const_data_ptr(),
                source.nbytes())
        .wait();
  }
  return result;
}

}  // namespace ipex::xpu
