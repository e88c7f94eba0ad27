// SPDX-License-Identifier: Apache-2.0
// Steps of torch.optim with fused=True on the kernels of optim.sycl.cpp.
#include <ATen/Functions.h>

#include <cmath>

#include "device/core/kernel_ops.h"

namespace ipex::xpu {
namespace {

using at::Tensor;
using at::TensorList;
using std::optional;

// float32, in one order.
bool fits(const Tensor& param, const Tensor& tensor) {
  return tensor.scalar_type() == at::kFloat && tensor.sizes() == param.sizes() &&
         tensor.strides() == param.strides() && tensor.is_non_overlapping_and_dense();
}
bool fits(TensorList params, TensorList tensors) {
  if (tensors.size() != params.size()) return false;
  for (std::size_t i = 0; i < params.size(); ++i) {
    if (!fits(params[i], tensors[i])) return false;
  }
  return true;
}
bool is_float_number(const Tensor& tensor) {
  return tensor.scalar_type() == at::kFloat && tensor.numel() == 1;
}
bool is_float_number(const optional<Tensor>& tensor) {
  return !given(tensor) || is_float_number(*tensor);
}

struct Adam {
  double lr, beta1, beta2, decay, eps;
  bool decoupled, maximize;
};
// `lr` and `step` are read from the device where they are tensors.
void adam(const Tensor& w, const Tensor& grad, const Tensor& m, const Tensor& v, const Tensor& top,
          const Tensor& step, const Tensor& lr, const Adam& a, const optional<Tensor>& scale,
          const optional<Tensor>& infinite) {
  launch_for(w, "adam", w.numel(), out_data(w), out_data(grad), out_data(m), out_data(v),
             out_data(top), static_cast<unsigned long>(w.numel()), data(step), data(lr),
             static_cast<float>(a.lr), static_cast<float>(a.beta1), static_cast<float>(a.beta2),
             static_cast<float>(1 - a.beta1), static_cast<float>(1 - a.beta2),
             static_cast<float>(std::log(a.beta1)), static_cast<float>(std::log(a.beta2)),
             static_cast<float>(a.decay), static_cast<float>(a.eps), a.decoupled ? 1 : 0,
             a.maximize ? 1 : 0, data(scale), data(infinite));
}

bool fused_adam(TensorList params, TensorList grads, TensorList means, TensorList squares,
                TensorList tops, TensorList steps, const Tensor& lr, const Adam& a, bool amsgrad,
                const optional<Tensor>& scale, const optional<Tensor>& infinite) {
  if (!fits(params, params) || !fits(params, grads) || !fits(params, means) ||
      !fits(params, squares) || (amsgrad && !fits(params, tops)) || steps.size() != params.size() ||
      !is_float_number(scale) || !is_float_number(infinite) ||
      (lr.defined() && !is_float_number(lr)))
    return false;
  for (const Tensor& step : steps) {
    if (!is_float_number(step)) return false;
  }
  for (std::size_t i = 0; i < params.size(); ++i) {
    adam(params[i], grads[i], means[i], squares[i], amsgrad ? tops[i] : Tensor(), steps[i], lr, a,
         scale, infinite);
  }
  return true;
}
template <bool decoupled>
bool fused_adam_(TensorList params, TensorList grads, TensorList means, TensorList squares,
                 TensorList tops, TensorList steps, double lr, double beta1, double beta2,
                 double decay, double eps, bool amsgrad, bool maximize,
                 const optional<Tensor>& scale, const optional<Tensor>& infinite) {
  return fused_adam(params, grads, means, squares, tops, steps, {},
                    {lr, beta1, beta2, decay, eps, decoupled, maximize}, amsgrad, scale, infinite);
}
template <bool decoupled>
bool fused_adam_lr_(TensorList params, TensorList grads, TensorList means, TensorList squares,
                    TensorList tops, TensorList steps, const Tensor& lr, double beta1, double beta2,
                    double decay, double eps, bool amsgrad, bool maximize,
                    const optional<Tensor>& scale, const optional<Tensor>& infinite) {
  return fused_adam(params, grads, means, squares, tops, steps, lr,
                    {0, beta1, beta2, decay, eps, decoupled, maximize}, amsgrad, scale, infinite);
}

struct Sgd {
  double lr, decay, momentum, dampening;
  bool nesterov, first, maximize;
};
void sgd(const Tensor& w, const Tensor& grad, const Tensor& buffer, const Tensor& lr, const Sgd& s,
         const optional<Tensor>& scale, const optional<Tensor>& infinite) {
  launch_for(w, "sgd", w.numel(), out_data(w), out_data(grad), out_data(buffer),
             static_cast<unsigned long>(w.numel()), data(lr), static_cast<float>(s.lr),
             static_cast<float>(s.decay), static_cast<float>(s.momentum),
             static_cast<float>(1 - s.dampening), s.nesterov ? 1 : 0, s.first ? 1 : 0,
             s.maximize ? 1 : 0, data(scale), data(infinite));
}

bool fused_sgd(TensorList params, TensorList grads, TensorList buffers, const Tensor& lr,
               const Sgd& s, const optional<Tensor>& scale, const optional<Tensor>& infinite) {
  if (!fits(params, params) || !fits(params, grads) ||
      (!buffers.empty() && !fits(params, buffers)) || !is_float_number(scale) ||
      !is_float_number(infinite) || (lr.defined() && !is_float_number(lr)))
    return false;
  for (std::size_t i = 0; i < params.size(); ++i)
    sgd(params[i], grads[i], buffers.empty() ? Tensor() : buffers[i], lr, s, scale, infinite);
  return true;
}
bool fused_sgd_(TensorList params, TensorList grads, TensorList buffers, double decay,
                double momentum, double lr, double dampening, bool nesterov, bool maximize,
                bool first, const optional<Tensor>& scale, const optional<Tensor>& infinite) {
  return fused_sgd(params, grads, buffers, {},
                   {lr, decay, momentum, dampening, nesterov, first, maximize}, scale, infinite);
}
bool fused_sgd_lr_(TensorList params, TensorList grads, TensorList buffers, double decay,
                   double momentum, const Tensor& lr, double dampening, bool nesterov,
                   bool maximize, bool first, const optional<Tensor>& scale,
                   const optional<Tensor>& infinite) {
  return fused_sgd(params, grads, buffers, lr,
                   {0, decay, momentum, dampening, nesterov, first, maximize}, scale, infinite);
}
}  // namespace

void register_optim() {
  static torch::Library aten(torch::Library::IMPL, "aten", c10::DispatchKey::XPU, __FILE__,
                             __LINE__);
  add_kernel<&fused_adam_<false>>(aten, "_fused_adam_");
  add_kernel<&fused_adam_<true>>(aten, "_fused_adamw_");
  add_kernel<&fused_adam_lr_<false>>(aten, "_fused_adam_.tensor_lr");
  add_kernel<&fused_adam_lr_<true>>(aten, "_fused_adamw_.tensor_lr");
  add_kernel<&fused_sgd_>(aten, "_fused_sgd_");
  add_kernel<&fused_sgd_lr_>(aten, "_fused_sgd_.tensor_lr");
}

}  // namespace ipex::xpu
