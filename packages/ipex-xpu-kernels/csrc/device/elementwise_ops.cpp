// SPDX-License-Identifier: Apache-2.0
// torch's elementwise ops on the kernels of elementwise.sycl.cpp. Shapes, dtypes and overlap are
// TensorIterator's business; what the kernels do not have (other dtypes, more than four dimensions,
// 2^31 elements) goes to the host.
#include <ATen/Functions.h>
#include <ATen/Operators.h>
#include <ATen/TensorIterator.h>
#include <ATen/native/CPUFallback.h>
#include <torch/library.h>

#include <array>
#include <optional>
#include <string>

#include "core/core.h"
#include "kernel_ops.h"
#include "runtime.h"

namespace ipex::xpu {

std::optional<std::string> kernel_dtype(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
      return "float";
    case at::kHalf:
      return "half";
    case at::kBFloat16:
      return "bf16";
    default:
      return std::nullopt;
  }
}

namespace {

using at::Scalar;
using at::Tensor;
using at::TensorIterator;

constexpr std::int64_t kMaxElements = std::int64_t{1} << 31;

std::string of(const char* kernel, const std::string& first, const std::string& second) {
  return std::string(kernel) + '<' + first + ',' + second + '>';
}

// Four sizes and strides in elements, the innermost first.
struct Layout {
  std::array<std::uint32_t, 4> size{1, 1, 1, 1};
  std::array<std::array<std::int32_t, 4>, 3> stride{};
};

std::optional<Layout> layout_of(at::TensorIteratorBase& iter) {
  if (iter.ndim() > 4) return std::nullopt;
  Layout layout;
  for (int d = 0; d < iter.ndim(); ++d) {
    layout.size[static_cast<std::size_t>(d)] =
        static_cast<std::uint32_t>(iter.shape()[static_cast<std::size_t>(d)]);
    for (int arg = 0; arg < iter.ntensors(); ++arg) {
      const std::int64_t stride =
          iter.strides(arg)[static_cast<std::size_t>(d)] / iter.element_size(arg);
      if (stride > INT32_MAX || stride < INT32_MIN) return std::nullopt;
      layout.stride[static_cast<std::size_t>(arg)][static_cast<std::size_t>(d)] =
          static_cast<std::int32_t>(stride);
    }
  }
  // The largest offset must fit, too.
  for (int arg = 0; arg < iter.ntensors(); ++arg) {
    std::int64_t last = 0;
    for (std::size_t d = 0; d < 4; ++d) {
      last += std::abs(std::int64_t{layout.stride[static_cast<std::size_t>(arg)][d]}) *
              (layout.size[d] - std::int64_t{1});
    }
    if (last >= kMaxElements) return std::nullopt;
  }
  return layout;
}

// One dtype that the kernels have, everything on the device.
std::optional<std::string> common_kernel_dtype(at::TensorIteratorBase& iter) {
  for (int arg = 0; arg < iter.ntensors(); ++arg) {
    if (iter.dtype(arg) != iter.dtype(0) || !iter.device(arg).is_xpu()) return std::nullopt;
  }
  if (iter.numel() >= kMaxElements) return std::nullopt;
  return kernel_dtype(iter.dtype(0));
}

bool launch_unary(const char* op, at::TensorIteratorBase& iter, double p = 0, double q = 0) {
  const auto dtype = common_kernel_dtype(iter);
  if (!dtype || !iter.is_contiguous()) return false;
  const auto device = static_cast<c10::DeviceIndex>(iter.device(0).index());
  launch_elements(current_queue(device), device, of("unary", op, *dtype),
                  static_cast<std::size_t>(iter.numel()),
                  static_cast<const void*>(iter.data_ptr(1)), iter.data_ptr(0),
                  static_cast<unsigned long>(iter.numel()), static_cast<float>(p),
                  static_cast<float>(q));
  return true;
}

bool launch_binary(const char* op, at::TensorIteratorBase& iter, double alpha, bool broadcasts) {
  const auto dtype = common_kernel_dtype(iter);
  if (!dtype) return false;
  const auto device = static_cast<c10::DeviceIndex>(iter.device(0).index());
  auto& q = current_queue(device);
  const auto n = static_cast<std::size_t>(iter.numel());
  const void* a = iter.data_ptr(1);
  const void* b = iter.data_ptr(2);
  void* y = iter.data_ptr(0);
  const auto factor = static_cast<float>(alpha);
  if (iter.is_contiguous()) {
    launch_elements(q, device, of("binary", op, *dtype), n, a, b, y, static_cast<unsigned long>(n),
                    factor);
    return true;
  }
  const auto layout = broadcasts ? layout_of(iter) : std::nullopt;
  if (!layout) return false;
  const auto& [size, stride] = *layout;
  const auto& [sy, sa, sb] = stride;
  const auto columns = static_cast<std::int32_t>(size[0]);
  if (iter.ndim() == 2 && sb[0] == 1 && sb[1] == 0 && sa[0] == 1 && sa[1] == columns &&
      sy[0] == 1 && sy[1] == columns) {
    launch_elements(q, device, of("binary_row", op, *dtype), n, a, b, y,
                    static_cast<unsigned long>(n), factor, size[0]);
    return true;
  }
  launch_elements(q, device, of("binary_strided", op, *dtype), n, a, b, y,
                  static_cast<unsigned long>(n), factor, size[0], size[1], size[2], sa[0], sa[1],
                  sa[2], sa[3], sb[0], sb[1], sb[2], sb[3], sy[0], sy[1], sy[2], sy[3]);
  return true;
}

TensorIterator unary_iterator(const Tensor& out, const Tensor& x) {
  return at::TensorIteratorConfig()
      .add_output(out)
      .add_const_input(x)
      .check_all_same_dtype(false)
      .build();
}
TensorIterator binary_iterator(const Tensor& out, const Tensor& a, const Tensor& b) {
  return at::TensorIteratorConfig()
      .add_output(out)
      .add_const_input(a)
      .add_const_input(b)
      .check_all_same_dtype(false)
      .build();
}

bool on_device(const Tensor& tensor) { return tensor.is_xpu(); }
// A number, or a tensor of the host that torch treats as one.
bool is_number(const Tensor& tensor) { return tensor.dim() == 0 && tensor.is_cpu(); }

// The kernel if it can, else the host.
#define UNARY_OUT(function, aten_name, op)                                                     \
  Tensor& function(const Tensor& self, Tensor& out) {                                          \
    const c10::DeviceGuard guard(self.device());                                               \
    if (on_device(self) && on_device(out)) {                                                   \
      auto iter = unary_iterator(out, self);                                                   \
      if (launch_unary(op, iter)) return out;                                                  \
    }                                                                                          \
    return at::native::call_fallback_fn<&fallback, ATEN_OP2(aten_name, out)>::call(self, out); \
  }
UNARY_OUT(sigmoid_out, sigmoid, "sigmoid")
UNARY_OUT(tanh_out, tanh, "tanh_")
UNARY_OUT(silu_out, silu, "silu")
UNARY_OUT(exp_out, exp, "exp_")
UNARY_OUT(log_out, log, "log_")
UNARY_OUT(sqrt_out, sqrt, "sqrt_")
UNARY_OUT(rsqrt_out, rsqrt, "rsqrt_")
UNARY_OUT(neg_out, neg, "neg")
UNARY_OUT(abs_out, abs, "abs_")
UNARY_OUT(reciprocal_out, reciprocal, "reciprocal")
UNARY_OUT(sin_out, sin, "sin_")
UNARY_OUT(cos_out, cos, "cos_")
UNARY_OUT(erf_out, erf, "erf_")
#undef UNARY_OUT

Tensor relu(const Tensor& self) {
  const c10::DeviceGuard guard(self.device());
  if (kernel_dtype(self.scalar_type())) {
    Tensor out = at::empty_like(self);
    auto iter = unary_iterator(out, self);
    if (launch_unary("relu", iter)) return out;
  }
  return at::native::call_fallback_fn<&fallback, ATEN_OP(relu)>::call(self);
}
Tensor& relu_(Tensor& self) {
  const c10::DeviceGuard guard(self.device());
  auto iter = unary_iterator(self, self);
  if (launch_unary("relu", iter)) return self;
  return at::native::call_fallback_fn<&fallback, ATEN_OP(relu_)>::call(self);
}

Tensor& gelu_out(const Tensor& self, c10::string_view approximate, Tensor& out) {
  const c10::DeviceGuard guard(self.device());
  auto iter = unary_iterator(out, self);
  if (launch_unary(approximate == "tanh" ? "gelu_tanh" : "gelu", iter)) return out;
  return at::native::call_fallback_fn<&fallback, ATEN_OP2(gelu, out)>::call(self, approximate, out);
}
Tensor& leaky_relu_out(const Tensor& self, const Scalar& slope, Tensor& out) {
  const c10::DeviceGuard guard(self.device());
  auto iter = unary_iterator(out, self);
  if (launch_unary("leaky_relu", iter, slope.toDouble())) return out;
  return at::native::call_fallback_fn<&fallback, ATEN_OP2(leaky_relu, out)>::call(self, slope, out);
}

// An operand that is a number joins the kernel as an argument.
struct ScalarForm {
  const char* kernel;
  double p;
  double q;
};
bool with_number(const Tensor& tensor, Tensor& out, const ScalarForm& form) {
  auto iter = unary_iterator(out, tensor);
  return launch_unary(form.kernel, iter, form.p, form.q);
}
double value_of(const Tensor& number) { return at::_local_scalar_dense(number).toDouble(); }
bool is_real_number(const Tensor& tensor) { return is_number(tensor) && !tensor.is_complex(); }

bool add_kernel(const Tensor& self, const Tensor& other, double alpha, bool subtract, Tensor& out) {
  if (!on_device(out)) return false;
  if (is_real_number(other) && on_device(self)) {
    const double value = value_of(other) * alpha;
    return with_number(self, out, {"add_scalar", subtract ? -value : value, 0});
  }
  if (is_real_number(self) && on_device(other)) {
    return with_number(other, out, {"affine", subtract ? -alpha : alpha, value_of(self)});
  }
  if (!on_device(self) || !on_device(other)) return false;
  auto iter = binary_iterator(out, self, other);
  return launch_binary(subtract ? "sub" : "add", iter, alpha, true);
}
Tensor& add_out(const Tensor& self, const Tensor& other, const Scalar& alpha, Tensor& out) {
  const c10::DeviceGuard guard(out.device());
  if (!alpha.isComplex() && add_kernel(self, other, alpha.toDouble(), false, out)) return out;
  return at::native::call_fallback_fn<&fallback, ATEN_OP2(add, out)>::call(self, other, alpha, out);
}
Tensor& sub_out(const Tensor& self, const Tensor& other, const Scalar& alpha, Tensor& out) {
  const c10::DeviceGuard guard(out.device());
  if (!alpha.isComplex() && add_kernel(self, other, alpha.toDouble(), true, out)) return out;
  return at::native::call_fallback_fn<&fallback, ATEN_OP2(sub, out)>::call(self, other, alpha, out);
}
Tensor& mul_out(const Tensor& self, const Tensor& other, Tensor& out) {
  const c10::DeviceGuard guard(out.device());
  bool done = false;
  if (on_device(out)) {
    if (is_real_number(other) && on_device(self)) {
      done = with_number(self, out, {"mul_scalar", value_of(other), 0});
    } else if (is_real_number(self) && on_device(other)) {
      done = with_number(other, out, {"mul_scalar", value_of(self), 0});
    } else if (on_device(self) && on_device(other)) {
      auto iter = binary_iterator(out, self, other);
      done = launch_binary("mul", iter, 1, true);
    }
  }
  return done ? out
              : at::native::call_fallback_fn<&fallback, ATEN_OP2(mul, out)>::call(self, other, out);
}
Tensor& div_out(const Tensor& self, const Tensor& other, Tensor& out) {
  const c10::DeviceGuard guard(out.device());
  bool done = false;
  if (on_device(out)) {
    if (is_real_number(other) && on_device(self)) {
      done = with_number(self, out, {"div_scalar", value_of(other), 0});
    } else if (is_real_number(self) && on_device(other)) {
      done = with_number(other, out, {"scalar_div", value_of(self), 0});
    } else if (on_device(self) && on_device(other)) {
      auto iter = binary_iterator(out, self, other);
      done = launch_binary("div_", iter, 1, true);
    }
  }
  return done ? out
              : at::native::call_fallback_fn<&fallback, ATEN_OP2(div, out)>::call(self, other, out);
}

#define BINARY_OUT(function, aten_name, overload, op, broadcasts)                             \
  Tensor& function(const Tensor& a, const Tensor& b, Tensor& out) {                           \
    const c10::DeviceGuard guard(out.device());                                               \
    if (on_device(a) && on_device(b) && on_device(out)) {                                     \
      auto iter = binary_iterator(out, a, b);                                                 \
      if (launch_binary(op, iter, 1, broadcasts)) return out;                                 \
    }                                                                                         \
    return at::native::call_fallback_fn<&fallback, ATEN_OP2(aten_name, overload)>::call(a, b, \
                                                                                        out); \
  }
BINARY_OUT(maximum_out, maximum, out, "maximum", true)
BINARY_OUT(minimum_out, minimum, out, "minimum", true)
BINARY_OUT(sigmoid_backward_out, sigmoid_backward, grad_input, "sigmoid_backward", false)
BINARY_OUT(tanh_backward_out, tanh_backward, grad_input, "tanh_backward", false)
BINARY_OUT(silu_backward_out, silu_backward, grad_input, "silu_backward", false)
#undef BINARY_OUT

Tensor silu_backward(const Tensor& grad, const Tensor& self) {
  Tensor out = at::empty_like(self);
  return silu_backward_out(grad, self, out);
}
Tensor& gelu_backward_out(const Tensor& grad, const Tensor& self, c10::string_view approximate,
                          Tensor& out) {
  const c10::DeviceGuard guard(out.device());
  auto iter = binary_iterator(out, grad, self);
  if (launch_binary(approximate == "tanh" ? "gelu_tanh_backward" : "gelu_backward", iter, 1, false))
    return out;
  return at::native::call_fallback_fn<&fallback, ATEN_OP2(gelu_backward, grad_input)>::call(
      grad, self, approximate, out);
}
Tensor& threshold_backward_out(const Tensor& grad, const Tensor& self, const Scalar& threshold,
                               Tensor& out) {
  const c10::DeviceGuard guard(out.device());
  auto iter = binary_iterator(out, grad, self);
  if (launch_binary("threshold_backward", iter, threshold.toDouble(), false)) return out;
  return at::native::call_fallback_fn<&fallback, ATEN_OP2(threshold_backward, grad_input)>::call(
      grad, self, threshold, out);
}

Tensor& fill_(Tensor& self, const Scalar& value) {
  const c10::DeviceGuard guard(self.device());
  const auto device = static_cast<c10::DeviceIndex>(self.get_device());
  const auto dtype = kernel_dtype(self.scalar_type());
  if (dtype && self.is_non_overlapping_and_dense() && !value.isComplex()) {
    launch_elements(current_queue(device), device, "fill<" + *dtype + ">",
                    static_cast<std::size_t>(self.numel()), self.mutable_data_ptr(),
                    static_cast<unsigned long>(self.numel()), value.to<float>());
    return self;
  }
  return at::native::call_fallback_fn<&fallback, ATEN_OP2(fill_, Scalar)>::call(self, value);
}
Tensor& zero_(Tensor& self) {
  const c10::DeviceGuard guard(self.device());
  const auto device = static_cast<c10::DeviceIndex>(self.get_device());
  if (self.is_non_overlapping_and_dense()) {
    if (self.numel() != 0) current_queue(device).memset(self.mutable_data_ptr(), 0, self.nbytes());
    return self;
  }
  return at::native::call_fallback_fn<&fallback, ATEN_OP(zero_)>::call(self);
}

// By size where no number is converted.
std::optional<std::string> copy_name(at::ScalarType from, at::ScalarType to) {
  if (from == to) {
    switch (c10::elementSize(from)) {
      case 1:
        return "copy_strided<unsignedchar,unsignedchar>";
      case 2:
        return "copy_strided<unsignedshort,unsignedshort>";
      case 4:
        return "copy_strided<unsignedint,unsignedint>";
      case 8:
        return "copy_strided<unsignedlong,unsignedlong>";
      default:
        return std::nullopt;
    }
  }
  const auto a = kernel_dtype(from);
  const auto b = kernel_dtype(to);
  if (!a || !b) return std::nullopt;
  return of("copy_strided", *a, *b);
}

}  // namespace

