// SPDX-License-Identifier: Apache-2.0
#include "int8_linear.h"

#include <cmath>

#include "int8_linear/activations.h"
#include "int8_linear/int8_panels.h"
#include "ipex/glue/gemm_schedule.h"
#include "linear/epilogue_check.h"

namespace ipex {
namespace {

constexpr const char* kOp = "int8_linear";

const auto kernels = IPEX_KERNELS("int8_linear", int8_linear);
const Kernel<decltype(ipex_k_int8_linear_codes)> codes_kernel(kOp, "ipex_k_int8_linear_codes");
const auto row_kernels = IPEX_KERNELS("int8_linear", int8_linear_rows);
const auto static_kernels = IPEX_KERNELS("int8_linear", int8_linear_static_rows);
const auto range_kernels = IPEX_KERNELS("int8_linear", quantize_range);
const Kernel<decltype(ipex_k_int8_linear_copy_rows)> copy_kernel(kOp,
                                                                 "ipex_k_int8_linear_copy_rows");

const Tensor& check_weight_scale(const Tensor& scale, int64_t n) {
  IPEX_CHECK(scale.is_cpu(), kOp, ": weight_scale must be on the device of x = cpu");
  IPEX_CHECK(scale.scalar_type() == ScalarType::Float, kOp,
             ": weight_scale must have dtype float32, got ", dtype_name(scale.scalar_type()));
  IPEX_CHECK(scale.numel() == 1 || (scale.dim() == 1 && scale.size(0) == n), kOp,
             ": weight_scale must have one element or one for each row of the weight = ", n,
             ", got ", shape_text(scale));
  return scale;
}

Tensor int8_linear(const Tensor& x, const Tensor& packed_weight, int64_t out_features,
                   const Tensor& weight_scale, const OptionalTensor& x_scale,
                   const OptionalTensor& x_zero, const OptionalTensor& bias,
                   const OptionalTensor& residual, std::string activation,
                   const OptionalTensor& mul, const OptionalTensor& residual2, std::string gate,
                   std::string act_quant, bool symmetric, std::optional<ScalarType> dtype,
                   double output_scale, int64_t output_zero) {
  const bool codes = is_code_dtype(x.scalar_type());
  IPEX_CHECK(codes || is_kernel_dtype(x.scalar_type()), kOp,
             ": x must have dtype float32, bfloat16, float16, int8, uint8, got ",
             dtype_name(x.scalar_type()));
  IPEX_CHECK(x.dim() >= 1, kOp, ": x must have at least 1 dimension(s), got ", x.dim(), "-D");
  IPEX_CHECK(out_features > 0, kOp, ": out_features must be positive, got ", out_features);
  const int64_t k = x.size(x.dim() - 1);
  CheckedEpilogue epilogue(kOp, {bias, mul, residual, residual2, activation, gate});
  const int64_t n = epilogue.weight_rows(out_features);
  check_int8_packed(kOp, "packed_weight", packed_weight, n, k);
  const Tensor scale = as_contiguous(check_weight_scale(weight_scale, n));
  IPEX_CHECK(act_quant == "per_token" || act_quant == "per_tensor", kOp,
             ": act_quant must be per_token or per_tensor, got ", act_quant);
  int64_t rows = 1;
  for (int64_t i = 0; i + 1 < x.dim(); ++i) rows *= x.size(i);
  const ActivationArguments quantization{x_scale, x_zero, act_quant == "per_token", symmetric};
  check_activations(kOp, x, rows, quantization);
  const ScalarType out = dtype ? *dtype : codes ? ScalarType::Float : x.scalar_type();
  IPEX_CHECK(is_kernel_dtype(out) || is_code_dtype(out), kOp,
             ": dtype must be float32, bfloat16, float16, int8 or uint8, got ", dtype_name(out));
  const bool to_codes = is_code_dtype(out);
  const auto y_scale = static_cast<float>(output_scale);
  const int64_t low = out == ScalarType::Char ? -128 : 0;
  if (to_codes) {
    IPEX_CHECK(y_scale >= kSmallestScale && std::isfinite(y_scale), kOp,
               ": output_scale must be finite and at least 2^-120, got ", output_scale);
    IPEX_CHECK(output_zero >= low && output_zero <= low + 255, kOp, ": output_zero must be in [",
               low, ", ", low + 255, "], got ", output_zero);
  }
  epilogue.check(x, out_features, to_codes ? ScalarType::Float : out, "the result");

  std::vector<int64_t> sizes(x.sizes().begin(), x.sizes().end());
  sizes.back() = out_features;
  Tensor y = new_contiguous(sizes.data(), x.dim(), out);
  const Int8Layout at(n, k);
  const Activations activations(
      kOp, x, at.k, quantization,
      ActivationKernels{row_kernels, static_kernels, copy_kernel, range_kernels});
  const char* packed = static_cast<const char*>(packed_weight.const_data_ptr());
  Int8LinearArgs args{};
  activations.fill(&args);
  args.sums = reinterpret_cast<const int32_t*>(packed + sizeof(PackedHeader));
  args.weight = reinterpret_cast<const int8_t*>(packed + at.panels);
  args.weight_scale = static_cast<const float*>(scale.const_data_ptr());
  args.weight_step = scale.numel() == 1 ? 0 : 1;
  args.y = y.mutable_data_ptr();
  args.n = out_features;
  args.k = at.k;
  args.weight_rows = n;
  args.epilogue = epilogue.args;
  args.y_scale = y_scale;
  args.y_zero = static_cast<int32_t>(output_zero);
  args.y_signed = out == ScalarType::Char;

  const GemmShape shape{rows, at.columns / kPackedPanel, at.k, epilogue.args.gated ? 2 : 1,
                        uses_tiles(ScalarType::Char)};
  const auto run = [&](auto* kernel) {
    run_gemm(shape, shape.on_tiles() ? 192 : block_of_rows(rows), 1 << 20,
             [&](int64_t row_begin, int64_t row_end, int64_t panel_begin, int64_t panel_end) {
               kernel(&args, row_begin, row_end, panel_begin, panel_end);
             });
  };
  if (to_codes)
    run(codes_kernel.get());
  else
    kernels.visit(out, [&]<class T>(auto* kernel) { run(kernel); });
  return y;
}

}  // namespace
}  // namespace ipex

STABLE_TORCH_LIBRARY_IMPL(ipex, CPU, m) { IPEX_IMPL(m, "int8_linear", ipex::int8_linear); }
