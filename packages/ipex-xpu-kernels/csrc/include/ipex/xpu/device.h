// SPDX-License-Identifier: Apache-2.0
// The device xpu in a C++ program that has no Python: link the target IPEX::xpu of the CMake
// package IPEX.
//
//   #include <ipex/xpu/device.h>
//   #include <torch/torch.h>
//   int main() {
//     const ipex::xpu::Device device("cpu");
//     std::cout << torch::ones({3}, torch::kXPU) << '\n';
//   }
#pragma once

#include <string>

#define IPEX_XPU_API __attribute__((visibility("default")))

namespace ipex::xpu {

// Registers the devices with torch, for the rest of the process; when the object goes, its queues
// are waited for, and the device is not usable any more. There can be one such object, in `main`,
// made before the first backward pass.
//
// `request` is what IPEX_XPU_DEVICE can be: "gpu", "cpu", "cpu:N", "auto"; "" takes the variable.
// The other variables IPEX_XPU_* hold, too, but for IPEX_XPU_ONEDNN: programs have no oneDNN.
// Throws std::runtime_error if there is no device, or a second object is made.
class IPEX_XPU_API Device {
 public:
  explicit Device(const std::string& request = "");
  ~Device();
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  int count() const noexcept { return count_; }

 private:
  int count_ = 0;
};

}  // namespace ipex::xpu
