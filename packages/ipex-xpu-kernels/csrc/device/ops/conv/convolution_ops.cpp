// SPDX-License-Identifier: Apache-2.0
#include "device/ops/conv/convolution_ops.h"

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>

#include <algorithm>
#include <vector>

#include "core/core.h"
#include "device/core/kernel_ops.h"
#include "device/core/runtime.h"
#include "device/onednn/onednn_library.h"
#include "device/onednn/onednn_ops.h"

namespace ipex::xpu {
namespace {

using at::IntArrayRef;
using at::Tensor;
using Triple = std::array<int, 3>;

// Columns of one launch: batches are cut to that many bytes.
constexpr std::int64_t kColumnBytes = std::int64_t{1} << 28;

// Numbers of up to three spatial dimensions, the missing first ones filled up.
Triple triple(IntArrayRef values, std::int64_t dims, int fill) {
  Triple result{fill, fill, fill};
  for (std::int64_t d = 0; d < dims; ++d) {
    const auto from = values.size() == 1 ? 0 : static_cast<std::size_t>(d);
    result[static_cast<std::size_t>(3 - dims + d)] = static_cast<int>(values[from]);
  }
  return result;
}

struct Geometry {
  Triple size, out, kernel, stride, pad, step;
  Geometry(IntArrayRef input, IntArrayRef output, IntArrayRef weight, const Convolution& conv) {
    const auto dims = static_cast<std::int64_t>(input.size()) - 2;
    size = triple(input.slice(2), dims, 1);
    out = triple(output.slice(2), dims, 1);
    kernel = triple(weight.slice(2), dims, 1);
    stride = triple(conv.stride, dims, 1);
    pad = triple(conv.padding, dims, 0);
    step = triple(conv.dilation, dims, 1);
  }
  std::int64_t positions() const { return product(out); }
  std::int64_t taps() const { return product(kernel); }
  static std::int64_t product(const Triple& t) { return std::int64_t{t[0]} * t[1] * t[2]; }
};

// Whether the kernels of this package may be used, where oneDNN has nothing.
bool own_kernels(const Tensor& x) {
  return use_kernel(static_cast<c10::DeviceIndex>(x.get_device()), KernelSpeed::Slower);
}

// A result that run(result) has made with oneDNN, which on a CPU device was not slower than the
// host's in any convolution measured; undefined if it has none.
template <typename F>
Tensor by_onednn(const Tensor& like, IntArrayRef sizes, at::MemoryFormat format, F&& run) {
  if (onednn::library() == nullptr) return {};
  Tensor result = at::empty(sizes, like.options().memory_format(format));
  return run(result) ? result : Tensor();
}

std::string name_for(const char* kernel, const Tensor& x) {
  return std::string(kernel) + '<' + *kernel_dtype(x.scalar_type()) + '>';
}

// Groups of so few channels are not for products of matrices.
constexpr std::int64_t kFewChannels = 4;

// Strides of a batch of images, 0 for missing dimensions of space: n, c, z, y, x.
std::array<std::int64_t, 5> strides_of(const Tensor& x) {
  std::array<std::int64_t, 5> result{x.stride(0), x.stride(1), 0, 0, 0};
  for (std::int64_t d = 2; d < x.dim(); ++d)
    result[static_cast<std::size_t>(5 - x.dim() + d)] = x.stride(d);
  return result;
}

// A convolution of groups, or its gradient, from `x` to `y`, which is contiguous.
void convolve_groups(const char* kernel, const Tensor& x, const Tensor& weight, const Tensor& y,
                     const Triple& y_size, const Geometry& g, std::int64_t group_in,
                     std::int64_t group_out) {
  const Tensor w = weight.contiguous();
  const auto s = strides_of(x);
  const std::int64_t plane = std::int64_t{y_size[1]} * y_size[2];
  launch_columns(x, name_for(kernel, x), y.numel() / plane, plane, x.const_data_ptr(),
                 w.const_data_ptr(), y.mutable_data_ptr(), y.size(1), group_in, group_out, s[0],
                 s[1], s[2], s[3], s[4], g.size[0], g.size[1], g.size[2], g.out[0], g.out[1],
                 g.out[2], g.kernel[0], g.kernel[1], g.kernel[2], g.stride[0], g.stride[1],
                 g.stride[2], g.pad[0], g.pad[1], g.pad[2], g.step[0], g.step[1], g.step[2]);
}

// [C * taps, N, positions]
Tensor columns_of(const Tensor& x, const Geometry& g) {
  const std::int64_t n = x.size(0);
  const Tensor columns = at::empty({x.size(1) * g.taps(), n, g.positions()}, x.options());
  const auto s = strides_of(x);
  const std::int64_t plane = std::int64_t{g.out[1]} * g.out[2];
  launch_columns(x, name_for("spread_columns", x), columns.numel() / plane, plane,
                 x.const_data_ptr(), columns.mutable_data_ptr(), n, s[0], s[1], s[2], s[3], s[4],
                 g.size[0], g.size[1], g.size[2], g.out[0], g.out[1], g.out[2], g.kernel[0],
                 g.kernel[1], g.kernel[2], g.stride[0], g.stride[1], g.stride[2], g.pad[0],
                 g.pad[1], g.pad[2], g.step[0], g.step[1], g.step[2]);
  return columns;
}

// Calls f(first, count) for parts of a batch whose columns are not too large.
template <typename F>
void for_parts(std::int64_t batch, std::int64_t bytes_each, F&& f) {
  const std::int64_t part = std::clamp<std::int64_t>(
      kColumnBytes / std::max<std::int64_t>(bytes_each, 1), 1, std::min<std::int64_t>(batch, 4096));
  for (std::int64_t first = 0; first < batch; first += part)
    f(first, std::min(part, batch - first));
}

// out[n] = a @ b[:, n] for [rows, n, positions], or the transpose of what is wanted.
void multiply(const Tensor& out, const Tensor& a, const Tensor& b) {
  matmul_kernel(out, a, b, nullptr, 0.f, 1.f);
}

std::vector<std::int64_t> output_sizes(const Tensor& input, const Tensor& weight,
                                       const Convolution& conv) {
  std::vector<std::int64_t> sizes{input.size(0), weight.size(0)};
  const auto at = [](IntArrayRef v, std::int64_t d) {
    return v[v.size() == 1 ? 0 : static_cast<std::size_t>(d)];
  };
  for (std::int64_t d = 0; d + 2 < input.dim(); ++d) {
    sizes.push_back((input.size(d + 2) + 2 * at(conv.padding, d) -
                     at(conv.dilation, d) * (weight.size(d + 2) - 1) - 1) /
                        at(conv.stride, d) +
                    1);
  }
  return sizes;
}

}  // namespace

bool convolution_supported(const Tensor& input, const Tensor& weight) {
  return input.is_xpu() && weight.is_xpu() && input.get_device() == weight.get_device() &&
         input.scalar_type() == weight.scalar_type() && kernel_dtype(input.scalar_type()) &&
         input.dim() >= 3 && input.dim() <= 5 && input.numel() != 0 && weight.numel() != 0 &&
         (own_kernels(input) || onednn::library() != nullptr);
}

Tensor convolve(const Tensor& input, const Tensor& weight, const Convolution& conv,
                std::optional<IntArrayRef> wanted) {
  const auto sizes = wanted ? wanted->vec() : output_sizes(input, weight, conv);
  if (const Tensor fast = by_onednn(input, sizes, input.suggest_memory_format(),
                                    [&](const Tensor& result) {
                                      return onednn_convolution(ConvolutionResult::Output, input,
                                                                weight, result, conv);
                                    });
      fast.defined())
    return fast;
  if (!own_kernels(input)) return {};
  const Geometry g(input.sizes(), sizes, weight.sizes(), conv);
  const Tensor out = at::empty(sizes, input.options());
  const Tensor flat = out.view({sizes[0], sizes[1], g.positions()});
  const std::int64_t group_in = weight.size(1);
  const std::int64_t group_out = sizes[1] / conv.groups;
  if (conv.groups > 1 && group_in <= kFewChannels) {
    convolve_groups("convolve_groups", input, weight, out, g.out, g, group_in, group_out);
    return out;
  }
  const Tensor rows = weight.contiguous().view({sizes[1], -1});
  for_parts(sizes[0], input.size(1) * g.taps() * g.positions() * input.element_size(),
            [&](std::int64_t first, std::int64_t count) {
              const Tensor columns = columns_of(input.narrow(0, first, count), g);
              for (std::int64_t i = 0; i < conv.groups; ++i) {
                const Tensor own = columns.narrow(0, i * group_in * g.taps(), group_in * g.taps());
                const Tensor a = rows.narrow(0, i * group_out, group_out);
                multiply(flat.narrow(0, first, count).narrow(1, i * group_out, group_out),
                         a.unsqueeze(0).expand({count, -1, -1}), own.transpose(0, 1));
              }
            });
  return out;
}

Tensor convolve_input_grad(const Tensor& grad, const Tensor& weight, IntArrayRef sizes,
                           const Convolution& conv) {
  if (const Tensor fast = by_onednn(grad, sizes, grad.suggest_memory_format(),
                                    [&](const Tensor& result) {
                                      return onednn_convolution(ConvolutionResult::InputGradient,
                                                                result, weight, grad, conv);
                                    });
      fast.defined())
    return fast;
  if (!own_kernels(grad)) return {};
  const Geometry g(sizes, grad.sizes(), weight.sizes(), conv);
  const Tensor result = at::empty(sizes, grad.options());
  const Tensor flat = grad.contiguous().view({grad.size(0), grad.size(1), g.positions()});
  const std::int64_t group_in = weight.size(1);
  const std::int64_t group_out = grad.size(1) / conv.groups;
  const std::int64_t channels = sizes[1];
  if (conv.groups > 1 && group_out <= kFewChannels) {
    convolve_groups("convolve_groups_back", grad, weight, result, g.size, g, group_in, group_out);
    return result;
  }
  const Tensor rows = weight.contiguous().view({weight.size(0), -1});
  for_parts(grad.size(0), channels * g.taps() * g.positions() * grad.element_size(),
            [&](std::int64_t first, std::int64_t count) {
              const Tensor columns =
                  at::empty({channels * g.taps(), count, g.positions()}, grad.options());
              for (std::int64_t i = 0; i < conv.groups; ++i) {
                const Tensor own = columns.narrow(0, i * group_in * g.taps(), group_in * g.taps());
                const Tensor a = rows.narrow(0, i * group_out, group_out).t();
                multiply(own.transpose(0, 1), a.unsqueeze(0).expand({count, -1, -1}),
                         flat.narrow(0, first, count).narrow(1, i * group_out, group_out));
              }
              const Tensor part = result.narrow(0, first, count);
              const std::int64_t plane = std::int64_t{g.size[1]} * g.size[2];
              launch_columns(grad, name_for("sum_columns", grad), part.numel() / plane, plane,
                             columns.const_data_ptr(), part.mutable_data_ptr(), count, channels,
                             g.size[0], g.size[1], g.size[2], g.out[0], g.out[1], g.out[2],
                             g.kernel[0], g.kernel[1], g.kernel[2], g.stride[0], g.stride[1],
                             g.stride[2], g.pad[0], g.pad[1], g.pad[2], g.step[0], g.step[1],
                             g.step[2]);
            });
  return result;
}

Tensor convolve_weight_grad(const Tensor& grad, const Tensor& input, IntArrayRef weight_sizes,
                            const Convolution& conv) {
  if (const Tensor fast = by_onednn(grad, weight_sizes, at::MemoryFormat::Contiguous,
                                    [&](const Tensor& result) {
                                      return onednn_convolution(ConvolutionResult::WeightGradient,
                                                                input, result, grad, conv);
                                    });
      fast.defined())
    return fast;
  if (!own_kernels(input)) return {};
  const Geometry g(input.sizes(), grad.sizes(), weight_sizes, conv);
  const std::int64_t outputs = weight_sizes[0];
  const std::int64_t group_in = weight_sizes[1] * g.taps();
  const std::int64_t group_out = outputs / conv.groups;
  const Tensor flat = grad.reshape({grad.size(0), outputs, g.positions()}).transpose(0, 1);
  // Sums over parts of the batch in float32.
  Tensor sum;
  for_parts(grad.size(0), input.size(1) * g.taps() * g.positions() * input.element_size(),
            [&](std::int64_t first, std::int64_t count) {
              const Tensor columns =
                  columns_of(input.narrow(0, first, count), g).view({input.size(1) * g.taps(), -1});
              const Tensor rows = flat.narrow(1, first, count).reshape({outputs, -1});
              const Tensor part = at::empty({outputs, group_in}, grad.options());
              const auto by_group = [&](const Tensor& x, std::int64_t rows_each) {
                return x.view({conv.groups, rows_each, -1});
              };
              multiply(by_group(part, group_out), by_group(rows, group_out),
                       by_group(columns, group_in).mT());
              sum = sum.defined() ? sum + part.to(at::kFloat) : part.to(at::kFloat);
            });
  return sum.to(grad.scalar_type()).view(weight_sizes);
}

}  // namespace ipex::xpu
