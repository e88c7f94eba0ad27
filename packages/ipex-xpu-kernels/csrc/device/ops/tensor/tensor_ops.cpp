// SPDX-License-Identifier: Apache-2.0
// Tensors themselves: making, filling, copying, and looking at them in another shape.
#include <ATen/EmptyTensor.h>
#include <ATen/Functions.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/NativeFunctions.h>
#include <ATen/native/Resize.h>
#include <ATen/native/ResizeCommon.h>
#include <ATen/native/TensorFactories.h>
#include <torch/library.h>

#include "core/core.h"
#include "device/core/kernel_ops.h"
#include "device/core/runtime.h"

namespace ipex::xpu {
namespace {

using at::IntArrayRef;
using at::Tensor;
using c10::DeviceIndex;
using std::optional;

c10::Device device_of(optional<c10::Device> device) {
  const c10::Device here = device.value_or(c10::Device(c10::kXPU, current_device()));
  return here.has_index() ? here : c10::Device(c10::kXPU, current_device());
}

constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::XPU);

Tensor empty(IntArrayRef size, optional<at::ScalarType> dtype, optional<at::Layout> layout,
             optional<at::Device> device, optional<bool> pin_memory,
             optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin_memory.value_or(false), "Only dense CPU tensors can be pinned");
  TORCH_CHECK(layout.value_or(at::kStrided) == at::kStrided, "xpu: layout must be strided");
  const c10::DeviceGuard guard(device_of(device));
  Tensor result =
      at::detail::empty_generic(size, &allocator(), kKeys, at::dtype_or_default(dtype), format);
  if (at::globalContext().deterministicAlgorithms() &&
      at::globalContext().deterministicFillUninitializedMemory()) {
    at::native::fill_empty_deterministic_(result);
  }
  return result;
}

Tensor empty_strided(IntArrayRef size, IntArrayRef stride, optional<at::ScalarType> dtype,
                     optional<at::Layout> layout, optional<at::Device> device,
                     optional<bool> pin_memory) {
  TORCH_CHECK(!pin_memory.value_or(false), "Only dense CPU tensors can be pinned");
  TORCH_CHECK(layout.value_or(at::kStrided) == at::kStrided, "xpu: layout must be strided");
  const c10::DeviceGuard guard(device_of(device));
  Tensor result = at::detail::empty_strided_generic(size, stride, &allocator(), kKeys,
                                                    at::dtype_or_default(dtype));
  if (at::globalContext().deterministicAlgorithms() &&
      at::globalContext().deterministicFillUninitializedMemory()) {
    at::native::fill_empty_deterministic_(result);
  }
  return result;
}

// Zeros without memory, for gradients that are not read.
Tensor efficient_zero_tensor(IntArrayRef size, optional<at::ScalarType> dtype,
                             optional<at::Layout> layout, optional<at::Device> device,
                             optional<bool>) {
  TORCH_CHECK(layout.value_or(at::kStrided) == at::kStrided, "xpu: layout must be strided");
  const c10::Device here = device_of(device);
  at::native::ZeroTensorAllocator nothing(here);
  return at::detail::empty_generic(size, &nothing,
                                   kKeys | c10::DispatchKeySet(c10::DispatchKey::ZeroTensor),
                                   at::dtype_or_default(dtype), std::nullopt);
}

// Makes the storage at least so large; what was in it stays.
void grow_storage(c10::TensorImpl& tensor, std::size_t bytes) {
  auto* storage = tensor.unsafe_storage().unsafeGetStorageImpl();
  if (storage->nbytes() >= bytes) return;
  TORCH_CHECK(storage->resizable(), "Trying to resize storage that is not resizable");
  const c10::DeviceGuard guard(tensor.device());
  c10::DataPtr data = allocator().allocate(bytes);
  if (storage->nbytes() != 0 && data.get() != nullptr) {
    submit_copy(current_queue(tensor.device().index()), data.get(), storage->data(),
                storage->nbytes())
        .wait();
  }
  storage->set_data_ptr_noswap(std::move(data));
  storage->set_nbytes(bytes);
}

const Tensor& resize_(const Tensor& self, IntArrayRef size, optional<at::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  const std::size_t bytes = at::detail::computeStorageNbytesContiguous(
      size, self.element_size(), static_cast<std::size_t>(self.storage_offset()));
  if (self.numel() > 0) grow_storage(*impl, bytes);
  if (format.has_value()) {
    TORCH_CHECK(*format != at::MemoryFormat::Preserve, "Unsupported memory format ", *format);
    impl->empty_tensor_restride(*format);
  }
  return self;
}

Tensor& set_storage_offset(Tensor& self, at::Storage source, std::int64_t offset, IntArrayRef size,
                           IntArrayRef stride) {
  at::native::checkSetStorage(self, std::move(source), offset, size, stride);
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_offset(offset);
  if (stride.data() != nullptr) {
    impl->set_sizes_and_strides(size, stride);
  } else {
    impl->set_sizes_contiguous(size);
  }
  if (self.numel() > 0) {
    grow_storage(*impl,
                 at::detail::computeStorageNbytes(self.sizes(), self.strides(), self.element_size(),
                                                  static_cast<std::size_t>(offset)));
  }
  return self;
}

Tensor& set_storage(Tensor& self, at::Storage source) {
  const auto count = static_cast<std::int64_t>(source.nbytes() / self.element_size());
  return set_storage_offset(self, std::move(source), 0, {count}, {});
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  if (self.is_same(source)) return self;
  return set_storage_offset(self, source.storage(), source.storage_offset(), source.sizes(),
                            source.strides());
}

