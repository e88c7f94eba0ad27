// SPDX-License-Identifier: Apache-2.0
// Autograd's threads of the devices: started with the device, and ended before Python finalizes.
// Left alone they would take the interpreter's lock when there is no interpreter any more:
// "terminate called without an active exception".
#include <torch/csrc/autograd/engine.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <thread>

#include "device/core/runtime.h"

namespace ipex::xpu {
namespace {

bool is_autograd_thread(const std::filesystem::path& task) {
  std::ifstream file(task / "comm");
  std::string name;
  return std::getline(file, name) && name.rfind("pt_autograd_", 0) == 0;
}

std::ptrdiff_t threads() {
  std::error_code error;
  const std::filesystem::directory_iterator tasks("/proc/self/task", error);
  return std::distance(begin(tasks), end(tasks));
}

bool autograd_threads_left() {
  std::error_code error;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task", error)) {
    if (is_autograd_thread(task.path())) return true;
  }
  return false;
}

}  // namespace

void start_autograd_threads() {
  // Autograd counts the devices once, at the first backward pass of the process. One that ran
  // before has counted none.
  const auto before = threads();
  torch::autograd::Engine::get_default_engine().initialize_device_threads_pool();
  TORCH_CHECK(threads() > before,
              "the xpu device cannot be registered any more, because a backward pass has run in "
              "this process: import ipex (or set "
              "IPEX_XPU_DEVICE before import torch) first");
}

bool stop_autograd_threads() {
  if (!autograd_threads_left()) return true;
  torch::autograd::Engine::get_default_engine().stop();
  // stop() returns when the threads have left their loops, not when they have given back what they
  // hold of Python.
  using clock = std::chrono::steady_clock;
  const auto deadline = clock::now() + std::chrono::seconds(5);
  while (autograd_threads_left()) {
    if (clock::now() > deadline) return false;
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
  return true;
}

}  // namespace ipex::xpu
