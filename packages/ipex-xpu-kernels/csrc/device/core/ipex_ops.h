// SPDX-License-Identifier: Apache-2.0
// Ops of ipex, one file per family. Arguments that do not fit go to the host, which has the
// messages.
#pragma once

#include <ATen/Functions.h>

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "device/core/kernel_ops.h"

namespace ipex::xpu {

// Checks of arguments that only the device has. `check` starts kernels that make one of the flags,
// 8 bytes each, another number than 0; `message` tells what that means for the first such flag.
struct DeviceCheck {
  std::function<void(void* flags)> check;
  std::function<std::string(std::size_t flag, std::int64_t value)> message;
  std::size_t flags = 1;
  bool is_index = true;  // raises IndexError, else RuntimeError
};
// Raises where something is wrong; what `offsets_of` does where the host cannot read the device
// holds here, too.
void check_on_device(const at::Tensor& like, DeviceCheck check);
// False where the host's op may run, whose own checks then find what is wrong.
bool in_bounds(const at::Tensor& like, DeviceCheck check);

// Whether kernels of embedding bags have the mode.
inline bool pools(std::string_view mode) { return mode == "sum" || mode == "mean"; }

inline bool dense_rows(const at::Tensor& x) { return x.dim() == 0 || x.stride(-1) == 1; }
inline at::Tensor with_dense_rows(const at::Tensor& x) {
  return dense_rows(x) ? x : x.contiguous();
}

// Lists of tensors: kernels take one of any length as a pointer to addresses. A table has columns
// of 8-byte numbers of one length, which lie one after the other on a device. The tensors whose
// addresses are among them live as long as it.
class Table {
 public:
  void add(std::int64_t number) { numbers_.push_back(number); }
  void add_addresses(const std::vector<at::Tensor>& tensors) {
    for (const at::Tensor& tensor : tensors) {
      numbers_.push_back(reinterpret_cast<std::int64_t>(data(tensor)));
      kept_.push_back(tensor);
    }
  }
  void upload(c10::Device device) { on_device_ = at::tensor(numbers_, at::kLong).to(device); }
  const void* column(std::size_t index, std::size_t length) const {
    return on_device_.const_data_ptr<std::int64_t>() + index * length;
  }

 private:
  std::vector<std::int64_t> numbers_;
  std::vector<at::Tensor> kept_;
  at::Tensor on_device_;
};

void register_interaction();  // interaction_ops.cpp
void register_bags();         // bags_ops.cpp
void register_embedding_bag();
void register_bags_update();  // bags_update_ops.cpp
void register_detection();    // detection_ops.cpp
void register_experts();      // experts_ops.cpp

}  // namespace ipex::xpu
