// SPDX-License-Identifier: Apache-2.0
// What moves and makes elements, on the kernels of moving.sycl.cpp.
#include <ATen/ExpandUtils.h>
#include <ATen/Functions.h>
#include <ATen/WrapDimUtils.h>

#include <cmath>
#include <cstring>

#include "device/core/strided.h"

namespace ipex::xpu {
namespace {

using at::Scalar;
using at::Tensor;
using std::optional;

// A number as an element of the dtype, in the low bits. The host, which does it, refuses numbers
// that the dtype cannot hold but, in some dtypes, for a single element.
unsigned long bits_of(const Scalar& value, const Tensor& x) {
  const std::int64_t count = x.numel() == 1 ? 1 : 2;
  const Tensor one = at::full({count}, value, at::TensorOptions(x.scalar_type()).device(at::kCPU));
  unsigned long result = 0;
  std::memcpy(&result, one.const_data_ptr(), one.element_size());
  return result;
}

bool fill_scalar_(Tensor& x, const Scalar& value) {
  const auto dtype = bits_dtype(x.scalar_type());
  if (!dtype) return false;
  auto iter = iterator(x);
  return launch_strided<1>(iter, kernel_name("fill", *dtype), bits_of(value, x));
}
bool zeros_(Tensor& x) {
  if (!x.is_non_overlapping_and_dense()) return fill_scalar_(x, 0);
  const auto device = static_cast<c10::DeviceIndex>(x.get_device());
  if (x.numel() != 0) submit_fill(current_queue(device), x.mutable_data_ptr(), 0, x.nbytes());
  return true;
}

bool where_out(const Tensor& condition, const Tensor& a, const Tensor& b, Tensor& out) {
  const auto dtype = bits_dtype(out.scalar_type());
  if (!dtype || condition.scalar_type() != at::kBool || a.scalar_type() != out.scalar_type() ||
      b.scalar_type() != out.scalar_type())
    return false;
  auto iter = iterator(out, condition, a, b);
  return launch_strided<4>(iter, kernel_name("where", *dtype));
}
optional<Tensor> where(const Tensor& condition, const Tensor& a, const Tensor& b) {
  if (!condition.is_xpu()) return std::nullopt;
  const auto dtype = at::result_type(a, b);
  const auto joined = [&](const Tensor& t) {
    return t.is_xpu() ? t
                      : at::full({}, at::_local_scalar_dense(t), condition.options().dtype(dtype));
  };
  const auto sizes = at::infer_size(condition.sizes(), at::infer_size(a.sizes(), b.sizes()));
  Tensor out = at::empty(sizes, condition.options().dtype(dtype));
  return where_out(condition, joined(a), joined(b), out) ? optional(out) : std::nullopt;
}
bool masked_fill_(Tensor& x, const Tensor& mask, const Scalar& value) {
  const auto dtype = bits_dtype(x.scalar_type());
  if (!dtype || mask.scalar_type() != at::kBool || !at::is_expandable_to(mask.sizes(), x.sizes()))
    return false;
  auto iter = iterator(x, mask.expand(x.sizes()));
  return launch_strided<2>(iter, kernel_name("masked_fill", *dtype), bits_of(value, x));
}
bool masked_fill_tensor_(Tensor& x, const Tensor& mask, const Tensor& value) {
  return value.is_cpu() && value.dim() == 0 &&
         masked_fill_(x, mask, at::_local_scalar_dense(value));
}

bool triangle(const Tensor& x, std::int64_t diagonal, bool lower, const Tensor& out) {
  const auto dtype = bits_dtype(x.scalar_type());
  if (!dtype || x.dim() < 2 || out.sizes() != x.sizes() || out.scalar_type() != x.scalar_type() ||
      !out.is_contiguous() || x.numel() >= kMaxElements || std::abs(diagonal) > INT32_MAX)
    return false;
  if (x.numel() == 0) return true;
  const Tensor dense = x.contiguous();
  launch_columns(x, kernel_name("triangle", *dtype), x.numel() / x.size(-1), x.size(-1),
                 out_data(out), data(dense), static_cast<unsigned int>(x.numel() / x.size(-1)),
                 static_cast<unsigned int>(x.size(-1)), static_cast<unsigned int>(x.size(-2)),
                 static_cast<int>(diagonal), lower ? 1 : 0);
  return true;
}
bool tril_out(const Tensor& x, std::int64_t diagonal, Tensor& out) {
  return triangle(x, diagonal, true, out);
}
bool triu_out(const Tensor& x, std::int64_t diagonal, Tensor& out) {
  return triangle(x, diagonal, false, out);
}

optional<std::string> copy_name(at::ScalarType from, at::ScalarType to) {
  if (from == to) {
    const auto dtype = bits_dtype(from);
    return dtype ? optional(kernel_name("copy_strided", *dtype, *dtype)) : std::nullopt;
  }
  const auto name = [](at::ScalarType dtype) -> optional<std::string> {
    if (dtype == at::kBool) return "bool";
    if (dtype == at::kByte) return "unsignedchar";
    return number_dtype(dtype);
  };
  // Kernels read these, and only into numbers with a fraction.
  const auto small = [&]() -> optional<std::string> {
    if (!kernel_dtype(to)) return std::nullopt;
    if (from == at::kChar) return "signedchar";
    if (from == at::kFloat8_e5m2) return "e5m2";
    if (from == at::kFloat8_e4m3fn) return "e4m3";
    return std::nullopt;
  }();
  const auto a = small ? small : name(from);
  const auto b = name(to);
  const bool bytes =
      (from == at::kBool && to == at::kByte) || (from == at::kByte && to == at::kBool);
  if (!a || !b || bytes) return std::nullopt;
  return kernel_name("copy_strided", *a, *b);
}

// Joining and counting
// -----------------------------------------------------------------------------------------------

bool cat_out(const at::ITensorListRef& tensors, std::int64_t dim, Tensor& out) {
  const auto materialized = tensors.materialize();
  if (out.dim() == 0) return false;
  dim = at::maybe_wrap_dim(dim, out.dim());
  const auto skipped = [](const Tensor& t) { return t.dim() == 1 && t.numel() == 0; };
  std::int64_t total = 0;
  for (const Tensor& t : materialized) {
    if (skipped(t)) continue;
    if (t.dim() != out.dim()) return false;
    for (std::int64_t d = 0; d < t.dim(); ++d) {
      if (d != dim && t.size(d) != out.size(d)) return false;
    }
    total += t.size(dim);
  }
  if (total != out.size(dim)) return false;
  std::int64_t at = 0;
  for (const Tensor& t : materialized) {
    if (skipped(t)) continue;
    if (t.numel() != 0) out.narrow(dim, at, t.size(dim)).copy_(t);
    at += t.size(dim);
  }
  return true;
}

bool arange_out(const Scalar& start, const Scalar& end, const Scalar& step, Tensor& out) {
  const bool whole = out.scalar_type() == at::kLong && start.isIntegral(true) &&
                     end.isIntegral(true) && step.isIntegral(true);
  if (!whole && out.scalar_type() != at::kFloat) return false;
  if (start.isComplex() || end.isComplex() || step.isComplex()) return false;
  const double first = start.toDouble(), distance = end.toDouble() - first, by = step.toDouble();
  const double count = std::ceil(distance / by);
  // Also refuses what is not a number, and bounds that contradict the step.
  if (!(count >= 0 && count < static_cast<double>(kMaxElements)) || by == 0 ||
      std::abs(first) > 1e15 || std::abs(distance) > 1e15)
    return false;
  const auto n = static_cast<std::int64_t>(count);
  if (out.numel() != n) out.resize_({n});
  const Tensor y = out.is_contiguous() ? out : at::empty({n}, out.options());
  if (whole) {
    launch_for(out, "arange<long>", n, out_data(y), static_cast<unsigned long>(n), start.to<long>(),
               step.to<long>());
  } else {
    launch_for(out, "arange<float>", n, out_data(y), static_cast<unsigned long>(n),
               start.to<float>(), step.to<float>());
  }
  if (!y.is_same(out)) out.copy_(y.view(out.sizes()));
  return true;
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
  return launch_strided<2>(iter, *name);
}

void register_moving() {
  static torch::Library aten(torch::Library::IMPL, "aten", c10::DispatchKey::XPU, __FILE__,
                             __LINE__);
  constexpr auto kFast = KernelSpeed::NotSlower;
  constexpr auto kSpeed = KernelSpeed::SlowerIfSmall;
  add_kernel<&fill_scalar_>(aten, "fill_.Scalar");
  add_kernel<&zeros_>(aten, "zero_");
  add_kernel<&where, kFast, true>(aten, "where.self");
  add_kernel<&where_out>(aten, "where.self_out");
  add_kernel<&masked_fill_>(aten, "masked_fill_.Scalar");
  add_kernel<&masked_fill_tensor_, kFast, true>(aten, "masked_fill_.Tensor");
  add_kernel<&tril_out>(aten, "tril.out");
  add_kernel<&triu_out>(aten, "triu.out");
  add_kernel<&cat_out, kSpeed>(aten, "cat.out");
  add_kernel<&arange_out, kSpeed>(aten, "arange.start_out");
}

}  // namespace ipex::xpu
