// SPDX-License-Identifier: Apache-2.0
// Ops that torch's composites cannot serve for xpu: convolutions, recurrent networks, encoders.
#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/lstm_native.h>
#include <c10/core/GradMode.h>
#include <torch/library.h>

#include <tuple>

#include "device/core/runtime.h"
#include "device/ops/conv/convolution_ops.h"

namespace ipex::xpu {
namespace {

using at::IntArrayRef;
using at::Tensor;
using c10::DeviceIndex;
using c10::SymIntArrayRef;
using std::optional;

DeviceIndex index_of(const Tensor& tensor) { return static_cast<DeviceIndex>(tensor.get_device()); }

optional<Tensor> to_host(const optional<Tensor>& tensor) {
  return tensor ? optional(xpu::to_host(*tensor)) : std::nullopt;
}

using ThreeTensors = std::tuple<Tensor, Tensor, Tensor>;

// Gradients; gradients that were not requested are undefined.
ThreeTensors to_device(const ThreeTensors& host, DeviceIndex device) {
  const auto back = [&](const Tensor& tensor) {
    return tensor.defined() ? xpu::to_device(tensor, device) : tensor;
  };
  return {back(std::get<0>(host)), back(std::get<1>(host)), back(std::get<2>(host))};
}

void check_same_device(const char* op, const Tensor& first,
                       std::initializer_list<const Tensor*> others) {
  for (const Tensor* other : others) {
    TORCH_CHECK(!other->defined() || other->device() == first.device(),
                "Expected all tensors to be on the same device, but found at least two devices, ",
                first.device(), " and ", other->device(), "! (", op, ")");
  }
}

std::vector<std::int64_t> transposed_sizes(const Tensor& input, const Tensor& weight,
                                           const Convolution& conv, IntArrayRef output_padding) {
  std::vector<std::int64_t> sizes{input.size(0), weight.size(1) * conv.groups};
  const auto at = [](IntArrayRef v, std::int64_t d) {
    return v[v.size() == 1 ? 0 : static_cast<std::size_t>(d)];
  };
  for (std::int64_t d = 0; d + 2 < input.dim(); ++d) {
    sizes.push_back((input.size(d + 2) - 1) * at(conv.stride, d) - 2 * at(conv.padding, d) +
                    at(conv.dilation, d) * (weight.size(d + 2) - 1) + at(output_padding, d) + 1);
  }
  return sizes;
}

// Convolutions: with the kernels, or on the host, in the memory format of the caller. oneDNN takes
// channels-last tensors as they are.
Tensor convolution(const Tensor& input, const Tensor& weight, const optional<Tensor>& bias,
                   SymIntArrayRef stride, SymIntArrayRef padding, SymIntArrayRef dilation,
                   bool transposed, SymIntArrayRef output_padding, c10::SymInt groups) {
  check_same_device("convolution", input, {&weight});
  if (bias) check_same_device("convolution", input, {&*bias});
  const c10::DeviceGuard guard(input.device());
  if (convolution_supported(input, weight)) {
    const Convolution conv{C10_AS_INTARRAYREF_SLOW(stride), C10_AS_INTARRAYREF_SLOW(padding),
                           C10_AS_INTARRAYREF_SLOW(dilation), groups.expect_int()};
    Tensor result =
        transposed ? convolve_input_grad(input, weight,
                                         transposed_sizes(input, weight, conv,
                                                          C10_AS_INTARRAYREF_SLOW(output_padding)),
                                         conv)
                   : convolve(input, weight, conv);
    if (result.defined()) {
      if (bias && bias->defined()) {
        std::vector<std::int64_t> sizes(static_cast<std::size_t>(input.dim()), 1);
        sizes[1] = -1;
        result.add_(bias->view(sizes));
      }
      return result.contiguous(input.suggest_memory_format());
    }
  }
  count_fallback("aten::convolution_overrideable");
  const Tensor result =
      at::convolution_symint(xpu::to_host(input), xpu::to_host(weight), to_host(bias), stride,
                             padding, dilation, transposed, output_padding, std::move(groups));
  return xpu::to_device(result, index_of(input));
}

ThreeTensors convolution_backward(const Tensor& grad_output, const Tensor& input,
                                  const Tensor& weight, SymIntArrayRef stride,
                                  SymIntArrayRef padding, SymIntArrayRef dilation, bool transposed,
                                  SymIntArrayRef output_padding, c10::SymInt groups,
                                  std::array<bool, 3> output_mask) {
  check_same_device("convolution_backward", input, {&weight, &grad_output});
  const c10::DeviceGuard guard(input.device());
  if (convolution_supported(input, weight) && convolution_supported(grad_output, weight)) {
    const Convolution conv{C10_AS_INTARRAYREF_SLOW(stride), C10_AS_INTARRAYREF_SLOW(padding),
                           C10_AS_INTARRAYREF_SLOW(dilation), groups.expect_int()};
    ThreeTensors result;
    auto& [grad_input, grad_weight, grad_bias] = result;
    if (output_mask[0]) {
      grad_input = transposed ? convolve(grad_output, weight, conv, input.sizes())
                              : convolve_input_grad(grad_output, weight, input.sizes(), conv);
    }
    const bool done = grad_input.defined() || !output_mask[0];
    if (done && output_mask[1]) {
      grad_weight = transposed ? convolve_weight_grad(input, grad_output, weight.sizes(), conv)
                               : convolve_weight_grad(grad_output, input, weight.sizes(), conv);
    }
    if (done && (grad_weight.defined() || !output_mask[1])) {
      if (output_mask[0]) grad_input = grad_input.contiguous(input.suggest_memory_format());
      if (output_mask[2]) grad_bias = grad_output.transpose(0, 1).flatten(1).sum(1);
      return result;
    }
  }
  count_fallback("aten::convolution_backward_overrideable");
  const std::vector<std::int64_t> bias_sizes{grad_output.size(1)};
  return to_device(at::convolution_backward_symint(
                       xpu::to_host(grad_output), xpu::to_host(input), xpu::to_host(weight),
                       c10::fromIntArrayRefSlow(bias_sizes), stride, padding, dilation, transposed,
                       output_padding, std::move(groups), output_mask),
                   index_of(input));
}

// autograd hands over the gradient as it is for this device, and in the memory format of the input
// for all others; the kernel of the host takes the latter for granted.
ThreeTensors group_norm_backward(const Tensor& grad, const Tensor& input, const Tensor& mean,
                                 const Tensor& rstd, const optional<Tensor>& weight, c10::SymInt n,
                                 c10::SymInt c, c10::SymInt hxw, std::int64_t group,
                                 std::array<bool, 3> output_mask) {
  count_fallback("aten::native_group_norm_backward");
  const c10::DeviceGuard guard(input.device());
  const auto format = input.suggest_memory_format();
  return to_device(
      at::native_group_norm_backward_symint(
          xpu::to_host(grad).contiguous(format), xpu::to_host(input).contiguous(format),
          xpu::to_host(mean), xpu::to_host(rstd), to_host(weight), std::move(n), std::move(c),
          std::move(hxw), group, output_mask),
      index_of(input));
}

// Without gradients torch's LSTM asks a table of the device for oneDNN's, in which this torch has
// no place for xpu. It does not ask where gradients are on; nothing is recorded, since no tensor
// wants one.
ThreeTensors lstm(const Tensor& input, at::TensorList hx, at::TensorList params, bool has_biases,
                  std::int64_t num_layers, double dropout, bool train, bool bidirectional,
                  bool batch_first) {
  if (c10::GradMode::is_enabled()) {
    return at::native::lstm(input, hx, params, has_biases, num_layers, dropout, train,
                            bidirectional, batch_first);
  }
  const c10::AutoGradMode on(true);
  auto detached = [](at::TensorList tensors) {
    std::vector<Tensor> result;
    for (const Tensor& tensor : tensors) result.push_back(tensor.detach());
    return result;
  };
  return at::native::lstm(input.detach(), detached(hx), detached(params), has_biases, num_layers,
                          dropout, train, bidirectional, batch_first);
}

// Counts of whole numbers, too, which other devices have and the host has not: models count with
// them how many tokens go to each expert.
Tensor counts_of(const Tensor& x, std::int64_t bins, const at::Scalar& least,
                 const at::Scalar& most) {
  count_fallback("aten::histc");
  const c10::DeviceGuard guard(x.device());
  const bool whole = at::isIntegralType(x.scalar_type(), /*includeBool=*/false);
  const Tensor host = xpu::to_host(x);
  const Tensor counts = at::histc(whole ? host.to(at::kDouble) : host, bins, least, most);
  return xpu::to_device(counts.to(x.scalar_type()), index_of(x));
}
Tensor& counts_out(const Tensor& x, std::int64_t bins, const at::Scalar& least,
                   const at::Scalar& most, Tensor& out) {
  TORCH_CHECK(out.scalar_type() == x.scalar_type(), "histc: out must be ", x.scalar_type(),
              ", got ", out.scalar_type());
  check_same_device("histc", x, {&out});
  return out.resize_({bins}).copy_(counts_of(x, bins, least, most));
}

// Other devices have these for truth values and complex numbers, the host has not.
Tensor trace(const Tensor& x) {
  TORCH_CHECK(x.dim() == 2, "trace: expected a matrix, but got tensor with dim ", x.dim());
  return x.diagonal().sum();
}
Tensor nansum(const Tensor& x, at::OptionalIntArrayRef dim, bool keepdim,
              optional<at::ScalarType> dtype) {
  return at::where(at::isnan(x), at::zeros({}, x.options()), x).sum(dim, keepdim, dtype);
}
Tensor& nansum_out(const Tensor& x, at::OptionalIntArrayRef dim, bool keepdim,
                   optional<at::ScalarType> dtype, Tensor& out) {
  return at::sum_out(out, at::where(at::isnan(x), at::zeros({}, x.options()), x), dim, keepdim,
                     dtype);
}

// torch's encoder asks this before it drops padding, for which it needs nested tensors with strides
// in their sizes. There are none for xpu: nothing is dropped.
bool never_left_aligned(const Tensor&, const Tensor&) { return false; }

}  // namespace

void register_composites() {
  static torch::Library library(torch::Library::IMPL, "aten", c10::DispatchKey::XPU, __FILE__,
                                __LINE__);
  library.impl("convolution_overrideable", TORCH_FN(convolution));
  library.impl("convolution_backward_overrideable", TORCH_FN(convolution_backward));
  library.impl("native_group_norm_backward", TORCH_FN(group_norm_backward));
  library.impl("histc", TORCH_FN(counts_of));
  library.impl("histc.out", TORCH_FN(counts_out));
  library.impl("trace", TORCH_FN(trace));
  library.impl("nansum", TORCH_FN(nansum));
  library.impl("nansum.out", TORCH_FN(nansum_out));
  library.impl("lstm.input", TORCH_FN(lstm));
  library.impl("_nested_tensor_from_mask_left_aligned", TORCH_FN(never_left_aligned));
  // For the key of autograd, too: with a kernel for xpu alone, gradients would be lost.
  static torch::Library autograd(torch::Library::IMPL, "aten", c10::DispatchKey::AutogradXPU,
                                 __FILE__, __LINE__);
  autograd.impl("lstm.input", TORCH_FN(lstm));
}

}  // namespace ipex::xpu
