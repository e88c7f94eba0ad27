// SPDX-License-Identifier: Apache-2.0
// Ops of torch on kernels of the device, one file per family.
#pragma once

#include <ATen/core/TensorBody.h>
#include <ATen/core/boxing/impl/make_boxed_from_unboxed_functor.h>
#include <c10/core/Device.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/core.h"
#include "device/core/runtime.h"

namespace ipex::xpu {

// What kernels call the dtype; nothing for those that they do not have.
std::optional<std::string> kernel_dtype(at::ScalarType dtype);
// "kernel<first,second>"
std::string kernel_name(const char* kernel, const std::string& first,
                        const std::string& second = {});

// Copies with a kernel of the device; false if no kernel takes these dtypes and shapes.
bool copy_kernel(const at::Tensor& to, const at::Tensor& from);

// Starts a kernel on the current stream of the tensor's device: one work-item for each of `count`
// elements, or one work-group for each of `rows` rows of `columns` elements.
template <typename... Args>
void launch_for(const at::Tensor& tensor, const std::string& name, std::int64_t count,
                Args... args) {
  const auto device = static_cast<c10::DeviceIndex>(tensor.get_device());
  launch_elements(current_queue(device), device, name, static_cast<std::size_t>(count), args...);
}
// The same for kernels of map_elements, whose items may move several elements.
template <typename... Args>
void launch_map(const at::Tensor& tensor, const std::string& name, std::int64_t count,
                Args... args) {
  const std::int64_t bytes = bytes_of_item(static_cast<int>(tensor.get_device()));
  const std::int64_t each = std::max<std::int64_t>(bytes / tensor.element_size(), 1);
  launch_for(tensor, name, (count + each - 1) / each, args...);
}
template <typename... Args>
void launch_rows(const at::Tensor& tensor, const std::string& name, std::int64_t rows,
                 std::int64_t columns, Args... args) {
  if (rows == 0) return;
  const auto device = static_cast<c10::DeviceIndex>(tensor.get_device());
  // On a CPU a group is one vector; more of them only wait for each other. A GPU has whole
  // sub-groups, of which it has reduce_group.
  std::size_t group = device_info(device).is_cpu ? 16 : 32;
  while (!device_info(device).is_cpu && group < 256 &&
         static_cast<std::int64_t>(group) * 4 < columns)
    group *= 2;
  launch<1>(current_queue(device), device, name,
            sycl::range<1>(static_cast<std::size_t>(rows) * group), sycl::range<1>(group), args...);
}

// The same for kernels whose items have several numbers of a row on a GPU, up to `most` bytes of
// them: small groups, as long as they fill the device.
template <typename... Args>
void launch_wide_rows(const at::Tensor& tensor, const std::string& name, std::int64_t rows,
                      std::int64_t columns, std::int64_t most, Args... args) {
  const auto device = static_cast<c10::DeviceIndex>(tensor.get_device());
  if (bytes_of_item(static_cast<int>(device)) == 0)
    return launch_rows(tensor, name, rows, columns, args...);
  if (rows == 0) return;
  const std::int64_t fill = device_info(device).compute_units * std::int64_t{2048};
  std::int64_t group = 256;
  while (group > 32 && group / 2 * most >= columns * tensor.element_size() && rows * group > fill)
    group /= 2;
  launch<1>(current_queue(device), device, name,
            sycl::range<1>(static_cast<std::size_t>(rows * group)),
            sycl::range<1>(static_cast<std::size_t>(group)), args...);
}

// One work-item for each of `columns` elements of each of `rows` rows; kernels test the column.
template <typename... Args>
void launch_columns(const at::Tensor& tensor, const std::string& name, std::int64_t rows,
                    std::int64_t columns, Args... args) {
  if (rows == 0 || columns == 0) return;
  constexpr std::size_t kGroup = 64;
  const std::size_t groups = (static_cast<std::size_t>(columns) + kGroup - 1) / kGroup;
  const auto device = static_cast<c10::DeviceIndex>(tensor.get_device());
  launch<2>(current_queue(device), device, name,
            sycl::range<2>(static_cast<std::size_t>(rows), groups * kGroup),
            sycl::range<2>(1, kGroup), args...);
}

// Whether the items of a device hold the numbers of a joint_matrix as kernels/pairs.h has it, which
// a kernel finds out at the first call for a device.
bool joint_pairs(c10::DeviceIndex device);

// When a kernel is used whose op the host does faster (IPEX_XPU_KERNELS).
enum class KernelMode : std::uint8_t { Auto, Always };
void set_kernel_mode(KernelMode mode);

// How a kernel compares with the host's op on a CPU device, as measured.
// Starting a kernel takes longer than a call of the host, so that many lose on small tensors only.
enum class KernelSpeed : std::uint8_t { NotSlower, SlowerIfSmall, Slower };
inline constexpr std::int64_t kSmall = 16384;  // elements of the largest argument
// Whether an op that has a kernel uses it. A slower one is left to the host, and counted as a
// fallback by the caller, only where the host works on the same memory and may do so.
bool use_kernel(c10::DeviceIndex device, KernelSpeed speed, std::int64_t elements = kSmall);

inline bool given(const std::optional<at::Tensor>& tensor) { return tensor && tensor->defined(); }

// An index of a dimension, with that dimension's size and stride.
struct Indexed {
  at::Tensor index;
  std::int64_t dim;
  std::int64_t size;
  std::int64_t stride;
};
inline constexpr long kNoIndex = std::numeric_limits<long>::min();
// Offsets in elements, like the first index: the sum of index * stride; all indices have one shape
// (index_ops.cpp). Negative ones count from the end with `wrap`; elements of an index equal to
// `skipped` lead nowhere. Raises IndexError, which names the op, where an index is out of bounds. A
// device whose memory the host cannot read leaves the elements of such indices alone, and the next
// op that indexes raises, since waiting would stall the queue.
at::Tensor offsets_of(const char* op, const std::vector<Indexed>& parts, bool wrap,
                      long skipped = kNoIndex);
// The same of one index that an op of ipex calls `argument`: raises RuntimeError.
at::Tensor offsets_of(const char* op, const char* argument, const Indexed& part);

// Sizes as kernels take them.
inline unsigned long ulong(std::int64_t value) { return static_cast<unsigned long>(value); }

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

// The tensors among the arguments, where all are on one device: only then a kernel may look at
// them.
struct Tensors {
  std::optional<c10::DeviceIndex> device;
  std::int64_t largest = 0;  // elements
};
Tensors common_device(const torch::jit::Stack& stack, std::size_t count, bool numbers);
// Keeps only the arguments that the op writes to.
void return_written(const c10::OperatorHandle& op, torch::jit::Stack* stack);

template <typename Function>
struct Unboxed;
template <typename Result, typename... Args>
struct Unboxed<Result (*)(Args...)> {
  // The stack keeps its arguments: the host may need them.
  template <auto function, std::size_t... I>
  static Result call(const torch::jit::Stack& stack, std::index_sequence<I...>) {
    std::array<c10::IValue, sizeof...(Args)> arguments{
        torch::jit::peek(stack, I, sizeof...(Args))...};
    return function(
        c10::impl::ivalue_to_arg<typename c10::impl::decay_if_not_tensor<Args>::type, false>::call(
            arguments[I])...);
  }