bool copy_kernel(const Tensor& to, const Tensor& from) {
  if (to.is_conj() != from.is_conj() || to.is_neg() != from.is_neg()) return false;
  const auto name = copy_name(from.scalar_type(), to.scalar_type());
  if (!name || to.numel() >= kMaxElements) return false;
  auto iter = at::TensorIteratorConfig()
                  .add_output(to)
                  .add_const_input(from)
                  .check_all_same_dtype(false)
                  .resize_outputs(false)
                  .build();
  const auto layout = layout_of(iter);
  if (!layout) return false;
  const auto device = static_cast<c10::DeviceIndex>(to.get_device());
  const auto& [size, stride] = *layout;
  const auto& [sy, sx, unused] = stride;
  launch_elements(current_queue(device), device, *name, static_cast<std::size_t>(iter.numel()),
                  static_cast<const void*>(iter.data_ptr(1)), iter.data_ptr(0),
                  static_cast<unsigned long>(iter.numel()), size[0], size[1], size[2], sx[0], sx[1],
                  sx[2], sx[3], sy[0], sy[1], sy[2], sy[3]);
  return true;
}

void register_elementwise() {
  static torch::Library library(torch::Library::IMPL, "aten", c10::DispatchKey::XPU, __FILE__,
                                __LINE__);
  library.impl("sigmoid.out", TORCH_FN(sigmoid_out));
  library.impl("tanh.out", TORCH_FN(tanh_out));
  library.impl("silu.out", TORCH_FN(silu_out));
  library.impl("exp.out", TORCH_FN(exp_out));
  library.impl("log.out", TORCH_FN(log_out));
  library.impl("sqrt.out", TORCH_FN(sqrt_out));
  library.impl("rsqrt.out", TORCH_FN(rsqrt_out));
  library.impl("neg.out", TORCH_FN(neg_out));
  library.impl("abs.out", TORCH_FN(abs_out));
  library.impl("reciprocal.out", TORCH_FN(reciprocal_out));
  library.impl("sin.out", TORCH_FN(sin_out));
  library.impl("cos.out", TORCH_FN(cos_out));
  library.impl("erf.out", TORCH_FN(erf_out));
  library.impl("relu", TORCH_FN(relu));
  library.impl("relu_", TORCH_FN(relu_));
  library.impl("gelu.out", TORCH_FN(gelu_out));
  library.impl("leaky_relu.out", TORCH_FN(leaky_relu_out));
  library.impl("add.out", TORCH_FN(add_out));
  library.impl("sub.out", TORCH_FN(sub_out));
  library.impl("mul.out", TORCH_FN(mul_out));
  library.impl("div.out", TORCH_FN(div_out));
  library.impl("maximum.out", TORCH_FN(maximum_out));
  library.impl("minimum.out", TORCH_FN(minimum_out));
  library.impl("sigmoid_backward.grad_input", TORCH_FN(sigmoid_backward_out));
  library.impl("tanh_backward.grad_input", TORCH_FN(tanh_backward_out));
  library.impl("silu_backward.grad_input", TORCH_FN(silu_backward_out));
  library.impl("silu_backward", TORCH_FN(silu_backward));
  library.impl("gelu_backward.grad_input", TORCH_FN(gelu_backward_out));
  library.impl("threshold_backward.grad_input", TORCH_FN(threshold_backward_out));
  library.impl("fill_.Scalar", TORCH_FN(fill_));
  library.impl("zero_", TORCH_FN(zero_));
}

}  // namespace ipex::xpu
