// SPDX-License-Identifier: Apache-2.0
#include "norm_quant/norm_quant.h"

#include <atomic>
#include <cmath>
#include <vector>

#include "ipex/glue/affine.h"
#include "ipex/glue/in_place.h"
#include "runtime/scratch.h"

namespace ipex {
namespace {

const auto rms_kernels = IPEX_KERNELS("rms_norm_quant", rms_norm_quant);
const auto add_rms_kernels = IPEX_KERNELS("add_rms_norm_quant_", rms_norm_quant);
const auto layer_kernels = IPEX_KERNELS("layer_norm_quant", layer_norm_quant);
const auto add_layer_kernels = IPEX_KERNELS("add_layer_norm_quant_", layer_norm_quant);

using Quantized = std::tuple<Tensor, Tensor>;  // codes, scale

void check_scale(const char* op, const OptionalTensor& scale) {
  if (!scale) return;
  IPEX_CHECK(scale->is_cpu(), op, ": scale must be on the device of x = cpu");
  IPEX_CHECK(scale->scalar_type() == ScalarType::Float, op, ": scale must have dtype float32, got ",
             dtype_name(scale->scalar_type()));
  IPEX_CHECK(scale->numel() == 1, op, ": scale must have one element, got ", shape_text(*scale));
}

float scale_value(const char* op, const OptionalTensor& scale) {
  if (!scale) return 0.0f;
  const float value = *static_cast<const float*>(scale->const_data_ptr());
  IPEX_CHECK(value >= 0x1p-120f && std::isfinite(value), op,
             ": scale must be finite and at least 2^-120, got ", value);
  return value;
}

// New codes and scales, and the part of the work that all forms share.
Quantized new_results(const char* op, const Tensor& x, const OptionalTensor& scale,
                      NormQuant& work) {
  work.static_scale = scale_value(op, scale);
  Tensor q = new_contiguous(x.sizes().data(), x.dim(), ScalarType::Char);
  std::vector<int64_t> sizes(x.sizes().begin(), x.sizes().end());
  sizes.back() = 1;
  Tensor scales = new_contiguous(sizes.data(), scale ? 0 : x.dim(), ScalarType::Float);
  work.q = static_cast<uint8_t*>(q.mutable_data_ptr());
  work.scale = static_cast<float*>(scales.mutable_data_ptr());
  if (scale) *work.scale = work.static_scale;
  return {std::move(q), std::move(scales)};
}

void check_rows(const char* op, const Tensor& x, const Tensor* residual) {
  check_tensor(op, "x", x);
  if (residual == nullptr) return;
  check_like(op, "residual", *residual, x);
  check_not_expanded(op, "residual", *residual);
}

template <class Kernels>
void run_rows(const Kernels& kernels, const char* op, const Tensor& x, NormQuant& work) {
  const Rows in = as_rows(x);
  work.x = in.data;
  work.x_stride = in.stride;
  work.cols = in.columns;
  std::atomic<bool> no_memory{false};
  kernels.visit(x.scalar_type(), [&]<class T>(auto* kernel) {
    const int64_t bytes = (in.columns + 64) * static_cast<int64_t>(sizeof(T));
    const int64_t grain = row_grain<T>(std::max<int64_t>(1, in.columns));
    parallel_for(in.rows, grain, [&](int64_t begin, int64_t end) {
      T* row = reinterpret_cast<T*>(Scratch<Area::kNormQuant>::get(bytes));
      if (row == nullptr)
        no_memory = true;
      else
        kernel(&work, row, begin, end);
    });
  });
  IPEX_CHECK(!no_memory, op, ": not enough memory for a row of ", in.columns, " elements");
}

// The residual may be null; otherwise x is added to it before.
template <class Kernels>
void run(const Kernels& kernels, const char* op, const Tensor& x, const Tensor* residual,
         NormQuant& work) {
  if (residual == nullptr) {
    run_rows(kernels, op, x, work);
    return;
  }
  InPlace sum(*residual, as_contiguous(*residual));
  work.residual = sum.tensor().mutable_data_ptr();
  run_rows(kernels, op, x, work);
  sum.finish();
}

template <class Kernels>
Quantized rms(const Kernels& kernels, const char* op, const Tensor& x, const Tensor* residual,
              const OptionalTensor& weight, double eps, double weight_offset,
              const OptionalTensor& scale) {
  check_rows(op, x, residual);
  check_vector(op, "weight", weight, x);
  check_scale(op, scale);
  NormQuant work;
  Quantized results = new_results(op, x, scale, work);
  const Vector w(weight);
  work.weight = w.data;
  work.params_are_f32 = w.is_f32;
  work.eps = static_cast<float>(eps);
  work.weight_offset = static_cast<float>(weight_offset);
  run(kernels, op, x, residual, work);
  return results;
}

template <class Kernels>
Quantized layer(const Kernels& kernels, const char* op, const Tensor& x, const Tensor* residual,
                const OptionalTensor& weight, const OptionalTensor& bias, double eps,
                const OptionalTensor& scale) {
  check_rows(op, x, residual);
  check_vector(op, "weight", weight, x);
  check_vector(op, "bias", bias, x);
  check_scale(op, scale);
  NormQuant work;
  Quantized results = new_results(op, x, scale, work);
  const Affine affine(weight, bias);
  work.weight = affine.weight.data;
  work.bias = affine.bias.data;
  work.params_are_f32 = affine.is_f32;
  work.eps = static_cast<float>(eps);
  run(kernels, op, x, residual, work);
  return results;
}

Quantized rms_norm_quant(const Tensor& x, const OptionalTensor& weight, double eps,
                         double weight_offset, const OptionalTensor& scale) {
  return rms(rms_kernels, "rms_norm_quant", x, nullptr, weight, eps, weight_offset, scale);
}
Quantized add_rms_norm_quant_(const Tensor& x, const Tensor& residual, const OptionalTensor& weight,
                              double eps, double weight_offset, const OptionalTensor& scale) {
  return rms(add_rms_kernels, "add_rms_norm_quant_", x, &residual, weight, eps, weight_offset,
             scale);
}
Quantized layer_norm_quant(const Tensor& x, const OptionalTensor& weight,
                           const OptionalTensor& bias, double eps, const OptionalTensor& scale) {
  return layer(layer_kernels, "layer_norm_quant", x, nullptr, weight, bias, eps, scale);
}
Quantized add_layer_norm_quant_(const Tensor& x, const Tensor& residual,
                                const OptionalTensor& weight, const OptionalTensor& bias,
                                double eps, const OptionalTensor& scale) {
  return layer(add_layer_kernels, "add_layer_norm_quant_", x, &residual, weight, bias, eps, scale);
}

}  // namespace
}  // namespace ipex

STABLE_TORCH_LIBRARY_IMPL(ipex, CPU, m) {
  IPEX_IMPL(m, "rms_norm_quant", ipex::rms_norm_quant);
  IPEX_IMPL(m, "add_rms_norm_quant_", ipex::add_rms_norm_quant_);
  IPEX_IMPL(m, "layer_norm_quant", ipex::layer_norm_quant);
  IPEX_IMPL(m, "add_layer_norm_quant_", ipex::add_layer_norm_quant_);
}
