// SPDX-License-Identifier: Apache-2.0
// Cells of recurrent networks: the fused cells that torch's composites take for this device. The
// kernels of cells.sycl.cpp do the dtypes that kernels have, ops of the device the others.
#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <torch/library.h>

#include <tuple>

#include "core/core.h"
#include "device/core/kernel_ops.h"
#include "device/core/runtime.h"

namespace ipex::xpu {
namespace {

using at::Tensor;
using std::optional;
using ThreeTensors = std::tuple<Tensor, Tensor, Tensor>;

// A contiguous operand, kept alive for the call; null if it was not given.
class Operands {
 public:
  const void* add(const optional<Tensor>& tensor) {
    if (!given(tensor)) return nullptr;
    kept_.push_back(tensor->contiguous());
    return kept_.back().const_data_ptr();
  }

 private:
  std::vector<Tensor> kept_;
};

// All of one dtype that kernels have, all on the device.
bool for_kernel(std::initializer_list<optional<Tensor>> tensors) {
  const Tensor& first = **tensors.begin();
  for (const auto& tensor : tensors) {
    if (given(tensor) && (!tensor->is_xpu() || tensor->scalar_type() != first.scalar_type() ||
                          tensor->get_device() != first.get_device()))
      return false;
  }
  return kernel_dtype(first.scalar_type()) &&
         use_kernel(static_cast<c10::DeviceIndex>(first.get_device()), KernelSpeed::NotSlower);
}

template <typename... Args>
void run(const char* name, const Tensor& state, Args... args) {
  const auto device = static_cast<c10::DeviceIndex>(state.get_device());
  const auto n = static_cast<unsigned long>(state.numel());
  launch_elements(current_queue(device), device,
                  std::string(name) + '<' + *kernel_dtype(state.scalar_type()) + '>', n, args..., n,
                  static_cast<unsigned long>(state.size(-1)));
}

ThreeTensors lstm_cell(const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& cx,
                       const optional<Tensor>& input_bias, const optional<Tensor>& hidden_bias) {
  const c10::DeviceGuard guard(cx.device());
  if (for_kernel({cx, input_gates, hidden_gates, input_bias, hidden_bias}) && cx.dim() == 2) {
    const Tensor hy = at::empty(cx.sizes(), cx.options());
    const Tensor cy = at::empty(cx.sizes(), cx.options());
    const Tensor workspace = at::empty(input_gates.sizes(), cx.options());
    Operands x;
    const void* input = x.add(input_gates);
    const void* hidden = x.add(hidden_gates);
    const void* state = x.add(cx);
    const void* bias = x.add(input_bias);
    run("lstm_cell", cx, input, hidden, state, bias, x.add(hidden_bias), hy.mutable_data_ptr(),
        cy.mutable_data_ptr(), workspace.mutable_data_ptr());
    return {hy, cy, workspace};
  }
  Tensor gates = input_gates + hidden_gates;
  if (given(input_bias)) gates = gates + *input_bias;
  if (given(hidden_bias)) gates = gates + *hidden_bias;
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
  if (!given(grad_hy) && !given(grad_cy)) return {};
  const c10::DeviceGuard guard(cx.device());
  if (for_kernel({cx, cy, workspace, grad_hy, grad_cy}) && cx.dim() == 2) {
    const Tensor grad_gates = at::empty(workspace.sizes(), cx.options());
    const Tensor grad_cx = at::empty(cx.sizes(), cx.options());
    Operands x;
    const void* dh = x.add(grad_hy);
    const void* dc = x.add(grad_cy);
    const void* before = x.add(cx);
    const void* after = x.add(cy);
    run("lstm_cell_backward", cx, dh, dc, before, after, x.add(workspace),
        grad_gates.mutable_data_ptr(), grad_cx.mutable_data_ptr());
    return {grad_gates, grad_cx, has_bias ? grad_gates.sum(0) : Tensor()};
  }
  const auto parts = workspace.chunk(4, 1);
  const Tensor &i = parts[0], &f = parts[1], &g = parts[2], &o = parts[3];
  const Tensor t = cy.tanh();
  const Tensor dh = given(grad_hy) ? *grad_hy : at::zeros_like(cx);
  Tensor dc = dh * o * (1 - t * t);
  if (given(grad_cy)) dc = dc + *grad_cy;
  const Tensor grad_gates = at::cat(
      {dc * g * i * (1 - i), dc * cx * f * (1 - f), dc * i * (1 - g * g), dh * t * o * (1 - o)}, 1);
  return {grad_gates, dc * f, has_bias ? grad_gates.sum(0) : Tensor()};
}

std::tuple<Tensor, Tensor> gru_cell(const Tensor& input_gates, const Tensor& hidden_gates,
                                    const Tensor& hx, const optional<Tensor>& input_bias,
                                    const optional<Tensor>& hidden_bias) {
  const c10::DeviceGuard guard(hx.device());
  if (for_kernel({hx, input_gates, hidden_gates, input_bias, hidden_bias}) && hx.dim() == 2) {
    const Tensor hy = at::empty(hx.sizes(), hx.options());
    const Tensor workspace = at::empty({hx.size(0), 5 * hx.size(1)}, hx.options());
    Operands x;
    const void* input = x.add(input_gates);
    const void* hidden = x.add(hidden_gates);
    const void* state = x.add(hx);
    const void* bias = x.add(input_bias);
    run("gru_cell", hx, input, hidden, state, bias, x.add(hidden_bias), hy.mutable_data_ptr(),
        workspace.mutable_data_ptr());
    return {hy, workspace};
  }
  const auto in = (given(input_bias) ? input_gates + *input_bias : input_gates).chunk(3, 1);
  const auto hidden = (given(hidden_bias) ? hidden_gates + *hidden_bias : hidden_gates).chunk(3, 1);
  const Tensor r = (in[0] + hidden[0]).sigmoid();
  const Tensor z = (in[1] + hidden[1]).sigmoid();
  const Tensor n = (in[2] + r * hidden[2]).tanh();
  return {n + z * (hx - n), at::cat({r, z, n, hx, hidden[2]}, 1)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gru_cell_backward(const Tensor& grad_hy,
                                                                     const Tensor& workspace,
                                                                     bool has_bias) {
  const c10::DeviceGuard guard(grad_hy.device());
  Tensor grad_input, grad_hidden, grad_hx;
  if (for_kernel({grad_hy, workspace}) && grad_hy.dim() == 2) {
    const auto options = grad_hy.options();
    grad_input = at::empty({grad_hy.size(0), 3 * grad_hy.size(1)}, options);
    grad_hidden = at::empty(grad_input.sizes(), options);
    grad_hx = at::empty(grad_hy.sizes(), options);
    Operands x;
    const void* grad = x.add(grad_hy);
    run("gru_cell_backward", grad_hy, grad, x.add(workspace), grad_input.mutable_data_ptr(),
        grad_hidden.mutable_data_ptr(), grad_hx.mutable_data_ptr());
  } else {
    const auto parts = workspace.chunk(5, 1);
    const Tensor &r = parts[0], &z = parts[1], &n = parts[2], &hx = parts[3], &hn = parts[4];
    const Tensor dz = grad_hy * (hx - n) * z * (1 - z);
    const Tensor dn = grad_hy * (1 - z) * (1 - n * n);
    const Tensor dr = dn * hn * r * (1 - r);
    grad_input = at::cat({dr, dz, dn}, 1);
    grad_hidden = at::cat({dr, dz, dn * r}, 1);
    grad_hx = grad_hy * z;
  }
  return {grad_input, grad_hidden, grad_hx, has_bias ? grad_input.sum(0) : Tensor(),
          has_bias ? grad_hidden.sum(0) : Tensor()};
}

}  // namespace

void register_cells() {
  static torch::Library library(torch::Library::IMPL, "aten", c10::DispatchKey::XPU, __FILE__,
                                __LINE__);
  library.impl("_thnn_fused_lstm_cell", TORCH_FN(lstm_cell));
  library.impl("_thnn_fused_lstm_cell_backward_impl", TORCH_FN(lstm_cell_backward));
  library.impl("_thnn_fused_gru_cell", TORCH_FN(gru_cell));
  library.impl("_thnn_fused_gru_cell_backward", TORCH_FN(gru_cell_backward));
}

}  // namespace ipex::xpu
