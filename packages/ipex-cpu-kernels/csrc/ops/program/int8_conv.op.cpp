// SPDX-License-Identifier: Apache-2.0
// Convolutions on 8-bit codes. oneDNN computes them, on threads of its own.
#include "cpp/int8_conv.h"

#include <algorithm>
#include <iterator>

#include "ipex/glue/dispatch.h"
#include "program/program.h"

namespace ipex::program {
namespace {

using Ints = std::vector<int64_t>;

constexpr const char* kOp = "int8_conv";
constexpr const char* kActivations[] = {"none", "relu", "relu6", "silu"};
constexpr int64_t kMost = 4096;  // beyond it sizes could overflow

void check_numbers(const char* name, const Ints& values, size_t count, int64_t least) {
  IPEX_CHECK(values.size() == count, kOp, ": ", name, " must have ", count, " numbers, got ",
             values.size());
  for (const int64_t value : values)
    IPEX_CHECK(value >= least && value <= kMost, kOp, ": ", name, " must be in [", least, ", ",
               kMost, "], got ", value);
}

void check_rows(const char* name, const Tensor& value, int64_t rows) {
  IPEX_CHECK(value.scalar_type() == ScalarType::Float, kOp, ": ", name,
             " must have dtype float32, got ", dtype_name(value.scalar_type()));
  IPEX_CHECK(value.dim() == 1 && value.size(0) == rows && value.is_contiguous(), kOp, ": ", name,
             " must be contiguous of shape [", rows, "], got ", shape_text(value));
}

void check_step(const char* name, double scale, int64_t zero) {
  IPEX_CHECK(scale > 0, kOp, ": ", name, "_scale must be positive, got ", scale);
  IPEX_CHECK(zero >= 0 && zero < 256, kOp, ": ", name, "_zero must be in [0, 256), got ", zero);
}

bool is_operand(const Tensor& x) {
  return x.scalar_type() == ScalarType::Byte || is_kernel_dtype(x.scalar_type());
}

// oneDNN reads as many numbers as the sizes say.
void check(const Tensor& x, const Tensor& weight, const Tensor& weight_scale, double x_scale,
           int64_t x_zero, const OptionalTensor& bias, const Ints& stride, const Ints& padding,
           const Ints& dilation, int64_t groups, const std::string& activation, ScalarType dtype,
           double output_scale, int64_t output_zero, const OptionalTensor& residual,
           double residual_scale, int64_t residual_zero) {
  IPEX_CHECK(is_operand(x), kOp, ": x must have dtype uint8, float32, bfloat16, float16, got ",
             dtype_name(x.scalar_type()));
  IPEX_CHECK(weight.scalar_type() == ScalarType::Char, kOp, ": weight must have dtype int8, got ",
             dtype_name(weight.scalar_type()));
  IPEX_CHECK(weight.dim() >= 3 && weight.dim() <= 5 && weight.numel() > 0, kOp,
             ": weight must be 3-D to 5-D and not empty, got ", shape_text(weight));
  const int64_t dims = weight.dim() - 2, rows = weight.size(0);
  check_numbers("stride", stride, static_cast<size_t>(dims), 1);
  check_numbers("padding", padding, static_cast<size_t>(dims), 0);
  check_numbers("dilation", dilation, static_cast<size_t>(dims), 1);
  IPEX_CHECK(groups > 0 && rows % groups == 0, kOp, ": groups must be a divisor of ", rows,
             ", got ", groups);
  check_rows("weight_scale", weight_scale, rows);
  if (bias) check_rows("bias", *bias, rows);
  IPEX_CHECK(std::find(std::begin(kActivations), std::end(kActivations), activation) !=
                 std::end(kActivations),
             kOp, ": activation must be one of none, relu, relu6, silu, got ", activation);
  IPEX_CHECK(
      dtype == ScalarType::Byte || dtype == ScalarType::Float || dtype == ScalarType::BFloat16, kOp,
      ": dtype must be uint8, float32, bfloat16, got ", dtype_name(dtype));
  const int64_t lead = x.dim() - dims - 1, channels = weight.size(1) * groups;
  IPEX_CHECK((lead == 0 || lead == 1) && x.size(lead) == channels, kOp, ": x must have ", dims,
             " dimensions behind ", channels, " channels, got ", shape_text(x));
  Ints sizes;
  if (lead) sizes.push_back(x.size(0));
  sizes.push_back(rows);
  for (int64_t i = 0; i < dims; ++i) {
    const auto at = static_cast<size_t>(i);
    const int64_t size = x.size(lead + 1 + i);
    const int64_t window = dilation[at] * (weight.size(2 + i) - 1) + 1;
    const int64_t room = size + 2 * padding[at] - window;
    IPEX_CHECK(size > 0 && room >= 0, kOp, ": x must have room for a window of ", window,
               " in dimension ", lead + 1 + i, ", got ", shape_text(x));
    sizes.push_back(room / stride[at] + 1);
  }
  IPEX_CHECK(dtype == ScalarType::Byte || (output_scale == 1 && output_zero == 0), kOp,
             ": output_scale, output_zero must be 1 and 0 for a result that is no codes, got ",
             output_scale, ", ", output_zero);
  check_step("x", x_scale, x_zero);
  check_step("output", output_scale, output_zero);
  check_step("residual", residual_scale, residual_zero);
  if (!residual) return;
  IPEX_CHECK(is_operand(*residual), kOp,
             ": residual must have dtype uint8, float32, bfloat16, float16, got ",
             dtype_name(residual->scalar_type()));
  // oneDNN has no others behind an addition.
  IPEX_CHECK(dims == 3 || activation == "none" || activation == "relu", kOp,
             ": activation must be none or relu behind a residual, got ", activation);
  const auto given = residual->sizes();
  IPEX_CHECK(std::equal(given.begin(), given.end(), sizes.begin(), sizes.end()), kOp,
             ": residual must have shape ", list_text(sizes), ", got ", shape_text(*residual));
}

Tensor int8_conv(const Tensor& x, const Tensor& weight, const Tensor& weight_scale, double x_scale,
                 int64_t x_zero, const OptionalTensor& bias, const Ints& stride,
                 const Ints& padding, const Ints& dilation, int64_t groups,
                 const std::string& activation, ScalarType dtype, double output_scale,
                 int64_t output_zero, const OptionalTensor& residual, double residual_scale,
                 int64_t residual_zero) {
  check(x, weight, weight_scale, x_scale, x_zero, bias, stride, padding, dilation, groups,
        activation, dtype, output_scale, output_zero, residual, residual_scale, residual_zero);
  return cpp::int8_conv(x, weight, weight_scale, x_scale, x_zero, bias, stride, padding, dilation,
                        groups, activation, dtype, output_scale, output_zero, residual,
                        residual_scale, residual_zero);
}

Tensor int8_conv_sum_(const Tensor& x, const Tensor& weight, const Tensor& weight_scale,
                      double x_scale, int64_t x_zero, const OptionalTensor& bias,
                      const Ints& stride, const Ints& padding, const Ints& dilation, int64_t groups,
                      const std::string& activation, ScalarType dtype, double output_scale,
                      int64_t output_zero, const Tensor& residual, double residual_scale,
                      int64_t residual_zero) {
  check(x, weight, weight_scale, x_scale, x_zero, bias, stride, padding, dilation, groups,
        activation, dtype, output_scale, output_zero, residual, residual_scale, residual_zero);
  return cpp::int8_conv_sum_(x, weight, weight_scale, x_scale, x_zero, bias, stride, padding,
                             dilation, groups, activation, dtype, output_scale, output_zero,
                             residual, residual_scale, residual_zero);
}

const bool registered = [] {
  add("int8_conv", Adapter<&int8_conv>::entry());
  add("int8_conv_sum_", Adapter<&int8_conv_sum_>::entry());
  return true;
}();

}  // namespace

bool has_own_threads(const std::string& op) { return op == "int8_conv" || op == "int8_conv_sum_"; }

}  // namespace ipex::program