Tensor& set_nothing(Tensor& self) {
  at::Storage storage(at::Storage::use_byte_size_t(), 0, allocator().allocate(0), &allocator(),
                      true);
  return set_storage_offset(self, std::move(storage), 0, {0}, {});
}

// Copies of the same dtype and strides are one copy of memory; all else is a kernel of the device,
// or of the host.
bool same_layout(const Tensor& a, const Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.sizes() == b.sizes() &&
         a.is_conj() == b.is_conj() && a.is_neg() == b.is_neg() &&
         ((a.strides() == b.strides() && a.is_non_overlapping_and_dense()) ||
          (a.is_contiguous() && b.is_contiguous()));
}

void copy_bytes(const Tensor& to, const Tensor& from, DeviceIndex device, bool wait) {
  auto event = submit_copy(current_queue(device), to.mutable_data_ptr(), from.const_data_ptr(),
                           from.nbytes());
  if (wait) event.wait_and_throw();
}

void copy_on_device(Tensor& self, const Tensor& source) {
  const auto device = static_cast<DeviceIndex>(self.get_device());
  if (self.get_device() != source.get_device()) {
    // Through the host: devices of one process need not reach each other's memory.
    self.copy_(source.to(at::kCPU));
    return;
  }
  at::assert_no_internal_overlap(self);
  at::assert_no_partial_overlap(self, source);
  if (same_layout(self, source)) {
    if (self.const_data_ptr() != source.const_data_ptr()) copy_bytes(self, source, device, false);
    return;
  }
  if (copy_kernel(self, source)) return;
  count_fallback("aten::copy_");
  Tensor host = to_host(self);
  host.copy_(to_host(source));
  from_host(host, self);
}

Tensor& copy_(Tensor& self, const Tensor& src, bool non_blocking) {
  if (self.is_same(src)) return self;
  if (src._is_zerotensor()) return self.zero_();
  TORCH_CHECK(self.defined() && src.defined(), "copy_: both tensors must be defined");
  Tensor source = src;
  if (source.sizes() != self.sizes()) source = source.expand_as(self);
  if (self.numel() == 0) return self;
  if (self.is_xpu() && source.is_xpu()) {
    const c10::DeviceGuard guard(self.device());
    copy_on_device(self, source);
  } else if (self.is_xpu()) {
    const c10::DeviceGuard guard(self.device());
    if (same_layout(self, source)) {
      copy_bytes(self, source, static_cast<DeviceIndex>(self.get_device()),
                 !(non_blocking && is_pinned(source.const_data_ptr())));
    } else {
      // Numbers are converted and put in order by the host, which has them.
      Tensor ready = at::empty(self.sizes(), source.options().dtype(self.scalar_type()));
      ready.copy_(source);
      Tensor staged = to_device(ready, static_cast<DeviceIndex>(self.get_device()));
      copy_on_device(self, staged);
      synchronize(self.get_device());
    }
  } else {
    const c10::DeviceGuard guard(source.device());
    const auto device = static_cast<DeviceIndex>(source.get_device());
    if (same_layout(self, source)) {
      copy_bytes(self, source, device, !(non_blocking && is_pinned(self.const_data_ptr())));
    } else {
      self.copy_(to_host(source));
    }
  }
  return self;
}

Tensor copy_from(const Tensor& self, const Tensor& dst, bool non_blocking) {
  Tensor target = dst;
  copy_(target, self, non_blocking);
  return target;
}

Tensor copy_from_and_resize(const Tensor& self, const Tensor& dst) {
  dst.resize_(self.sizes());
  return copy_from(self, dst, false);
}

at::Scalar local_scalar_dense(const Tensor& self) {
  Tensor host = at::empty({}, self.options().device(at::kCPU));
  const c10::DeviceGuard guard(self.device());
  copy_bytes(host, self, static_cast<DeviceIndex>(self.get_device()), true);
  return at::_local_scalar_dense(host);
}

void record_stream(Tensor& self, c10::Stream stream) {
  allocator().recordStream(self.storage().data_ptr(), stream);
}

bool is_set_to(const Tensor& self, const Tensor& other) {
  return at::native::is_set_to(self, other);
}

}  // namespace

void register_tensor_ops() {
  static torch::Library library(torch::Library::IMPL, "aten", c10::DispatchKey::XPU, __FILE__,
                                __LINE__);
  library.impl("empty.memory_format", TORCH_FN(empty));
  library.impl("empty_strided", TORCH_FN(empty_strided));
  library.impl("_efficientzerotensor", TORCH_FN(efficient_zero_tensor));
  library.impl("resize_", TORCH_FN(resize_));
  library.impl("set_.source_Storage_storage_offset", TORCH_FN(set_storage_offset));
  library.impl("set_.source_Storage", TORCH_FN(set_storage));
  library.impl("set_.source_Tensor", TORCH_FN(set_tensor));
  library.impl("set_", TORCH_FN(set_nothing));
  library.impl("is_set_to", TORCH_FN(is_set_to));
  library.impl("copy_", TORCH_FN(copy_));
  library.impl("_copy_from", TORCH_FN(copy_from));
  library.impl("_copy_from_and_resize", TORCH_FN(copy_from_and_resize));
  library.impl("_local_scalar_dense", TORCH_FN(local_scalar_dense));
  library.impl("record_stream", TORCH_FN(record_stream));
  // Views are of sizes and strides alone; torch lists the devices that may have them.
  library.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  library.impl("view", TORCH_FN(at::native::view));
  library.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  library.impl("unfold", TORCH_FN(at::native::unfold));
  library.impl("view_as_real", TORCH_FN(at::native::view_as_real));
  library.impl("view_as_complex", TORCH_FN(at::native::view_as_complex));
}

}  // namespace ipex::xpu
