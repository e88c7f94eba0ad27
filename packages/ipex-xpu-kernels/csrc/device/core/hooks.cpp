// SPDX-License-Identifier: Apache-2.0
// What torch asks its XPU part: answered here, since this torch was built without one.
#include <ATen/detail/XPUHooksInterface.h>

#include <cstring>

#include "core/core.h"
#include "device/core/runtime.h"

namespace ipex::xpu {
namespace {

using c10::Device;
using c10::DeviceIndex;

struct Hooks final : at::XPUHooksInterface {
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return device_count() > 0; }
  bool hasXPU() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  std::string showConfig() const override { return "XPU device of ipex-xpu-kernels"; }

  DeviceIndex getNumGPUs() const override { return static_cast<DeviceIndex>(device_count()); }
  DeviceIndex deviceCount() const override { return static_cast<DeviceIndex>(device_count()); }
  DeviceIndex current_device() const override { return xpu::current_device(); }
  DeviceIndex getCurrentDevice() const override { return xpu::current_device(); }
  void setCurrentDevice(DeviceIndex device) const override { set_current_device(device); }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    const DeviceIndex before = xpu::current_device();
    set_current_device(device);
    return before;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override {
    const DeviceIndex before = xpu::current_device();
    if (device >= 0) set_current_device(device);
    return before;
  }
  int32_t getGlobalIdxFromDevice(const Device& device) const override { return device.index(); }
  void deviceSynchronize(DeviceIndex device) const override {
    synchronize(device < 0 ? xpu::current_device() : device);
  }

  const at::Generator& getDefaultGenerator(DeviceIndex device) const override {
    return default_generator(device);
  }
  at::Generator getNewGenerator(DeviceIndex device) const override {
    return make_generator(device);
  }

  Device getDeviceFromPtr(void* data) const override {
    DeviceIndex device = 0;
    TORCH_CHECK_VALUE(is_device_pointer(data, device),
                      "xpu: the pointer is not to memory of a device");
    return Device(c10::kXPU, device);
  }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  at::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
};

}  // namespace

void register_hooks() {
  // Of any arguments: the registry of torch 2.11 passes one.
  at::XPUHooksRegistry()->Register("XPUHooks",
                                   [](auto&&...) -> std::unique_ptr<at::XPUHooksInterface> {
                                     return std::make_unique<Hooks>();
                                   });
  // torch keeps the answer of its first question for ever. Where somebody asked before (a backward
  // pass, a pinned tensor, torch.accelerator), that is an object of the base class, which has no
  // members: it becomes ours by its table of functions.
  const at::XPUHooksInterface& kept = at::detail::getXPUHooks();
  if (!kept.isBuilt()) {
    static_assert(sizeof(Hooks) == sizeof(void*) && sizeof(at::XPUHooksInterface) == sizeof(void*));
    static Hooks* ours = new Hooks;
    std::memcpy(const_cast<void*>(static_cast<const void*>(&kept)), static_cast<const void*>(ours),
                sizeof(void*));
  }
}

}  // namespace ipex::xpu
