// SPDX-License-Identifier: Apache-2.0
// Ops that torch's composites cannot serve for xpu: convolutions, cells of recurrent networks,
// attention.
#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/lstm_native.h>
#include <c10/core/GradMode.h>
#include <torch/library.h>

#include <tuple>

#include "runtime.h"

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

// Gradients, of which those that nobody asked for are undefined.
ThreeTensors to_device(const ThreeTensors& host, DeviceIndex device) {
  const auto back = [&](const Tensor& tensor) {
    return tensor.defined() ? xpu::to_device(tensor, device) : tensor;
  };
  return {back(std::get<0>(host)), back(std::get<1>(host)), back(std::get<2>(host))};
}

// Convolutions on the host, in the memory format of the caller. oneDNN takes channels-last tensors
// as they are.
Tensor convolution(const Tensor& input, const Tensor& weight, const optional<Tensor>& bias,
                   SymIntArrayRef stride, SymIntArrayRef padding, SymIntArrayRef dilation,
                   bool transposed, SymIntArrayRef output_padding, c10::SymInt groups) {
  count_fallback("aten::convolution_overrideable");
  const c10::DeviceGuard guard(input.device());
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
  count_fallback("aten::convolution_backward_overrideable");
  const c10::DeviceGuard guard(input.device());
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

// Cells. torch's composites take the fused cells for this device, so they are written in ops that
// it has. Gates are in torch's order: input, forget, cell, output; reset, update, new.
ThreeTensors lstm_cell(const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& cx,
                       const optional<Tensor>& input_bias, const optional<Tensor>& hidden_bias) {
  Tensor gates = input_gates + hidden_gates;
  if (input_bias && input_bias->defined()) gates = gates + *input_bias;
  if (hidden_bias && hidden_bias->defined()) gates = gates + *hidden_bias;
  const auto parts = gates.chunk(4, 1);
  const Tensor i = parts[0].sigmoid();
  const Tensor f = parts[1].sigmoid();
  const Tensor g = parts[2].tanh();
  const Tensor o = parts[3].sigmoid();
  const Tensor cy = f * cx + i * g;
  return {o * cy.tanh(), cy, at::cat({i, f, g, o}, 1)};
}

ThreeTensors lstm_cell_backward(const optional<Tensor>& grad_hy, const optional<Tensor>& grad_cy,
                                const Tensor& cx, const Tensor& cy, const Tensor& workspace,
                                bool has_bias) {
  if (!(grad_hy && grad_hy->defined()) && !(grad_cy && grad_cy->defined())) return {};
  const auto parts = workspace.chunk(4, 1);
  const Tensor &i = parts[0], &f = parts[1], &g = parts[2], &o = parts[3];
  const Tensor t = cy.tanh();
  const Tensor dh = grad_hy && grad_hy->defined() ? *grad_hy : at::zeros_like(cx);
  Tensor dc = dh * o * (1 - t * t);
  if (grad_cy && grad_cy->defined()) dc = dc + *grad_cy;
  const Tensor grad_gates = at::cat(
      {dc * g * i * (1 - i), dc * cx * f * (1 - f), dc * i * (1 - g * g), dh * t * o * (1 - o)}, 1);
  return {grad_gates, dc * f, has_bias ? grad_gates.sum(0) : Tensor()};
}

std::tuple<Tensor, Tensor> gru_cell(const Tensor& input_gates, const Tensor& hidden_gates,
                                    const Tensor& hx, const optional<Tensor>& input_bias,
                                    const optional<Tensor>& hidden_bias) {
  const bool biased = input_bias && input_bias->defined();
  const auto in = (biased ? input_gates + *input_bias : input_gates).chunk(3, 1);
  const auto hidden = (biased ? hidden_gates + *hidden_bias : hidden_gates).chunk(3, 1);
  const Tensor r = (in[0] + hidden[0]).sigmoid();
  const Tensor z = (in[1] + hidden[1]).sigmoid();
  const Tensor n = (in[2] + r * hidden[2]).tanh();
  return {n + z * (hx - n), at::cat({r, z, n, hx, hidden[2]}, 1)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gru_cell_backward(const Tensor& grad_hy,
                                                                     const Tensor& workspace,
                                                                     bool has_bias) {
  const auto parts = workspace.chunk(5, 1);
  const Tensor &r = parts[0], &z = parts[1], &n = parts[2], &hx = parts[3], &hn = parts[4];
  const Tensor dz = grad_hy * (hx - n) * z * (1 - z);
  const Tensor dn = grad_hy * (1 - z) * (1 - n * n);
  const Tensor dr = dn * hn * r * (1 - r);
  const Tensor grad_input = at::cat({dr, dz, dn}, 1);
  const Tensor grad_hidden = at::cat({dr, dz, dn * r}, 1);
  return {grad_input, grad_hidden, grad_hy * z, has_bias ? grad_input.sum(0) : Tensor(),
          has_bias ? grad_hidden.sum(0) : Tensor()};
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

// The composite asks a table of the device which kernel to take, in which this torch has no place
// for xpu.
Tensor attention(const Tensor& query, const Tensor& key, const Tensor& value,
                 const optional<Tensor>& mask, double dropout_p, bool is_causal,
                 optional<double> scale, bool enable_gqa) {
  TORCH_CHECK(query.dim() >= 2 && key.dim() >= 2 && value.dim() >= 2,
              "scaled_dot_product_attention: query, key and value must have 2 dimensions or more");
  TORCH_CHECK(
      query.scalar_type() == key.scalar_type() && query.scalar_type() == value.scalar_type(),
      "scaled_dot_product_attention: query, key and value must have one dtype, got ",
      query.scalar_type(), ", ", key.scalar_type(), " and ", value.scalar_type());
  TORCH_CHECK(
      !(mask && mask->defined() && is_causal),
      "_scaled_dot_product_attention: Explicit attn_mask should not be set when is_causal=True");
  optional<Tensor> bias = mask;
  if (mask && mask->defined() && mask->scalar_type() == at::kBool) {
    bias = at::zeros_like(*mask, query.options())
               .masked_fill_(mask->logical_not(), -std::numeric_limits<double>::infinity());
  }
  return std::get<0>(at::_scaled_dot_product_attention_math(
      query, key, value, bias, dropout_p, is_causal, std::nullopt, scale, enable_gqa));
}

}  // namespace

void register_composites() {
  static torch::Library library(torch::Library::IMPL, "aten", c10::DispatchKey::XPU, __FILE__,
                                __LINE__);
  library.impl("convolution_overrideable", TORCH_FN(convolution));
  library.impl("convolution_backward_overrideable", TORCH_FN(convolution_backward));
  library.impl("native_group_norm_backward", TORCH_FN(group_norm_backward));
  library.impl("_thnn_fused_lstm_cell", TORCH_FN(lstm_cell));
  library.impl("_thnn_fused_lstm_cell_backward_impl", TORCH_FN(lstm_cell_backward));
  library.impl("_thnn_fused_gru_cell", TORCH_FN(gru_cell));
  library.impl("_thnn_fused_gru_cell_backward", TORCH_FN(gru_cell_backward));
  library.impl("lstm.input", TORCH_FN(lstm));
  library.impl("scaled_dot_product_attention", TORCH_FN(attention));
  // For the key of autograd, too: with a kernel for xpu alone, gradients would be lost.
  static torch::Library autograd(torch::Library::IMPL, "aten", c10::DispatchKey::AutogradXPU,
                                 __FILE__, __LINE__);
  autograd.impl("lstm.input", TORCH_FN(lstm));
  autograd.impl("scaled_dot_product_attention", TORCH_FN(attention));
}

}  // namespace ipex::xpu
