// SPDX-License-Identifier: Apache-2.0
// Registers the device; for a program without Python also what the Python files of the package do
// otherwise.
#include <dlfcn.h>

#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <stdexcept>
#include <string>
#include <string_view>

#include "core/core.h"
#include "device/core/kernel_ops.h"
#include "device/core/runtime.h"
#include "device/onednn/onednn_library.h"
#include "include/ipex/xpu/device.h"

namespace ipex::xpu {
namespace {

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

bool is_on(const char* name) {
  const std::string value = variable(name);
  return value == "1" || value == "true" || value == "on" || value == "yes";
}

// The folder of this library, beside which the kernels lie.
std::filesystem::path folder() {
  Dl_info info{};
  if (::dladdr(reinterpret_cast<const void*>(&is_on), &info) == 0 || info.dli_fname == nullptr)
    throw std::runtime_error("ipex::xpu::Device: the folder of libipex_xpu.so is not known");
  return std::filesystem::canonical(info.dli_fname).parent_path();
}

std::string cache_folder() {
  if (const char* chosen = std::getenv("IPEX_XPU_CACHE")) {
    const std::string_view value = chosen;
    return value == "0" ? "" : std::string(value);
  }
  const std::string cache = variable("XDG_CACHE_HOME");
  return (cache.empty() ? variable("HOME") + "/.cache" : cache) + "/ipex/xpu";
}

// The OpenCL driver for CPUs of intel-opencl-rt lies in the folder lib of the environment; the
// loader does not look there.
void find_cpu_driver(const std::filesystem::path& package) {
  if (std::getenv("OCL_ICD_FILENAMES") != nullptr) return;
  const auto driver = package / "../../../libintelocl.so";
  std::error_code error;
  const auto found = std::filesystem::canonical(driver, error);
  if (!error) ::setenv("OCL_ICD_FILENAMES", found.c_str(), 1);
}

}  // namespace

void register_device() {
  register_guard();
  start_autograd_threads();  // raises before anything of torch has changed but for the number of
                             // devices
  register_allocator();
  register_fallback();
  register_tensor_ops();
  register_composites();
  register_kernels();
  register_collectives();
  register_hooks();
}

xpu::Device::Device(const std::string& request) {
  static std::atomic<bool> made{false};
  if (made.exchange(true))
    throw std::runtime_error(
        "ipex::xpu::Device: the device must be made once in a process: keep the object in main");
  const auto package = folder();
  const std::string wanted = request.empty() ? variable("IPEX_XPU_DEVICE") : request;
  if (wanted.rfind("cpu", 0) == 0 || wanted == "auto") find_cpu_driver(package);
  count_ = initialize(wanted);
  if (count_ == 0)
    throw std::runtime_error("ipex::xpu::Device: there is no device: " + why_no_device() +
                             "; ask for the CPU by ipex::xpu::Device(\"cpu\")");
  const std::string fallbacks = variable("IPEX_XPU_FALLBACK");
  set_fallback_mode(fallbacks == "error"  ? FallbackMode::Error
                    : fallbacks == "warn" ? FallbackMode::WarnOnce
                                          : FallbackMode::Silent);
  set_kernel_mode(variable("IPEX_XPU_KERNELS") == "always" ? KernelMode::Always : KernelMode::Auto);
  onednn::set_mode(onednn::Mode::Off);
  set_zero_copy(variable("IPEX_XPU_ZERO_COPY") != "0");
  const std::string collectives = variable("IPEX_XPU_COLLECTIVES");
  set_collective_mode(collectives == "host"     ? CollectiveMode::Host
                      : collectives == "direct" ? CollectiveMode::Direct
                                                : CollectiveMode::Auto);
  set_kernel_library((package / "kernels").string());
  set_kernels_from_source(is_on("IPEX_XPU_SOURCE"));
  set_cache_directory(cache_folder());
  register_device();
  register_ipex_kernels();
}

xpu::Device::~Device() {
  stop_collectives();
  stop_autograd_threads();
  shutdown();
}

}  // namespace ipex::xpu
