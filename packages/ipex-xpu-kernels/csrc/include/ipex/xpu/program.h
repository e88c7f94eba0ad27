// SPDX-License-Identifier: Apache-2.0
// SYCL kernels of an extension that torch.xpu.cpp_extension.SyclExtension builds: the compiler of
// the SYCL run-time translates them when the first of them is started, so that no other one is
// needed. For a source swish.sycl of the extension, with kernels as for ipex.xpu.load_inline:
//
//   #include <ipex/xpu/program.h>
//   #include <torch/extension.h>
//
//   IPEX_SYCL_SOURCE(swish)
//
//   at::Tensor swish(const at::Tensor& x) {
//     static ipex::xpu::Program program(ipex_sycl_swish, {"swish<float>"});
//     at::Tensor y = at::empty_like(x);
//     auto& queue = ipex::xpu::current_queue(x.get_device());
//     program.launch(queue, "swish<float>", {x.numel()}, x.const_data_ptr(), y.data_ptr(),
//                    x.numel());
//     return y;
//   }
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <string>
#include <sycl/sycl.hpp>
#include <type_traits>
#include <variant>
#include <vector>

// The text of the source NAME.sycl of this extension.
#define IPEX_SYCL_SOURCE(name) extern "C" const char ipex_sycl_##name[];

namespace ipex::xpu {

// The queue of the current stream of a device, in which torch's ops of this thread run.
sycl::queue& current_queue(signed char device);

class Program {
 public:
  // `kernels` are the names of all kernels that are started, of a template with its arguments;
  // `options` are for the compiler.
  Program(const char* source, std::vector<std::string> kernels,
          std::vector<std::string> options = {});
  ~Program();
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;

  // Starts a kernel for so many work-items in 1 to 3 dimensions, which are rounded up to groups of
  // 256 in the last one: kernels test their index. Arguments are pointers to memory of the device
  // and numbers. Throws std::runtime_error with the text of the compiler, and
  // std::invalid_argument where the arguments do not match the kernel.
  template <typename... Args>
  void launch(sycl::queue& queue, const std::string& kernel,
              std::initializer_list<std::int64_t> items, Args... args) {
    start(queue, kernel, {items.begin(), items.end()}, {argument(args)...});
  }

 private:
  using Argument = std::variant<std::uintptr_t, std::int64_t, double>;
  template <typename T>
  static Argument argument(T value) {
    if constexpr (std::is_pointer_v<T>) return reinterpret_cast<std::uintptr_t>(value);
    if constexpr (std::is_floating_point_v<T>) return static_cast<double>(value);
    if constexpr (std::is_integral_v<T>) return static_cast<std::int64_t>(value);
  }
  void start(sycl::queue& queue, const std::string& kernel, const std::vector<std::int64_t>& items,
             const std::vector<Argument>& arguments);

  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace ipex::xpu
