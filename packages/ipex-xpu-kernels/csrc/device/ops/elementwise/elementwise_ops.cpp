// SPDX-License-Identifier: Apache-2.0
// torch's elementwise ops on the kernels of elementwise.sycl.cpp. What the kernels do not have
// (other dtypes, more than four dimensions, 2^31 elements) goes to the host.
#include <ATen/ExpandUtils.h>
#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <ATen/native/Resize.h>

#include <limits>

#include "device/core/strided.h"

namespace ipex::xpu {

namespace {

using at::Scalar;
using at::Tensor;
using std::optional;

bool on_device(const Tensor& tensor) { return tensor.is_xpu(); }
bool is_number(const Tensor& tensor) { return tensor.is_cpu() && !tensor.is_complex(); }
double value_of(const Tensor& number) { return at::_local_scalar_dense(number).toDouble(); }

// Unary
// -----------------------------------------------------------------------------------------------

bool unary(const char* op, const Tensor& x, const Tensor& out, double p = 0, double q = 0) {
  const auto dtype = kernel_dtype(out.scalar_type());
  if (!dtype || x.scalar_type() != out.scalar_type() || x.numel() >= kMaxElements) return false;
  auto iter = iterator(out, x);
  if (!iter.is_contiguous()) {
    // Of inputs in order: the kernels have no strides.
    const Tensor dense = x.contiguous();
    const Tensor result = at::empty_like(dense);
    if (!unary(op, dense, result, p, q)) return false;
    out.copy_(result);
    return true;
  }
  launch_map(x, kernel_name("unary", op, *dtype), iter.numel(),
             static_cast<const void*>(iter.data_ptr(1)), iter.data_ptr(0),
             static_cast<unsigned long>(iter.numel()), static_cast<float>(p),
             static_cast<float>(q));
  return true;
}

#define UNARY_OUT(function, op) \
  bool function(const Tensor& x, Tensor& out) { return unary(op, x, out); }
UNARY_OUT(sigmoid_out, "sigmoid")
UNARY_OUT(tanh_out, "tanh_")
UNARY_OUT(silu_out, "silu")
UNARY_OUT(exp_out, "exp_")
UNARY_OUT(log_out, "log_")
UNARY_OUT(sqrt_out, "sqrt_")
UNARY_OUT(rsqrt_out, "rsqrt_")
UNARY_OUT(neg_out, "neg")
UNARY_OUT(reciprocal_out, "reciprocal")
UNARY_OUT(sin_out, "sin_")
UNARY_OUT(cos_out, "cos_")
UNARY_OUT(erf_out, "erf_")
#undef UNARY_OUT
// The host has none of truth values.
bool abs_out(const Tensor& x, Tensor& out) {
  if (x.scalar_type() != at::kBool || out.scalar_type() != at::kBool) return unary("abs_", x, out);
  at::native::resize_output(out, x.sizes());
  out.copy_(x);
  return true;
}

optional<Tensor> relu(const Tensor& x) {
  if (!kernel_dtype(x.scalar_type())) return std::nullopt;
  const Tensor out = at::empty_like(x);
  return unary("relu", x, out) ? optional(out) : std::nullopt;
}
bool relu_(Tensor& x) { return unary("relu", x, x); }
bool gelu_out(const Tensor& x, c10::string_view approximate, Tensor& out) {
  return unary(approximate == "tanh" ? "gelu_tanh" : "gelu", x, out);
}
bool leaky_relu_out(const Tensor& x, const Scalar& slope, Tensor& out) {
  return unary("leaky_relu", x, out, slope.toDouble());
}
bool pow_out(const Tensor& x, const Scalar& exponent, Tensor& out) {
  if (exponent.isComplex()) return false;
  const double p = exponent.toDouble();
  if (p == 0.5) return unary("sqrt_", x, out);
  if (p == -1) return unary("reciprocal", x, out);
  return unary(p == 2 ? "square" : "pow_scalar", x, out, p);
}

// Binary
// -----------------------------------------------------------------------------------------------

// `dense`: the kernels have no strides.
bool binary(const char* op, const Tensor& a, const Tensor& b, const Tensor& out, double alpha = 1,
            bool dense = false) {
  const auto type = out.scalar_type();
  const auto dtype = dense ? kernel_dtype(type) : number_dtype(type);
  if (!dtype || a.scalar_type() != type || b.scalar_type() != type || out.numel() >= kMaxElements)
    return false;
  auto iter = iterator(out, a, b);
  if (kernel_dtype(type)) {
    const auto factor = static_cast<float>(alpha);
    if (iter.is_contiguous()) {
      launch_map(out, kernel_name("binary", op, *dtype), iter.numel(), iter.data_ptr(0),
                 static_cast<const void*>(iter.data_ptr(1)),
                 static_cast<const void*>(iter.data_ptr(2)),
                 static_cast<unsigned long>(iter.numel()), factor);
      return true;
    }
    if (dense) {
      if (a.sizes() != b.sizes() || out.sizes() != a.sizes()) return false;
      const Tensor result = at::empty(out.sizes(), out.options());
      if (!binary(op, a.contiguous(), b.contiguous(), result, alpha, true)) return false;
      out.copy_(result);
      return true;
    }
    return launch_strided<3>(iter, kernel_name("binary_strided", op, *dtype), factor);
  }
  return launch_strided<3>(iter, kernel_name("binary_strided", op, *dtype),
                           static_cast<long>(alpha));
}

// A whole number joins as a tensor of one element.
Tensor whole_on_device(const Tensor& number, const Tensor& out) {
  return at::full({}, at::_local_scalar_dense(number), out.options());
}
bool takes_whole(const Tensor& number, const Tensor& out) {
  return (out.scalar_type() == at::kLong || out.scalar_type() == at::kInt) && number.is_cpu() &&
         at::isIntegralType(number.scalar_type(), true);
}

bool add_kernel_of(const Tensor& a, const Tensor& b, const Scalar& alpha, const Tensor& out,
                   bool subtract) {
  if (!on_device(out) || alpha.isComplex() || out.scalar_type() == at::kBool) return false;
  const char* op = subtract ? "sub" : "add";
  const double factor = alpha.toDouble();
  if (takes_whole(b, out)) return binary(op, a, whole_on_device(b, out), out, factor);
  if (takes_whole(a, out)) return binary(op, whole_on_device(a, out), b, out, factor);
  if (is_number(b)) {
    const double value = value_of(b) * factor;
    return unary("add_scalar", a, out, subtract ? -value : value);
  }
  if (is_number(a)) return unary("affine", b, out, subtract ? -factor : factor, value_of(a));
  return on_device(a) && on_device(b) && binary(op, a, b, out, factor);
}
bool add_out(const Tensor& a, const Tensor& b, const Scalar& alpha, Tensor& out) {
  return add_kernel_of(a, b, alpha, out, false);
}
bool sub_out(const Tensor& a, const Tensor& b, const Scalar& alpha, Tensor& out) {
  return add_kernel_of(a, b, alpha, out, true);
}
bool mul_out(const Tensor& a, const Tensor& b, Tensor& out) {
  if (!on_device(out) || out.scalar_type() == at::kBool) return false;
  if (takes_whole(b, out)) return binary("mul", a, whole_on_device(b, out), out);
  if (takes_whole(a, out)) return binary("mul", whole_on_device(a, out), b, out);
  if (is_number(b)) return unary("mul_scalar", a, out, value_of(b));
  if (is_number(a)) return unary("mul_scalar", b, out, value_of(a));
  return on_device(a) && on_device(b) && binary("mul", a, b, out);
}
bool div_out(const Tensor& a, const Tensor& b, Tensor& out) {
  if (!on_device(out) || !kernel_dtype(out.scalar_type())) return false;
  if (is_number(b)) return unary("div_scalar", a, out, value_of(b));
  if (is_number(a)) return unary("scalar_div", b, out, value_of(a));
  return on_device(a) && on_device(b) && binary("div_", a, b, out);
}
bool maximum_out(const Tensor& a, const Tensor& b, Tensor& out) {
  return out.scalar_type() != at::kBool && binary("maximum", a, b, out);
}
bool minimum_out(const Tensor& a, const Tensor& b, Tensor& out) {
  return out.scalar_type() != at::kBool && binary("minimum", a, b, out);
}
bool lerp_out(const Tensor& a, const Tensor& b, const Scalar& weight, Tensor& out) {
  return kernel_dtype(out.scalar_type()) && !weight.isComplex() &&
         binary("lerp", a, b, out, weight.toDouble());
}
bool bits(const char* op, const Tensor& a, const Tensor& b, const Tensor& out) {
  return (out.scalar_type() == at::kBool || out.scalar_type() == at::kLong) &&
         binary(op, a, b, out);
}
bool bitwise_and_out(const Tensor& a, const Tensor& b, Tensor& out) {
  return bits("bitwise_and", a, b, out);
}
bool bitwise_or_out(const Tensor& a, const Tensor& b, Tensor& out) {
  return bits("bitwise_or", a, b, out);
}
bool bitwise_xor_out(const Tensor& a, const Tensor& b, Tensor& out) {
  return bits("bitwise_xor", a, b, out);
}
// For bool the logical ops equal the bitwise ops.
template <bool (*function)(const Tensor&, const Tensor&, Tensor&)>
bool logical(const Tensor& a, const Tensor& b, Tensor& out) {
  return out.scalar_type() == at::kBool && function(a, b, out);
}

// Gradients of activations
// -----------------------------------------------------------------------------------------------

bool sigmoid_backward_out(const Tensor& grad, const Tensor& y, Tensor& out) {
  return binary("sigmoid_backward", grad, y, out, 1, true);
}
bool tanh_backward_out(const Tensor& grad, const Tensor& y, Tensor& out) {
  return binary("tanh_backward", grad, y, out, 1, true);
}
bool silu_backward_out(const Tensor& grad, const Tensor& x, Tensor& out) {
  return binary("silu_backward", grad, x, out, 1, true);
}
optional<Tensor> silu_backward(const Tensor& grad, const Tensor& x) {
  const Tensor out = at::empty_like(x);
  return binary("silu_backward", grad, x, out, 1, true) ? optional(out) : std::nullopt;
}
bool gelu_backward_out(const Tensor& grad, const Tensor& x, c10::string_view approximate,
                       Tensor& out) {
  return binary(approximate == "tanh" ? "gelu_tanh_backward" : "gelu_backward", grad, x, out, 1,
                true);
}
bool threshold_backward_out(const Tensor& grad, const Tensor& x, const Scalar& threshold,
                            Tensor& out) {
  return binary("threshold_backward", grad, x, out, threshold.toDouble(), true);
}

// Gated activations of ipex
// -----------------------------------------------------------------------------------------------

optional<Tensor> gated(const char* op, const Tensor& gate, const Tensor& up) {
  if (gate.sizes() != up.sizes() || !kernel_dtype(gate.scalar_type())) return std::nullopt;
  const Tensor out = at::empty(gate.sizes(), gate.options());
  return binary(op, gate, up, out, 1, true) ? optional(out) : std::nullopt;
}
optional<Tensor> silu_mul(const Tensor& gate, const Tensor& up) {
  return gated("silu_mul", gate, up);
}
optional<Tensor> gelu_mul(const Tensor& gate, const Tensor& up, c10::string_view approximate) {
  if (approximate != "none" && approximate != "tanh") return std::nullopt;
  return gated(approximate == "tanh" ? "gelu_tanh_mul" : "gelu_mul", gate, up);
}
// Gate and up are the halves of the last dimension.
bool has_halves(const Tensor& x) { return x.dim() > 0 && x.size(-1) % 2 == 0; }
optional<Tensor> silu_and_mul(const Tensor& x) {
  if (!has_halves(x)) return std::nullopt;
  const auto halves = x.chunk(2, -1);
  return silu_mul(halves[0], halves[1]);
}
optional<Tensor> gelu_and_mul(const Tensor& x, c10::string_view approximate) {
  if (!has_halves(x)) return std::nullopt;
  const auto halves = x.chunk(2, -1);
  return gelu_mul(halves[0], halves[1], approximate);
}

}  // namespace

void register_elementwise() {
  static torch::Library aten(torch::Library::IMPL, "aten", c10::DispatchKey::XPU, __FILE__,
                             __LINE__);
  constexpr auto kFast = KernelSpeed::NotSlower;
  add_kernel<&sigmoid_out>(aten, "sigmoid.out");
  add_kernel<&tanh_out>(aten, "tanh.out");
  add_kernel<&silu_out>(aten, "silu.out");
  add_kernel<&exp_out>(aten, "exp.out");
  add_kernel<&log_out>(aten, "log.out");
  add_kernel<&sqrt_out>(aten, "sqrt.out");
  add_kernel<&rsqrt_out>(aten, "rsqrt.out");
  add_kernel<&neg_out>(aten, "neg.out");
  add_kernel<&abs_out>(aten, "abs.out");
  add_kernel<&reciprocal_out>(aten, "reciprocal.out");
  add_kernel<&sin_out>(aten, "sin.out");
  add_kernel<&cos_out>(aten, "cos.out");
  add_kernel<&erf_out>(aten, "erf.out");
  add_kernel<&relu>(aten, "relu");
  add_kernel<&relu_>(aten, "relu_");
  add_kernel<&gelu_out>(aten, "gelu.out");
  add_kernel<&leaky_relu_out>(aten, "leaky_relu.out");
  add_kernel<&pow_out>(aten, "pow.Tensor_Scalar_out");
  add_kernel<&add_out, kFast, true>(aten, "add.out");
  add_kernel<&sub_out, kFast, true>(aten, "sub.out");
  add_kernel<&mul_out, kFast, true>(aten, "mul.out");
  add_kernel<&div_out, kFast, true>(aten, "div.out");
  add_kernel<&maximum_out>(aten, "maximum.out");
  add_kernel<&minimum_out>(aten, "minimum.out");
  add_kernel<&lerp_out>(aten, "lerp.Scalar_out");
  add_kernel<&bitwise_and_out>(aten, "bitwise_and.Tensor_out");
  add_kernel<&bitwise_or_out>(aten, "bitwise_or.Tensor_out");
  add_kernel<&bitwise_xor_out>(aten, "bitwise_xor.Tensor_out");
  add_kernel<&logical<&bitwise_and_out>>(aten, "logical_and.out");
  add_kernel<&logical<&bitwise_or_out>>(aten, "logical_or.out");
  add_kernel<&logical<&bitwise_xor_out>>(aten, "logical_xor.out");
  add_kernel<&sigmoid_backward_out>(aten, "sigmoid_backward.grad_input");
  add_kernel<&tanh_backward_out>(aten, "tanh_backward.grad_input");
  add_kernel<&silu_backward_out>(aten, "silu_backward.grad_input");
  add_kernel<&silu_backward>(aten, "silu_backward");
  add_kernel<&gelu_backward_out>(aten, "gelu_backward.grad_input");
  add_kernel<&threshold_backward_out>(aten, "threshold_backward.grad_input");
}

void register_gated() {
  static torch::Library ours(torch::Library::IMPL, "ipex", c10::DispatchKey::XPU, __FILE__,
                             __LINE__);
  add_kernel<&silu_mul>(ours, "silu_mul");
  add_kernel<&gelu_mul>(ours, "gelu_mul");
  add_kernel<&silu_and_mul>(ours, "silu_and_mul");
  add_kernel<&gelu_and_mul>(ours, "gelu_and_mul");
}

}  // namespace ipex::xpu
