// SPDX-License-Identifier: Apache-2.0
// Norms and softmax on the kernels of rows.sycl.cpp.
#include <ATen/Functions.h>

#include <tuple>

#include "device/core/kernel_ops.h"

namespace ipex::xpu {
namespace {

using at::IntArrayRef;
using at::Tensor;
using std::optional;

// Dense, with the dimension in question last.
Tensor as_rows(const Tensor& x, std::int64_t dim) { return x.transpose(dim, -1).contiguous(); }

// For kernels whose items keep up to 32 values of a row on a GPU.
template <typename... Args>
void launch_values(const Tensor& x, const std::string& name, std::int64_t rows,
                   std::int64_t columns, Args... args) {
  launch_wide_rows(x, name, rows, columns, 32 * x.element_size(), args...);
}

bool softmax_into(const Tensor& x, std::int64_t dim, bool half_to_float, bool logarithm,
                  const Tensor& out) {
  const auto dtype = kernel_dtype(x.scalar_type());
  if (!dtype || half_to_float || out.scalar_type() != x.scalar_type() || x.sizes() != out.sizes())
    return false;
  if (x.numel() == 0) return true;
  const bool last = x.dim() == 0 || at::maybe_wrap_dim(dim, x.dim()) == x.dim() - 1;
  const Tensor rows = x.dim() == 0 ? x : as_rows(x, dim);
  const Tensor result = last && out.is_contiguous() ? out : at::empty_like(rows);
  const std::int64_t columns = x.dim() == 0 ? 1 : rows.size(-1);
  launch_values(x, kernel_name("softmax", *dtype, logarithm ? "true" : "false"),
                x.numel() / columns, columns, data(rows), out_data(result), ulong(columns));
  if (!result.is_same(out)) out.copy_(x.dim() == 0 ? result : result.transpose(dim, -1));
  return true;
}
bool softmax_out(const Tensor& x, std::int64_t dim, bool half_to_float, Tensor& out) {
  return softmax_into(x, dim, half_to_float, false, out);
}
bool log_softmax_out(const Tensor& x, std::int64_t dim, bool half_to_float, Tensor& out) {
  return softmax_into(x, dim, half_to_float, true, out);
}

bool softmax_backward_into(const Tensor& grad, const Tensor& y, std::int64_t dim,
                           at::ScalarType input_dtype, bool logarithm, const Tensor& out) {
  const auto dtype = kernel_dtype(y.scalar_type());
  for (const Tensor& t : {grad, out}) {
    if (!dtype || t.scalar_type() != y.scalar_type() || t.sizes() != y.sizes()) return false;
  }
  if (input_dtype != y.scalar_type()) return false;
  if (y.numel() == 0) return true;
  const bool scalar = y.dim() == 0;
  const bool last = scalar || at::maybe_wrap_dim(dim, y.dim()) == y.dim() - 1;
  const Tensor grads = scalar ? grad : as_rows(grad, dim);
  const Tensor rows = scalar ? y : as_rows(y, dim);
  const Tensor result = last && out.is_contiguous() ? out : at::empty_like(rows);
  const std::int64_t columns = scalar ? 1 : rows.size(-1);
  launch_rows(y, kernel_name("softmax_backward", *dtype, logarithm ? "true" : "false"),
              y.numel() / columns, columns, data(grads), data(rows), out_data(result),
              ulong(columns));
  if (!result.is_same(out)) out.copy_(scalar ? result : result.transpose(dim, -1));
  return true;
}
bool softmax_backward_out(const Tensor& grad, const Tensor& y, std::int64_t dim,
                          at::ScalarType input_dtype, Tensor& out) {
  return softmax_backward_into(grad, y, dim, input_dtype, false, out);
}
bool log_softmax_backward_out(const Tensor& grad, const Tensor& y, std::int64_t dim,
                              at::ScalarType input_dtype, Tensor& out) {
  return softmax_backward_into(grad, y, dim, input_dtype, true, out);
}

// Norms
// -----------------------------------------------------------------------------------------------

// The names of the dtypes of rows and of weights, which are of the same dtype or float32.
struct NormDtypes {
  std::string rows;
  std::string weights;
};
optional<NormDtypes> norm_dtypes(const Tensor& x, const optional<Tensor>& weight,
                                 const optional<Tensor>& bias, std::int64_t columns) {
  const auto rows = kernel_dtype(x.scalar_type());
  if (!rows || columns == 0) return std::nullopt;
  optional<at::ScalarType> found;
  for (const auto* one : {&weight, &bias}) {
    if (!*one || !(*one)->defined()) continue;
    const Tensor& w = **one;
    if (w.numel() != columns || (found && *found != w.scalar_type())) return std::nullopt;
    if (w.scalar_type() != x.scalar_type() && w.scalar_type() != at::kFloat) return std::nullopt;
    found = w.scalar_type();
  }
  return NormDtypes{*rows, *kernel_dtype(found.value_or(x.scalar_type()))};
}

std::string norm_name(const char* kernel, const NormDtypes& dtypes, const Tensor* residual) {
  return kernel_name(kernel, dtypes.rows, dtypes.weights + (residual ? ",true" : ",false"));
}

Tensor dense(const optional<Tensor>& tensor) {
  return tensor && tensor->defined() ? tensor->contiguous() : Tensor();
}

// The op of ipex: x and residual of one shape, normalized over the last dimension.
bool fits(const Tensor& x, const Tensor* residual, const optional<Tensor>& weight) {
  if (x.dim() == 0 || (weight && weight->dim() != 1)) return false;
  return !residual ||
         (residual->sizes() == x.sizes() && residual->scalar_type() == x.scalar_type());
}

optional<Tensor> rms_norm_kernel(const Tensor& x, const Tensor* residual, Tensor* sum,
                                 const optional<Tensor>& weight, double eps, double offset) {
  if (!fits(x, residual, weight)) return std::nullopt;
  const std::int64_t columns = x.size(-1);
  const auto dtypes = norm_dtypes(x, weight, std::nullopt, columns);
  if (!dtypes) return std::nullopt;
  const Tensor rows = x.contiguous();
  const Tensor other = residual ? residual->contiguous() : Tensor();
  const Tensor w = dense(weight);
  Tensor y = at::empty_like(rows);
  if (sum && !sum->defined()) *sum = at::empty_like(rows);
  const Tensor total =
      !sum || sum->is_contiguous() ? (sum ? *sum : Tensor()) : at::empty_like(rows);
  launch_values(x, norm_name("rms_norm", *dtypes, residual), x.numel() / columns, columns,
                data(rows), data(other), data(w), out_data(y), out_data(total), ulong(columns),
                static_cast<float>(eps), static_cast<float>(offset));
  if (sum && !total.is_same(*sum)) sum->copy_(total);
  return y;
}
optional<Tensor> rms_norm(const Tensor& x, const optional<Tensor>& weight, double eps,
                          double offset) {
  return rms_norm_kernel(x, nullptr, nullptr, weight, eps, offset);
}
optional<std::tuple<Tensor, Tensor>> add_rms_norm(const Tensor& x, const Tensor& residual,
                                                  const optional<Tensor>& weight, double eps,
                                                  double offset) {
  Tensor sum;
  const auto y = rms_norm_kernel(x, &residual, &sum, weight, eps, offset);
  return y ? optional(std::tuple(*y, sum)) : std::nullopt;
}
optional<Tensor> add_rms_norm_(const Tensor& x, Tensor& residual, const optional<Tensor>& weight,
                               double eps, double offset) {
  if (!residual.is_non_overlapping_and_dense()) return std::nullopt;
  return rms_norm_kernel(x, &residual, &residual, weight, eps, offset);
}

struct LayerNorm {
  Tensor y;
  Tensor sum;
  Tensor mean;
  Tensor rstd;
};
// `sum` may be given: it is written to. Statistics only if wanted.
optional<LayerNorm> layer_norm_kernel(const Tensor& x, const Tensor* residual, const Tensor& sum,
                                      const optional<Tensor>& weight, const optional<Tensor>& bias,
                                      std::int64_t columns, double eps, bool statistics) {
  const auto dtypes = norm_dtypes(x, weight, bias, columns);
  if (!dtypes) return std::nullopt;
  const Tensor rows = x.contiguous();
  const Tensor other = residual ? residual->contiguous() : Tensor();
  const Tensor w = dense(weight);
  const Tensor b = dense(bias);
  const std::int64_t count = x.numel() / columns;
  LayerNorm result{at::empty_like(rows), sum, {}, {}};
  if (statistics) {
    const auto stats = x.options().dtype(dtypes->weights == "float" ? at::kFloat : x.scalar_type());
    result.mean = at::empty({count}, stats);
    result.rstd = at::empty({count}, stats);
  }
  Tensor total;
  if (residual) total = sum.defined() && sum.is_contiguous() ? sum : at::empty_like(rows);
  launch_values(x, norm_name("layer_norm", *dtypes, residual), count, columns, data(rows),
                data(other), data(w), data(b), out_data(result.y), out_data(total),
                out_data(result.mean), out_data(result.rstd), ulong(columns),
                static_cast<float>(eps));
  if (sum.defined() && !total.is_same(sum)) sum.copy_(total);
  result.sum = total;
  return result;
}
optional<Tensor> layer_norm(const Tensor& x, const optional<Tensor>& weight,
                            const optional<Tensor>& bias, double eps) {
  if (!fits(x, nullptr, weight) || (bias && bias->dim() != 1)) return std::nullopt;
  const auto result = layer_norm_kernel(x, nullptr, {}, weight, bias, x.size(-1), eps, false);
  return result ? optional(result->y) : std::nullopt;
}
optional<std::tuple<Tensor, Tensor>> add_layer_norm(const Tensor& x, const Tensor& residual,
                                                    const optional<Tensor>& weight,
                                                    const optional<Tensor>& bias, double eps) {
  if (!fits(x, &residual, weight) || (bias && bias->dim() != 1)) return std::nullopt;
  const auto result = layer_norm_kernel(x, &residual, {}, weight, bias, x.size(-1), eps, false);
  return result ? optional(std::tuple(result->y, result->sum)) : std::nullopt;
}
optional<Tensor> add_layer_norm_(const Tensor& x, Tensor& residual, const optional<Tensor>& weight,
                                 const optional<Tensor>& bias, double eps) {
  if (!fits(x, &residual, weight) || (bias && bias->dim() != 1) ||
      !residual.is_non_overlapping_and_dense())
    return std::nullopt;
  const auto result =
      layer_norm_kernel(x, &residual, residual, weight, bias, x.size(-1), eps, false);
  return result ? optional(result->y) : std::nullopt;
}

optional<std::tuple<Tensor, Tensor, Tensor>> native_layer_norm(const Tensor& x, IntArrayRef shape,
                                                               const optional<Tensor>& weight,
                                                               const optional<Tensor>& bias,
                                                               double eps) {
  const auto kept = x.dim() - static_cast<std::int64_t>(shape.size());
  if (kept < 0 || x.sizes().slice(static_cast<std::size_t>(kept)) != shape) return std::nullopt;
  for (const auto* one : {&weight, &bias}) {
    if (*one && (*one)->defined() && (*one)->sizes() != shape) return std::nullopt;
  }
  const auto result =
      layer_norm_kernel(x, nullptr, {}, weight, bias, c10::multiply_integers(shape), eps, true);
  if (!result) return std::nullopt;
  std::vector<std::int64_t> sizes = x.sizes().slice(0, static_cast<std::size_t>(kept)).vec();
  sizes.resize(static_cast<std::size_t>(x.dim()), 1);
  return std::tuple(result->y, result->mean.view(sizes), result->rstd.view(sizes));
}

optional<std::tuple<Tensor, Tensor, Tensor>> native_layer_norm_backward(
    const Tensor& grad, const Tensor& x, IntArrayRef shape, const Tensor& mean, const Tensor& rstd,
    const optional<Tensor>& weight, const optional<Tensor>& bias, std::array<bool, 3> wanted) {
  const std::int64_t columns = c10::multiply_integers(shape);
  const auto dtypes = norm_dtypes(x, weight, bias, columns);
  if (!dtypes || grad.scalar_type() != x.scalar_type() || grad.sizes() != x.sizes() ||
      mean.scalar_type() != rstd.scalar_type() ||
      kernel_dtype(mean.scalar_type()) != dtypes->weights)
    return std::nullopt;
  const std::int64_t rows = x.numel() / columns;
  if (rows == 0) return std::nullopt;
  const Tensor grads = grad.contiguous();
  const Tensor values = x.contiguous();
  const Tensor means = mean.contiguous();
  const Tensor rstds = rstd.contiguous();
  const Tensor w = dense(weight);
  Tensor grad_x, grad_weight, grad_bias;
  if (wanted[0]) {
    grad_x = at::empty_like(values);
    launch_rows(x, kernel_name("layer_norm_backward", dtypes->rows, dtypes->weights), rows, columns,
                data(grads), data(values), data(means), data(rstds), data(w), out_data(grad_x),
                ulong(columns));
  }
  if (wanted[1] || wanted[2]) {
    const std::int64_t rows_per_part = std::max<std::int64_t>(32, (rows + 63) / 64);
    const std::int64_t count = (rows + rows_per_part - 1) / rows_per_part;
    const Tensor parts = at::empty({count, 2, columns}, x.options().dtype(at::kFloat));
    launch_columns(x, kernel_name("layer_norm_weight_backward", dtypes->rows, dtypes->weights),
                   count, columns, data(grads), data(values), data(means), data(rstds),
                   out_data(parts), ulong(rows), ulong(columns), ulong(rows_per_part));
    const Tensor sums = parts.sum(0);
    const auto shaped = [&](std::int64_t i) {
      return sums[i]
          .to(weight && weight->defined() ? weight->scalar_type() : x.scalar_type())
          .view(shape);
    };
    if (wanted[1]) grad_weight = shaped(0);
    if (wanted[2]) grad_bias = shaped(1);
  }
  return std::tuple(grad_x, grad_weight, grad_bias);
}

// Measured for all of them.
constexpr auto kRowsSpeed = KernelSpeed::SlowerIfSmall;

}  // namespace

void register_rows() {
  static torch::Library aten(torch::Library::IMPL, "aten", c10::DispatchKey::XPU, __FILE__,
                             __LINE__);
  add_kernel<&softmax_out, kRowsSpeed>(aten, "_softmax.out");
  add_kernel<&log_softmax_out, kRowsSpeed>(aten, "_log_softmax.out");
  add_kernel<&softmax_backward_out, kRowsSpeed>(aten, "_softmax_backward_data.out");
  add_kernel<&log_softmax_backward_out, kRowsSpeed>(aten, "_log_softmax_backward_data.out");
  add_kernel<&native_layer_norm, kRowsSpeed>(aten, "native_layer_norm");
  add_kernel<&native_layer_norm_backward, kRowsSpeed>(aten, "native_layer_norm_backward");
}

void register_norms() {
  static torch::Library ours(torch::Library::IMPL, "ipex", c10::DispatchKey::XPU, __FILE__,
                             __LINE__);
  add_kernel<&rms_norm, kRowsSpeed>(ours, "rms_norm");
  add_kernel<&add_rms_norm, kRowsSpeed>(ours, "add_rms_norm");
  add_kernel<&add_rms_norm_, kRowsSpeed>(ours, "add_rms_norm_");
  add_kernel<&layer_norm, kRowsSpeed>(ours, "layer_norm");
  add_kernel<&add_layer_norm, kRowsSpeed>(ours, "add_layer_norm");
  add_kernel<&add_layer_norm_, kRowsSpeed>(ours, "add_layer_norm_");
}

}  // namespace ipex::xpu