  template <auto function, KernelSpeed speed, bool numbers>
  static void kernel_or_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
    constexpr std::size_t count = sizeof...(Args);
    const auto [device, largest] = common_device(*stack, count, numbers);
    if (device && use_kernel(*device, speed, largest)) {
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
  library.impl(name, torch::CppFunction::makeFromBoxedFunction<&detail::Unboxed<
                         decltype(function)>::template kernel_or_host<function, speed, numbers>>());
}

// out = beta * addend + alpha * a @ b for matrices or batches of them of one dtype that kernels
// have and any strides; the shapes are right, and `addend`, which may be null, has the shape of
// `out`. False for a dtype that they do not have.
bool matmul_kernel(const at::Tensor& out, const at::Tensor& a, const at::Tensor& b,
                   const at::Tensor* addend, float beta, float alpha);

void register_elementwise();  // elementwise_ops.cpp
void register_gated();
void register_chain();    // chain_ops.cpp
void register_compare();  // compare_ops.cpp
void register_moving();   // moving_ops.cpp
void register_rows();     // rows_ops.cpp
void register_norms();
void register_reduce();     // reduce_ops.cpp
void register_index();      // index_ops.cpp
void register_rope();       // rope_ops.cpp
void register_optim();      // optim_ops.cpp
void register_random();     // random_ops.cpp
void register_matmul();     // matmul_ops.cpp
void register_attention();  // attention_ops.cpp
void register_cells();      // cells_ops.cpp

}  // namespace ipex::xpu
