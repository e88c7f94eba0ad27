// SPDX-License-Identifier: Apache-2.0
// The Python module `ipex_xpu_kernels._C`: importing it does nothing, `initialize` registers the
// device.
#include <c10/core/impl/VirtualGuardImpl.h>
#include <pthread.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/Generator.h>
#include <torch/csrc/utils/pybind.h>

#include <atomic>

#include "core/core.h"
#include "device/core/block_cache.h"
#include "device/core/kernel_ops.h"
#include "device/core/runtime.h"
#include "device/onednn/onednn_library.h"
#include "device/ops/attention/attention_ops.h"

namespace py = pybind11;
namespace ipex::xpu {
namespace {

std::atomic<bool> g_forked{false};

py::dict properties(int device) {
  check_device(static_cast<c10::DeviceIndex>(device));
  const DeviceInfo& info = device_info(device);
  py::dict result;
  result["name"] = info.name;
  result["vendor"] = info.vendor;
  result["platform_name"] = info.platform;
  result["driver_version"] = info.driver_version;
  result["version"] = info.version;
  result["type"] = info.is_cpu ? "cpu" : "gpu";
  result["host_accessible"] = info.host_accessible;
  result["has_fp16"] = info.has_fp16;
  result["has_fp64"] = info.has_fp64;
  result["has_atomic64"] = info.has_atomic64;
  result["total_memory"] = info.total_memory;
  result["max_allocation"] = info.max_allocation;
  result["local_mem_size"] = info.local_memory;
  result["max_compute_units"] = info.compute_units;
  result["gpu_eu_count"] = info.compute_units;
  result["max_work_group_size"] = info.max_work_group_size;
  result["max_num_sub_groups"] = info.max_num_sub_groups;
  result["sub_group_sizes"] = info.sub_group_sizes;
  result["uuid"] = info.uuid;
  return result;
}

// Milliseconds between two recorded events, by their addresses: torch refuses to ask for events of
// a derived class.
double elapsed_time(std::uintptr_t first, std::uintptr_t second) {
  const c10::impl::VirtualGuardImpl guard(c10::kXPU);
  return guard.elapsedTime(reinterpret_cast<void*>(first), reinterpret_cast<void*>(second), 0);
}

py::object generator_object(int device) {
  return py::reinterpret_steal<py::object>(
      THPGenerator_Wrap(default_generator(static_cast<c10::DeviceIndex>(device))));
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.def(
      "initialize", [](const std::string& request) { return initialize(request); },
      py::arg("request"), py::call_guard<py::gil_scoped_release>());
  m.def("why_no_device", &why_no_device);
  m.def(
      "register_device",
      [] {
        register_device();
        ::pthread_atfork(nullptr, nullptr, [] { g_forked = true; });
      },
      py::call_guard<py::gil_scoped_release>());
  m.def("register_ipex_kernels", &register_ipex_kernels);
  // Of a torch that has XPU itself: a queue of each of its devices, by address.
  m.def("adopt", [](const std::vector<std::uintptr_t>& addresses) {
    std::vector<sycl::queue*> queues;
    for (const auto address : addresses) queues.push_back(reinterpret_cast<sycl::queue*>(address));
    adopt(queues);
  });
  m.def("device_count", &device_count);
  m.def("properties", &properties, py::arg("device"));
  m.def("current_device", [] { return static_cast<int>(current_device()); });
  m.def("set_device",
        [](int device) { set_current_device(static_cast<c10::DeviceIndex>(device)); });
  m.def(
      "synchronize", [](int device) { synchronize(device); },
      py::call_guard<py::gil_scoped_release>());
  m.def("stop_autograd_threads", &stop_autograd_threads, py::call_guard<py::gil_scoped_release>());
  m.def("shutdown", &shutdown, py::call_guard<py::gil_scoped_release>());
  m.def("forked", [] { return g_forked.load(); });
  m.def("queue_pointer", [](int device, std::int64_t stream) {
    return reinterpret_cast<std::uintptr_t>(&queue(device, static_cast<int>(stream)));
  });
  m.def("stream_priority", [](std::int64_t stream) { return priority_of(stream); });
  // The number of the stream that a queue belongs to, which is one of this package's.
  m.def("stream_of_queue", [](std::uintptr_t address, int device) -> std::optional<int> {
    check_device(static_cast<c10::DeviceIndex>(device));
    return stream_of(reinterpret_cast<sycl::queue*>(address), device);
  });
  m.def("elapsed_time", &elapsed_time, py::arg("first"), py::arg("second"),
        py::call_guard<py::gil_scoped_release>());
  m.def("generator", &generator_object);
  m.def("set_memory_fraction", [](double fraction, int device) {
    set_memory_fraction(fraction, static_cast<c10::DeviceIndex>(device));
  });
  m.def("memory_fraction",
        [](int device) { return memory_fraction(static_cast<c10::DeviceIndex>(device)); });
  m.def("memory_info", [](int device) {
    return allocator().getMemoryInfo(static_cast<c10::DeviceIndex>(device));
  });
  m.def("memory_snapshot", [] {
    py::list result;
    for (const auto& segment : memory_snapshot()) {
      py::dict one;
      one["device"] = static_cast<int>(segment.device);
      one["address"] = segment.address;
      one["total_size"] = segment.total_size;
      one["allocated_size"] = segment.allocated_size;
      one["active_size"] = segment.active_size;
      one["requested_size"] = segment.requested_size;
      one["stream"] = reinterpret_cast<std::uintptr_t>(segment.stream);
      one["segment_type"] = segment.is_large ? "large" : "small";
      one["segment_pool_id"] = py::make_tuple(0, 0);
      one["is_expandable"] = false;
      py::list blocks;
      std::size_t address = segment.address;
      for (const auto& block : segment.blocks) {
        py::dict b;
        b["address"] = address;
        b["size"] = block.size;
        b["requested_size"] = block.requested_size;
        b["state"] = block.allocated ? "active_allocated"
                     : block.active  ? "active_pending_free"
                                     : "inactive";
        b["frames"] = py::list();
        blocks.append(b);
        address += block.size;
      }
      one["blocks"] = blocks;
      result.append(one);
    }
    return result;
  });
  m.def("record_memory_history", &record_memory_history, py::arg("limit"));
  m.def("memory_history", [] {
    py::list result;
    for (const auto& device : memory_history()) {
      py::list steps;
      for (const Trace& trace : device) {
        py::dict one;
        one["action"] = trace.action;
        // What failed for want of memory has no address, but what was free.
        one[std::string_view(trace.action) == "oom" ? "device_free" : "addr"] = trace.address;
        one["size"] = trace.size;
        one["stream"] = trace.stream;
        one["time_us"] = trace.time;
        one["frames"] = py::list();
        steps.append(one);
      }
      result.append(steps);
    }
    return result;
  });
  m.def("set_fallback_mode", [](const std::string& mode) {
    TORCH_CHECK_VALUE(mode == "silent" || mode == "warn" || mode == "error",
                      "set_fallback_mode: mode must be silent, warn or error, got ", mode);
    set_fallback_mode(mode == "error"  ? FallbackMode::Error
                      : mode == "warn" ? FallbackMode::WarnOnce
                                       : FallbackMode::Silent);
  });
  m.def("attention_supported", &attention_supported);
  m.def("joint_pairs",
        [](int device) { return joint_pairs(static_cast<c10::DeviceIndex>(device)); });
  // Sequences of tensors and numbers in the order of struct Attention.
  m.def("attention", [](at::Tensor query, at::Tensor key, at::Tensor value, at::Tensor out,
                        std::optional<at::Tensor> mask, std::optional<at::Tensor> slopes,
                        std::optional<at::Tensor> sinks, std::optional<at::Tensor> q_starts,
                        std::optional<at::Tensor> k_starts, std::optional<at::Tensor> k_lengths,
                        std::optional<at::Tensor> table, std::int64_t sequences,
                        std::int64_t longest, std::int64_t behind, std::int64_t ahead, double scale,
                        double softcap, bool bottom_right) {
    attention_kernel({query, key, value, out, mask, slopes, sinks, q_starts, k_starts, k_lengths,
                      table, sequences, longest, behind, ahead, scale, softcap, bottom_right});
  });
  m.def("set_kernel_mode", [](const std::string& mode) {
    TORCH_CHECK_VALUE(mode == "auto" || mode == "always",
                      "set_kernel_mode: mode must be auto or always, got ", mode);
    set_kernel_mode(mode == "always" ? KernelMode::Always : KernelMode::Auto);
  });
  // Whether an op whose kernel is slower than the host is left to it.
  m.def("host_is_faster", [](int device) {
    return !use_kernel(static_cast<c10::DeviceIndex>(device), KernelSpeed::Slower);
  });
  m.def("set_zero_copy", &set_zero_copy);
  m.def("set_collective_mode", [](const std::string& mode) {
    TORCH_CHECK_VALUE(mode == "auto" || mode == "host" || mode == "direct",
                      "set_collective_mode: mode must be auto, host or direct, got ", mode);
    set_collective_mode(mode == "host"     ? CollectiveMode::Host
                        : mode == "direct" ? CollectiveMode::Direct
                                           : CollectiveMode::Auto);
  });
  m.def("set_group_timeout", &set_group_timeout, py::arg("group"), py::arg("seconds"));
  m.def("direct_collectives", &direct_collectives);
  m.def("stop_collectives", &stop_collectives, py::call_guard<py::gil_scoped_release>());
  m.def("set_onednn_path", &onednn::set_path, py::arg("path"), py::arg("why"));
  m.def("set_onednn_mode", [](const std::string& mode) {
    TORCH_CHECK_VALUE(mode == "off" || mode == "auto" || mode == "prefer",
                      "set_onednn_mode: mode must be off, auto or prefer, got ", mode);
    onednn::set_mode(mode == "off"    ? onednn::Mode::Off
                     : mode == "auto" ? onednn::Mode::Auto
                                      : onednn::Mode::Prefer);
  });
  m.def("onednn_state", [] {
    const onednn::State state = onednn::state();
    py::dict result;
    result["path"] = state.path;
    result["version"] = state.version;
    result["why"] = state.why;
    result["runs"] = state.runs;
    return result;
  });
  m.def("fallback_stats", [] {
    py::dict result;
    for (const auto& [name, count] : fallback_stats()) result[py::str(name)] = count;
    return result;
  });
  m.def("reset_fallback_stats", &reset_fallback_stats);
  m.def("set_kernel_library", &set_kernel_library);
  m.def("set_kernels_from_source", &set_kernels_from_source);
  m.def("set_cache_directory", &set_cache_directory);
  m.def("kernel_names", &kernel_names);
  m.def("start_kernel_times", &start_kernel_times);
  m.def("stop_kernel_times", [] {
    std::vector<KernelTime> times;
    {
      const py::gil_scoped_release no_gil;
      times = stop_kernel_times();
    }
    py::list result;
    for (const KernelTime& time : times)
      result.append(py::make_tuple(time.name, time.begin, time.end));
    return result;
  });
  m.def(
      "build_kernel", [](const std::string& name, int device) { (void)kernel(name, device); },
      py::arg("name"), py::arg("device"), py::call_guard<py::gil_scoped_release>());
  m.def("load_stats", [] {
    const LoadStats stats = load_stats();
    py::dict result;
    result["translated"] = stats.translated;
    result["compiled"] = stats.compiled;
    result["from_cache"] = stats.from_cache;
    result["cache_errors"] = stats.cache_errors;
    return result;
  });
}

}  // namespace ipex::xpu
