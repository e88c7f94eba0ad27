// SPDX-License-Identifier: Apache-2.0
// Pooling of images on the kernels of pooling.sycl.cpp. What they do not have, and wrong arguments,
// go to the host, whose messages are torch's.
#include "device/ops/conv/pooling_ops.h"

#include <ATen/Functions.h>
#include <ATen/native/Pool.h>

#include "device/core/kernel_ops.h"

namespace ipex::xpu {
namespace {

using at::IntArrayRef;
using at::Tensor;
using std::optional;
using Pair = std::array<int, 2>;

// On the CPU device 1.3 to 1.9 of the host's rate for the forward pass of channels-first images,
// 0.1 to 0.7 for all else.
constexpr KernelSpeed kPoolingSpeed = KernelSpeed::Slower;
constexpr std::int64_t kMaxElements = std::numeric_limits<std::int32_t>::max();

struct Pooling {
  Pair kernel{0, 0}, stride{1, 1}, pad{0, 0}, step{1, 1};
  int divisor = 0;
  bool include_pad = false;

  Pooling() = default;
  Pooling(IntArrayRef kernel_, IntArrayRef stride_, IntArrayRef pad_, IntArrayRef step_)
      : kernel(pair(kernel_)),
        stride(stride_.empty() ? kernel : pair(stride_)),
        pad(pair(pad_)),
        step(pair(step_)) {}

