// SPDX-License-Identifier: Apache-2.0
// Comparisons on the kernels of compare.sycl.cpp.
#include <ATen/Functions.h>

#include <cmath>

#include "device/core/strided.h"

namespace ipex::xpu {
namespace {

using at::Scalar;
using at::Tensor;
using std::optional;

// Rounded to the dtype as torch does before it compares; nothing where the number does not fit in.
optional<double> rounded(const Scalar& number, at::ScalarType dtype) {
  if (number.isComplex()) return std::nullopt;
  const double value = number.toDouble();
  switch (dtype) {
    case at::kFloat:
      return static_cast<float>(value);
    case at::kHalf:
      return static_cast<float>(c10::Half(static_cast<float>(value)));
    case at::kBFloat16:
      return static_cast<float>(c10::BFloat16(static_cast<float>(value)));
    default:
      if (number.isFloatingPoint() || std::abs(value) > INT32_MAX ||
          (dtype == at::kBool && value != 0 && value != 1))
        return std::nullopt;
      return value;
  }
}
bool compare_number(const char* op, const Tensor& x, const Scalar& number, const Tensor& out) {
  const auto dtype = number_dtype(x.scalar_type());
  const auto value = rounded(number, x.scalar_type());
  if (!dtype || !value || out.scalar_type() != at::kBool) return false;
  auto iter = iterator(out, x);
  return kernel_dtype(x.scalar_type())
             ? launch_strided<2>(iter, kernel_name("compare_number", op, *dtype),
                                 static_cast<float>(*value))
             : launch_strided<2>(iter, kernel_name("compare_number", op, *dtype),
                                 static_cast<long>(*value));
}
bool compare(const char* op, const Tensor& a, const Tensor& b, const Tensor& out) {
  if (b.is_cpu()) return a.is_xpu() && compare_number(op, a, at::_local_scalar_dense(b), out);
  const auto dtype = number_dtype(a.scalar_type());
  if (!dtype || !a.is_xpu() || a.scalar_type() != b.scalar_type() || out.scalar_type() != at::kBool)
    return false;
  auto iter = iterator(out, a, b);
  return launch_strided<3>(iter, kernel_name("compare", op, *dtype));
}
#define COMPARE(op)                                                                                \
  bool op##_out(const Tensor& a, const Tensor& b, Tensor& out) { return compare(#op, a, b, out); } \
  bool op##_number_out(const Tensor& a, const Scalar& b, Tensor& out) {                            \
    return compare_number(#op, a, b, out);                                                         \
  }
COMPARE(eq)
COMPARE(ne)
COMPARE(lt)
COMPARE(le)
COMPARE(gt)
COMPARE(ge)
#undef COMPARE
bool logical_not_out(const Tensor& x, Tensor& out) { return compare_number("eq", x, 0, out); }

}  // namespace

void register_compare() {
  static torch::Library aten(torch::Library::IMPL, "aten", c10::DispatchKey::XPU, __FILE__,
                             __LINE__);
  constexpr auto kFast = KernelSpeed::NotSlower;
#define COMPARE(op)                                            \
  add_kernel<&op##_out, kFast, true>(aten, #op ".Tensor_out"); \
  add_kernel<&op##_number_out>(aten, #op ".Scalar_out");
  COMPARE(eq)
  COMPARE(ne)
  COMPARE(lt)
  COMPARE(le)
  COMPARE(gt)
  COMPARE(ge)
#undef COMPARE
  add_kernel<&logical_not_out>(aten, "logical_not.out");
}

}  // namespace ipex::xpu
