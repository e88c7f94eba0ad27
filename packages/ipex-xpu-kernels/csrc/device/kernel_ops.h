// SPDX-License-Identifier: Apache-2.0
// Ops of torch on kernels of the device, one file per family.
#pragma once

#include <ATen/core/TensorBody.h>
#include <ATen/core/boxing/impl/make_boxed_from_unboxed_functor.h>
#include <c10/core/Device.h>
#include <torch/library.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "core/core.h"
#include "runtime.h"

namespace ipex::xpu {

// What kernels call the dtype; nothing for those that they do not have.
std::optional<std::string> kernel_dtype(at::ScalarType dtype);
// "kernel<first,second>"
std::string kernel_name(const char* kernel, const std::string& first,
                        const std::string& second = {});

// Copies with a kernel of the device; false if there is none for these dtypes and shapes.
bool copy_kernel(const at::Tensor& to, const at::Tensor& from);

// Starts a kernel on the current stream of the tensor's device: one work-item for each of `count`
// elements, or one work-group for each of `rows` rows of `columns` elements.
template <typename... Args>
void launch_for(const at::Tensor& tensor, const std::string& name, std::int64_t count,
                Args... args) {
  const auto device = static_cast<c10::DeviceIndex>(tensor.get_device());
  launch_elements(current_queue(device), device, name, static_cast<std::size_t>(count), args...);
}
template <typename... Args>
void launch_rows(const at::Tensor& tensor, const std::string& name, std::int64_t rows,
                 std::int64_t columns, Args... args) {
  if (rows == 0) return;
  std::size_t group = 16;
  while (group < 256 && static_cast<std::int64_t>(group) * 4 < columns) group *= 2;
  const char* e = getenv("WG"); if (e) group = atoi(e);
  const auto device = static_cast<c10::DeviceIndex>(tensor.get_device());
  launch<1>(current_queue(device), device, name,
            sycl::range<1>(static_cast<std::size_t>(rows) * group), sycl::range<1>(group),
            args...);
}

// When a kernel is used whose op the host does faster (IPEX_XPU_KERNELS).
enum class KernelMode : std::uint8_t { Auto, Always };
void set_kernel_mode(KernelMode mode);

// How a kernel compares with the host's op on a CPU device, as measured.
enum class KernelSpeed : std::uint8_t { NotSlower, Slower };
// Whether an op that has a kernel uses it. A slower one is left to the host, and counted as a
// fallback by the caller, only where the host works on the same memory and may do so.
bool use_kernel(c10::DeviceIndex device, KernelSpeed speed);

// Pointers for kernels; null for a tensor that there is not.
inline const void* data(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.const_data_ptr() : nullptr;
}
inline const void* data(const std::optional<at::Tensor>& tensor) {
  return tensor ? data(*tensor) : nullptr;
}
inline void* out_data(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.mutable_data_ptr() : nullptr;
}

namespace detail {

// Whether a kernel may look at the arguments: all tensors are on one device. The index of that
// device, or nothing.
std::optional<c10::DeviceIndex> common_device(const torch::jit::Stack& stack, std::size_t count,
                                              bool numbers);
// Replaces the arguments by those of them that the op writes to.
void return_written(const c10::OperatorHandle& op, torch::jit::Stack* stack);

template <typename Function>
struct Unboxed;
template <typename Result, typename... Args>
struct Unboxed<Result (*)(Args...)> {
  template <auto function, std::size_t... I>
  static Result call(torch::jit::Stack& stack, std::index_sequence<I...>) {
    return function(
        c10::impl::ivalue_to_arg<typename c10::impl::decay_if_not_tensor<Args>::type, false>::call(
            torch::jit::peek(stack, I, sizeof...(Args)))...);
  }

  template <auto function, KernelSpeed speed, bool numbers>
  static void kernel_or_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
    constexpr std::size_t count = sizeof...(Args);
    const auto device = common_device(*stack, count, numbers);
    if (device && use_kernel(*device, speed)) {
      const c10::DeviceGuard guard(c10::Device(c10::kXPU, *device));
      auto result = call<function>(*stack, std::make_index_sequence<count>());
      if (result) {
        if constexpr (std::is_same_v<Result, bool>) {
          return_written(op, stack);
        } else {
          torch::jit::drop(*stack, count);
          c10::impl::push_outputs<typename Result::value_type, false>::call(*std::move(result),
                                                                            stack);
        }
        return;
      }
    }
    fallback(op, stack);
  }
};

}  // namespace detail

// Registers `function` for an op. It has the op's arguments and returns what the op returns, or
// true where it has written to arguments of the op (out=, in place); nothing, or false, for
// arguments that it has no kernel for: the host then runs the op. `numbers`: tensors of the host
// with a single element may be among the arguments.
template <auto function, KernelSpeed speed = KernelSpeed::NotSlower, bool numbers = false>
void add_kernel(torch::Library& library, const char* name) {
  library.impl(name,
               torch::CppFunction::makeFromBoxedFunction<
                   &detail::Unboxed<decltype(function)>::template kernel_or_host<function, speed, numbers>>());
}

void register_elementwise();  // elementwise_ops.cpp
void register_rows();         // rows_ops.cpp

}  // namespace ipex::xpu
