// SPDX-License-Identifier: Apache-2.0
#include <atomic>
#include <mutex>
#include <stdexcept>
#include <utility>

#include "core.h"

namespace ipex::xpu {
namespace {

std::atomic<bool> wanted{false};
std::mutex mutex;
std::vector<std::pair<std::string, sycl::event>>& kept() {
  static auto* events = new std::vector<std::pair<std::string, sycl::event>>;  // outlives the exit
  return *events;
}

}  // namespace

bool keeps_times() { return wanted.load(std::memory_order_relaxed); }

void keep_time(std::string_view name, const sycl::event& event) {
  const std::lock_guard lock(mutex);
  kept().emplace_back(name, event);
}

void start_kernel_times() {
  const std::lock_guard lock(mutex);
  kept().clear();
  wanted = true;
}

std::vector<KernelTime> stop_kernel_times() {
  wanted = false;
  std::vector<std::pair<std::string, sycl::event>> events;
  {
    const std::lock_guard lock(mutex);
    events.swap(kept());
  }
  std::vector<KernelTime> times;
  times.reserve(events.size());
  namespace info = sycl::info::event_profiling;
  try {
    for (auto& [name, event] : events) {
      event.wait();
      times.push_back({std::move(name), event.get_profiling_info<info::command_start>(),
                       event.get_profiling_info<info::command_end>()});
    }
  } catch (const sycl::exception& e) {
    throw std::runtime_error(std::string("kernel_times: the queue does not measure: ") + e.what());
  }
  return times;
}

}  // namespace ipex::xpu
