// SPDX-License-Identifier: Apache-2.0
// Devices, streams and events of torch, on SYCL queues.
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <array>
#include <atomic>
#include <memory>

#include "core/core.h"
#include "device/core/runtime.h"

namespace ipex::xpu {
namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;

constexpr int kMaxDevices = 16;

thread_local DeviceIndex t_device = 0;
thread_local std::array<c10::StreamId, kMaxDevices> t_stream{};

DeviceIndex resolve(Device device) { return device.has_index() ? device.index() : t_device; }

int slot(const Stream& stream) {
  TORCH_CHECK(stream.id() >= 0 && stream.id() < kStreamsPerDevice, "xpu: there is no stream ",
              stream.id());
  return static_cast<int>(stream.id());
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return c10::kXPU; }

  Device exchangeDevice(Device device) const override {
    const Device before(c10::kXPU, t_device);
    if (device.index() != t_device) setDevice(device);
    return before;
  }
  Device getDevice() const override { return Device(c10::kXPU, t_device); }
  void setDevice(Device device) const override { set_current_device(device.index()); }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.index() >= 0 && device.index() < device_count()) t_device = device.index();
  }
  DeviceIndex deviceCount() const noexcept override {
    return static_cast<DeviceIndex>(device_count());
  }

  c10::DeviceCapability getDeviceCapability(Device) const override { return {}; }

  Stream getStream(Device device) const override { return current_stream(resolve(device)); }
  Stream getDefaultStream(Device device) const override {
    return Stream(Stream::DEFAULT, Device(c10::kXPU, resolve(device)));
  }
  Stream getStreamFromGlobalPool(Device device, bool high) const override {
    return pool_stream(resolve(device), high ? -1 : 0);
  }
  Stream getNewStream(Device device, int priority) const override {
    return pool_stream(resolve(device), priority);
  }
  Stream exchangeStream(Stream stream) const override {
    slot(stream);
    const Stream before = current_stream(stream.device_index());
    t_stream[static_cast<std::size_t>(stream.device_index())] = stream.id();
    return before;
  }
  void* getStreamNativeHandle(const Stream stream) const override { return &queue_of(stream); }

  bool queryStream(const Stream& stream) const override {
    return queue_of(stream).ext_oneapi_empty();
  }
  void synchronizeStream(const Stream& stream) const override { queue_of(stream).wait_and_throw(); }
  void synchronizeDevice(const DeviceIndex device) const override {
    synchronize(device < 0 ? t_device : device);
  }

  void record(void** event, const Stream& stream, const DeviceIndex,
              const c10::EventFlag) const override {
    auto marker = queue_of(stream).ext_oneapi_submit_barrier();
    if (*event == nullptr) {
      *event = new sycl::event(std::move(marker));
    } else {
      *static_cast<sycl::event*>(*event) = std::move(marker);
    }
  }
  void block(void* event, const Stream& stream) const override {
    if (event != nullptr)
      queue_of(stream).ext_oneapi_submit_barrier({*static_cast<sycl::event*>(event)});
  }
  bool queryEvent(void* event) const override {
    if (event == nullptr) return true;
    const auto status =
        static_cast<sycl::event*>(event)->get_info<sycl::info::event::command_execution_status>();
    return status == sycl::info::event_command_status::complete;
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) static_cast<sycl::event*>(event)->wait_and_throw();
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override {
    delete static_cast<sycl::event*>(event);
  }
  // Milliseconds between the ends of two recorded markers.
  double elapsedTime(void* first, void* second, const DeviceIndex) const override {
    TORCH_CHECK(first != nullptr && second != nullptr,
                "elapsed_time: both events must be recorded before");
    auto end = [](void* event) {
      auto& e = *static_cast<sycl::event*>(event);
      e.wait_and_throw();
      return e.get_profiling_info<sycl::info::event_profiling::command_end>();
    };
    const auto a = end(first);
    const auto b = end(second);
    return (static_cast<double>(b) - static_cast<double>(a)) * 1e-6;
  }

  void recordDataPtrOnStream(const c10::DataPtr& data, const Stream& stream) const override {
    allocator().recordStream(data, stream);
  }
};

}  // namespace

void check_device(DeviceIndex device) {
  TORCH_CHECK(device >= 0 && device < device_count(), "xpu: device must be in [0, ", device_count(),
              "), got ", static_cast<int>(device));
}

// These two ask torch's guard, which is ours or belongs to a torch that has XPU itself.
DeviceIndex current_device() noexcept {
  return c10::impl::VirtualGuardImpl(c10::kXPU).getDevice().index();
}
sycl::queue& current_queue(DeviceIndex device) {
  const c10::impl::VirtualGuardImpl guard(c10::kXPU);
  const Stream stream = guard.getStream(Device(c10::kXPU, device));
  return *static_cast<sycl::queue*>(guard.getStreamNativeHandle(stream));
}

void set_current_device(DeviceIndex device) {
  check_device(device);
  t_device = device;
}

Stream current_stream(DeviceIndex device) noexcept {
  if (device < 0) device = t_device;
  return Stream(Stream::UNSAFE, Device(c10::kXPU, device),
                t_stream[static_cast<std::size_t>(device)]);
}

Stream pool_stream(DeviceIndex device, int priority) {
  check_device(device);
  static std::array<std::array<std::atomic<std::uint32_t>, 3>, kMaxDevices> next{};
  const std::size_t pool = priority == 0 ? 0 : priority < 0 ? 1 : 2;
  const auto turn = next[static_cast<std::size_t>(device)][pool].fetch_add(1) % kStreamsOfPool;
  return Stream(Stream::UNSAFE, Device(c10::kXPU, device),
                static_cast<c10::StreamId>(1 + pool * kStreamsOfPool + turn));
}

sycl::queue& queue_of(const Stream& stream) { return queue(stream.device_index(), slot(stream)); }

void register_guard() {
  static c10::impl::DeviceGuardImplRegistrar registrar(c10::kXPU, new Guard);
}

}  // namespace ipex::xpu
