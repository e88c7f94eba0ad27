// SPDX-License-Identifier: Apache-2.0
// Devices, their contexts and queues.
#include <pthread.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <mutex>
#include <stdexcept>

#include "core.h"

namespace ipex::xpu {
namespace {

struct Device {
  sycl::device handle;
  sycl::context context;
  DeviceInfo info;
  std::mutex mutex;
  std::array<std::unique_ptr<sycl::queue>, kStreamsPerDevice> queues;
};

// Never destroyed: tensors may outlive every static object of this library, and the run-time is
// gone by then.
struct State {
  std::vector<std::unique_ptr<Device>> devices;
  std::string why = "not initialized";
  std::atomic<bool> down{false};
  std::atomic<bool> forked{false};  // a child of the process that has the device
};

State& state() {
  static State* instance = new State;
  return *instance;
}

Device& at(int device) {
  auto& devices = state().devices;
  if (device < 0 || static_cast<std::size_t>(device) >= devices.size()) {
    throw std::out_of_range("xpu: device must be in [0, " + std::to_string(devices.size()) +
                            "), got " + std::to_string(device));
  }
  return *devices[static_cast<std::size_t>(device)];
}

// The run-time's threads and locks do not survive a fork: to wait for a queue could last for ever.
void check_process() {
  if (state().forked) {
    throw std::runtime_error(
        "Cannot re-initialize XPU in forked subprocess. To use XPU with multiprocessing, you must "
        "use the 'spawn' start method");
  }
}

template <typename Param>
auto ask(const sycl::device& device, decltype(device.get_info<Param>()) otherwise) {
  try {
    return device.get_info<Param>();
  } catch (const sycl::exception&) {
    return otherwise;
  }
}

std::string hex_uuid(const sycl::device& device, const std::string& name, std::size_t index) {
  std::array<unsigned char, 16> bytes{};
  if (device.has(sycl::aspect::ext_intel_device_info_uuid)) {
    bytes = device.get_info<sycl::ext::intel::info::device::uuid>();
  } else {
    const std::uint64_t hash = std::hash<std::string>{}(name);
    for (std::size_t i = 0; i < 8; ++i) bytes[i] = static_cast<unsigned char>(hash >> (8 * i));
    bytes[15] = static_cast<unsigned char>(index);
  }
  std::string text;
  char buffer[3];
  for (const unsigned char byte : bytes) {
    std::snprintf(buffer, sizeof buffer, "%02x", byte);
    text += buffer;
  }
  return text;
}

std::uint32_t joint_sub_group(const sycl::device& device, const std::vector<std::size_t>& sizes) {
  namespace matrix = sycl::ext::oneapi::experimental::matrix;
  namespace info = sycl::ext::oneapi::experimental::info::device;
  // The compiler of the CPU device ends the process at its instructions for tiles.
  if (device.is_cpu()) return 0;
  const auto combinations = ask<info::matrix_combinations>(device, {});
  const auto has = [&](matrix::matrix_type type) {
    return std::any_of(combinations.begin(), combinations.end(), [&](const auto& c) {
      return c.msize == 16 && c.nsize == 16 && c.ksize == 16 && c.atype == type &&
             c.btype == type && c.ctype == matrix::matrix_type::fp32;
    });
  };
  if (!has(matrix::matrix_type::bf16) || !has(matrix::matrix_type::fp16)) return 0;
  for (const std::uint32_t size : {16u, 32u}) {
    if (std::find(sizes.begin(), sizes.end(), size) != sizes.end()) return size;
  }
  return 0;
}

// What a pointer of malloc_device may be used for cannot be asked for: on a CPU device it is
// ordinary memory.
DeviceInfo describe(const sycl::device& device, std::size_t index) {
  namespace info = sycl::info::device;
  DeviceInfo result;
  result.name = device.get_info<info::name>();
  result.vendor = device.get_info<info::vendor>();
  result.platform = device.get_platform().get_info<sycl::info::platform::name>();
  result.driver_version = device.get_info<info::driver_version>();
  result.version = device.get_info<info::version>();
  result.is_cpu = device.is_cpu();
  result.host_accessible = device.is_cpu();
  result.has_fp16 = device.has(sycl::aspect::fp16);
  result.has_fp64 = device.has(sycl::aspect::fp64);
  result.has_atomic64 = device.has(sycl::aspect::atomic64);
  result.total_memory = ask<info::global_mem_size>(device, 0);
  result.max_allocation = ask<info::max_mem_alloc_size>(device, 0);
  result.local_memory = ask<info::local_mem_size>(device, 0);
  result.compute_units = ask<info::max_compute_units>(device, 1);
  result.max_work_group_size =
      static_cast<std::uint32_t>(ask<info::max_work_group_size>(device, 1));
  result.max_num_sub_groups = ask<info::max_num_sub_groups>(device, 1);
  result.sub_group_sizes = ask<info::sub_group_sizes>(device, {});
  result.joint_sub_group = joint_sub_group(device, result.sub_group_sizes);
  result.uuid = hex_uuid(device, result.name, index);
  return result;
}

std::vector<sycl::device> parts_of(const sycl::device& root, unsigned parts) {
  if (parts <= 1) return {root};
  const unsigned units = root.get_info<sycl::info::device::max_compute_units>();
  if (units >= parts) {
    try {
      auto found =
          root.create_sub_devices<sycl::info::partition_property::partition_equally>(units / parts);
      if (found.size() >= parts) return {found.begin(), found.begin() + parts};
    } catch (const sycl::exception&) {
      // Not every driver divides a device.
    }
  }
  // The same device several times: slower, not wrong.
  return std::vector<sycl::device>(parts, root);
}

std::vector<sycl::device> find_devices(const std::string& request, std::string& why) {
  std::vector<sycl::device> gpus;
  std::vector<sycl::device> others;
  std::vector<sycl::device> cpus;
  for (const auto& platform : sycl::platform::get_platforms()) {
    for (const auto& device : platform.get_devices()) {
      // The same GPU appears once for each of its back ends; torch's own builds use Level Zero.
      const auto backend = device.get_backend();
      if (device.is_gpu() && backend == sycl::backend::ext_oneapi_level_zero)
        gpus.push_back(device);
      else if (device.is_gpu() && backend != sycl::backend::opencl)
        others.push_back(device);
      if (device.is_cpu()) cpus.push_back(device);
    }
  }
  if (gpus.empty()) gpus = others;
  if (request.empty() || request == "gpu" || (request == "auto" && !gpus.empty())) {
    if (gpus.empty()) why = "no SYCL GPU was found (IPEX_XPU_DEVICE=cpu uses the CPU)";
    return gpus;
  }
  unsigned parts = 1;
  if (request.rfind("cpu:", 0) == 0) {
    const std::string digits = request.substr(4);
    const bool valid =
        !digits.empty() && digits.size() <= 2 &&
        std::all_of(digits.begin(), digits.end(), [](char c) { return c >= '0' && c <= '9'; });
    parts = valid ? static_cast<unsigned>(std::stoul(digits)) : 0;
  } else if (request != "cpu" && request != "auto") {
    parts = 0;
  }
  if (parts == 0 || parts > 16) {
    why = "IPEX_XPU_DEVICE must be gpu, cpu, cpu:N (1 to 16) or auto, got " + request;
    return {};
  }
  if (cpus.empty()) {
    why = "no SYCL CPU device was found: pip install 'ipex-xpu-kernels[cpu-device]'";
    for (const char* variable : {"ONEAPI_DEVICE_SELECTOR", "OCL_ICD_FILENAMES"}) {
      const char* value = std::getenv(variable);
      if (value != nullptr) why += std::string(", or change ") + variable + "=" + value;
    }
    return {};
  }
  return parts_of(cpus.front(), parts);
}

std::unique_ptr<Device> make_device(const sycl::device& handle, sycl::context context,
                                    std::size_t index) {
  auto device = std::make_unique<Device>();
  device->handle = handle;
  device->context = std::move(context);
  device->info = describe(handle, index);
  return device;
}

void report(const sycl::exception_list& errors) {
  for (const auto& error : errors) {
    try {
      std::rethrow_exception(error);
    } catch (const std::exception& e) {
      std::fprintf(stderr, "xpu: an operation on the device failed: %s\n", e.what());
    }
  }
}

}  // namespace

int initialize(const std::string& request) {
  static std::once_flag once;
  std::call_once(once, [&] {
    State& s = state();
    s.why.clear();
    ::pthread_atfork(nullptr, nullptr, [] { state().forked = true; });
    try {
      const auto found = find_devices(request, s.why);
      for (std::size_t i = 0; i < found.size(); ++i) {
        // Memory of one device may be used by the others of the platform; parts of a device share
        // its context.
        auto context = found.size() > 1 && found[0].is_cpu()
                           ? (i == 0 ? sycl::context(found) : s.devices[0]->context)
                           : found[i].get_platform().khr_get_default_context();
        s.devices.push_back(make_device(found[i], std::move(context), i));
      }
    } catch (const std::exception& e) {
      s.devices.clear();
      s.why = e.what();
    }
  });
  return device_count();
}

void adopt(const std::vector<sycl::queue*>& queues) {
  State& s = state();
  for (auto& old : s.devices) static_cast<void>(old.release());  // their queues may be in use
  s.devices.clear();
  for (std::size_t i = 0; i < queues.size(); ++i)
    s.devices.push_back(make_device(queues[i]->get_device(), queues[i]->get_context(), i));
}

int device_count() noexcept { return static_cast<int>(state().devices.size()); }
const std::string& why_no_device() noexcept { return state().why; }
const DeviceInfo& device_info(int device) { return at(device).info; }
sycl::device& sycl_device(int device) { return at(device).handle; }
sycl::context& sycl_context(int device) { return at(device).context; }

sycl::queue& queue(int device, int stream) {
  Device& d = at(device);
  check_process();
  auto& slot = d.queues.at(static_cast<std::size_t>(stream));
  const std::lock_guard lock(d.mutex);
  if (!slot) {
    if (state().down) throw std::runtime_error("xpu: the device was shut down at interpreter exit");
    const auto make = [&](auto... priority) {
      return std::make_unique<sycl::queue>(
          d.context, d.handle, report,
          sycl::property_list{sycl::property::queue::in_order(),
                              sycl::property::queue::enable_profiling(), priority...});
    };
    namespace wish = sycl::ext::oneapi::property::queue;
    const int priority = priority_of(stream);
    slot = priority < 0   ? make(wish::priority_high())
           : priority > 0 ? make(wish::priority_low())
                          : make();
  }
  return *slot;
}

std::optional<int> stream_of(const sycl::queue* queue, int device) {
  Device& d = at(device);
  const std::lock_guard lock(d.mutex);
  for (std::size_t i = 0; i < d.queues.size(); ++i) {
    if (d.queues[i].get() == queue && queue != nullptr) return static_cast<int>(i);
  }
  return std::nullopt;
}

std::pair<int, int> place_of(const sycl::queue& queue) {
  const sycl::device device = queue.get_device();
  for (int i = 0; i < device_count(); ++i) {
    Device& d = at(i);
    if (d.handle != device) continue;
    const std::lock_guard lock(d.mutex);
    for (std::size_t k = 0; k < d.queues.size(); ++k) {
      if (d.queues[k] && *d.queues[k] == queue) return {i, static_cast<int>(k)};
    }
    return {i, -1};
  }
  return {0, -1};
}

void synchronize(int device) {
  Device& d = at(device);
  check_process();
  std::vector<sycl::queue*> open;
  {
    const std::lock_guard lock(d.mutex);
    for (auto& slot : d.queues) {
      if (slot) open.push_back(slot.get());
    }
  }
  for (sycl::queue* q : open) q->wait_and_throw();
}

void shutdown() noexcept {
  State& s = state();
  s.down = true;
  for (int i = 0; i < device_count(); ++i) {
    try {
      synchronize(i);
    } catch (...) {
      // No one can be notified any more.
    }
  }
}

}  // namespace ipex::xpu