  static Pair pair(IntArrayRef values) {
    return {static_cast<int>(values.front()), static_cast<int>(values.back())};
  }
  // Of torch, which checks the arguments.
  std::int64_t outputs(std::int64_t size, std::size_t d, bool ceil_mode) const {
    return at::native::pooling_output_shape<std::int64_t>(size, kernel[d], pad[d], stride[d],
                                                          step[d], ceil_mode);
  }
};

// Images of a dtype that kernels have, with batches or without.
bool takes(const Tensor& x) {
  return (x.dim() == 3 || x.dim() == 4) && x.numel() != 0 && x.numel() < kMaxElements &&
         kernel_dtype(x.scalar_type()).has_value();
}
bool takes(const Pooling& p) {
  return p.kernel[0] > 0 && p.kernel[1] > 0 && p.stride[0] > 0 && p.stride[1] > 0 &&
         p.pad[0] >= 0 && p.pad[1] >= 0 && p.step[0] > 0 && p.step[1] > 0;
}
// Whether `y` is what torch makes of `x`, so that nothing is left to be checked or resized.
bool fits(const Tensor& x, const Tensor& y, const Pooling& p, bool ceil_mode) {
  if (!takes(x) || !takes(p) || y.dim() != x.dim() || y.scalar_type() != x.scalar_type() ||
      y.numel() >= kMaxElements || y.is_alias_of(x))
    return false;
  for (std::int64_t d = 0; d + 2 < x.dim(); ++d) {
    if (y.size(d) != x.size(d)) return false;
  }
  return y.size(-2) == p.outputs(x.size(-2), 0, ceil_mode) &&
         y.size(-1) == p.outputs(x.size(-1), 1, ceil_mode);
}

Tensor batched(const Tensor& x) { return x.dim() == 3 ? x.unsqueeze(0) : x; }
int stride_of(const Tensor& x, std::int64_t d) { return static_cast<int>(x.stride(d)); }
int size_of(const Tensor& x, std::int64_t d) { return static_cast<int>(x.size(d)); }

// Starts a kernel for all elements of `over`, which is x, the input, or y.
template <typename Operands, typename... Rest>
void run(const char* kernel, const Tensor& over, const Tensor& x, const Tensor& y, const Pooling& p,
         Operands operands, Rest... rest) {
  std::apply(
      [&](auto... pointers) {
        launch_columns(over, kernel_name(kernel, *kernel_dtype(x.scalar_type())),
                       over.size(0) * over.size(1), over.size(2) * over.size(3), pointers...,
                       stride_of(x, 0), stride_of(x, 1), stride_of(x, 2), stride_of(x, 3),
                       stride_of(y, 0), stride_of(y, 1), stride_of(y, 2), stride_of(y, 3),
                       size_of(x, 1), size_of(x, 2), size_of(x, 3), size_of(y, 2), size_of(y, 3),
                       p.kernel[0], p.kernel[1], p.stride[0], p.stride[1], p.pad[0], p.pad[1],
                       p.step[0], p.step[1], rest...);
      },
      operands);
}

void max_pool(const Tensor& x, const Tensor& y, const Tensor& indices, const Pooling& p) {
  const Tensor in = batched(x), out = batched(y);
  run("max_pool", out, in, out, p, std::tuple(data(in), out_data(out), out_data(indices)));
}
void max_pool_back(const Tensor& grad, const Tensor& indices, const Tensor& result,
                   const Pooling& p) {
  const Tensor to = batched(result);
  const Tensor where = batched(indices).contiguous();
  const Tensor from = batched(grad).contiguous();
  run("max_pool_back", to, to, from, p, std::tuple(data(from), data(where), out_data(to)));
}

bool max_pool2d_out(const Tensor& x, IntArrayRef kernel, IntArrayRef strides, IntArrayRef padding,
                    IntArrayRef dilation, bool ceil_mode, Tensor& y, Tensor& indices) {
  const Pooling p(kernel, strides, padding, dilation);
  if (!fits(x, y, p, ceil_mode) || indices.scalar_type() != at::kLong ||
      indices.sizes() != y.sizes() || indices.strides() != y.strides())
    return false;
  max_pool(x, y, indices, p);
  return true;
}

bool max_pool2d_backward(const Tensor& grad, const Tensor& x, IntArrayRef kernel,
                         IntArrayRef strides, IntArrayRef padding, IntArrayRef dilation,
                         bool ceil_mode, const Tensor& indices, Tensor& result) {
  const Pooling p(kernel, strides, padding, dilation);
  if (!fits(x, grad, p, ceil_mode) || indices.scalar_type() != at::kLong ||
      indices.sizes() != grad.sizes() || result.sizes() != x.sizes() ||
      result.scalar_type() != grad.scalar_type() || result.is_alias_of(grad))
    return false;
  max_pool_back(grad, indices, result, p);
  return true;
}

optional<Pooling> average(IntArrayRef kernel, IntArrayRef strides, IntArrayRef padding,
                          bool include_pad, optional<std::int64_t> divisor) {
  Pooling p(kernel, strides, padding, {1});
  if (divisor && (*divisor == 0 || *divisor != static_cast<int>(*divisor))) return std::nullopt;
  p.divisor = static_cast<int>(divisor.value_or(0));
  p.include_pad = include_pad;
  return p;
}

void mean_pool(const Tensor& x, const Tensor& y, const Pooling& p) {
  const Tensor in = batched(x), out = batched(y);
  run("mean_pool", out, in, out, p, std::tuple(data(in), out_data(out)), p.divisor,
      static_cast<int>(p.include_pad));
}
void mean_pool_back(const Tensor& grad, const Tensor& result, const Pooling& p) {
  const Tensor to = batched(result), from = batched(grad);
  run("mean_pool_back", to, to, from, p, std::tuple(data(from), out_data(to)), p.divisor,
      static_cast<int>(p.include_pad));
}

bool avg_pool2d_out(const Tensor& x, IntArrayRef kernel, IntArrayRef strides, IntArrayRef padding,
                    bool ceil_mode, bool include_pad, optional<std::int64_t> divisor, Tensor& y) {
  const auto p = average(kernel, strides, padding, include_pad, divisor);
  if (!p || !fits(x, y, *p, ceil_mode)) return false;
  mean_pool(x, y, *p);
  return true;
}

bool avg_pool2d_backward(const Tensor& grad, const Tensor& x, IntArrayRef kernel,
                         IntArrayRef strides, IntArrayRef padding, bool ceil_mode, bool include_pad,
                         optional<std::int64_t> divisor, Tensor& result) {
  const auto p = average(kernel, strides, padding, include_pad, divisor);
  if (!p || !fits(x, grad, *p, ceil_mode) || result.sizes() != x.sizes() ||
      result.scalar_type() != grad.scalar_type() || result.is_alias_of(grad))
    return false;
  mean_pool_back(grad, result, *p);
  return true;
}

// Whether `y` can be windows of the whole of `x`; torch's own checks run on the host.
bool fits_adaptive(const Tensor& x, IntArrayRef sizes, const Tensor& y) {
  return takes(x) && takes(y) && y.dim() == x.dim() && y.scalar_type() == x.scalar_type() &&
         sizes.size() == 2 && y.sizes().slice(0, x.dim() - 2) == x.sizes().slice(0, x.dim() - 2) &&
         y.sizes().slice(x.dim() - 2) == sizes && !y.is_alias_of(x);
}

bool adaptive_max_pool2d_out(const Tensor& x, IntArrayRef sizes, Tensor& y, Tensor& indices) {
  if (!fits_adaptive(x, sizes, y) || indices.scalar_type() != at::kLong ||
      indices.sizes() != y.sizes() || indices.strides() != y.strides())
    return false;
  max_pool(x, y, indices, Pooling());
  return true;
}

bool adaptive_max_pool2d_backward(const Tensor& grad, const Tensor& x, const Tensor& indices,
                                  Tensor& result) {
  if (grad.dim() < 3 || !fits_adaptive(x, grad.sizes().slice(grad.dim() - 2), grad) ||
      indices.scalar_type() != at::kLong || indices.sizes() != grad.sizes() ||
      result.sizes() != x.sizes() || result.scalar_type() != grad.scalar_type() ||
      result.is_alias_of(grad))
    return false;
  max_pool_back(grad, indices, result, Pooling());
  return true;
}

optional<Tensor> adaptive_avg_pool2d(const Tensor& x, IntArrayRef sizes) {
  if (!takes(x) || sizes.size() != 2 || sizes[0] < 1 || sizes[1] < 1) return std::nullopt;
  std::vector<std::int64_t> shape(x.sizes().begin(), x.sizes().end() - 2);
  shape.insert(shape.end(), sizes.begin(), sizes.end());
  const Tensor y = at::empty(shape, x.options().memory_format(x.suggest_memory_format()));
  if (y.numel() >= kMaxElements) return std::nullopt;
  mean_pool(x, y, Pooling());
  return y;
}

optional<Tensor> adaptive_avg_pool2d_backward(const Tensor& grad, const Tensor& x) {
  if (!takes(x) || !takes(grad) || grad.dim() != x.dim() || grad.scalar_type() != x.scalar_type())
    return std::nullopt;
  const Tensor result = at::empty(x.sizes(), x.options().memory_format(x.suggest_memory_format()));
  mean_pool_back(grad, result, Pooling());
  return result;
}

}  // namespace

void register_pooling() {
  static torch::Library aten(torch::Library::IMPL, "aten", c10::DispatchKey::XPU, __FILE__,
                             __LINE__);
  add_kernel<&max_pool2d_out, kPoolingSpeed>(aten, "max_pool2d_with_indices.out");
  add_kernel<&max_pool2d_backward, kPoolingSpeed>(aten,
                                                  "max_pool2d_with_indices_backward.grad_input");
  add_kernel<&avg_pool2d_out, kPoolingSpeed>(aten, "avg_pool2d.out");
  add_kernel<&avg_pool2d_backward, kPoolingSpeed>(aten, "avg_pool2d_backward.grad_input");
  add_kernel<&adaptive_max_pool2d_out, kPoolingSpeed>(aten, "adaptive_max_pool2d.out");
  add_kernel<&adaptive_max_pool2d_backward, kPoolingSpeed>(
      aten, "adaptive_max_pool2d_backward.grad_input");
  add_kernel<&adaptive_avg_pool2d, kPoolingSpeed>(aten, "_adaptive_avg_pool2d");
  add_kernel<&adaptive_avg_pool2d_backward, kPoolingSpeed>(aten, "_adaptive_avg_pool2d_backward");
}

}  // namespace ipex::xpu
