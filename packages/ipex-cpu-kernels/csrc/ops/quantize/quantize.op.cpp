// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <vector>

#include "ipex/glue/op_loops.h"
#include "quantize/quantize.h"
#include "quantize/tensor_range.h"

namespace ipex {
namespace {

const auto token_kernels = IPEX_KERNELS("quantize_per_token", quantize_per_token);
const auto range_kernels = IPEX_KERNELS("quantize_per_tensor", quantize_range);
const auto with_kernels = IPEX_KERNELS("quantize_per_tensor", quantize_with);

using Quantized = std::tuple<Tensor, Tensor, Tensor>;  // codes, scale, zero point

Tensor new_codes(const Tensor& x, bool symmetric) {
  return new_contiguous(x.sizes().data(), x.dim(), symmetric ? ScalarType::Char : ScalarType::Byte);
}

Quantized quantize_per_token(const Tensor& x, bool symmetric) {
  check_tensor("quantize_per_token", "x", x);
  Tensor q = new_codes(x, symmetric);
  std::vector<int64_t> sizes(x.sizes().begin(), x.sizes().end());
  sizes.back() = 1;
  Tensor scale = new_contiguous(sizes.data(), x.dim(), ScalarType::Float);
  Tensor zero = new_contiguous(sizes.data(), x.dim(), ScalarType::Int);
  const Rows in = as_rows(x);
  auto* codes = static_cast<uint8_t*>(q.mutable_data_ptr());
  auto* scales = static_cast<float*>(scale.mutable_data_ptr());
  auto* zeros = static_cast<int32_t*>(zero.mutable_data_ptr());
  token_kernels.visit(x.scalar_type(), [&]<class T>(auto* kernel) {
    const T* from = static_cast<const T*>(in.data);
    const int64_t grain = row_grain<T>(std::max<int64_t>(in.columns, 1));
    parallel_for(in.rows, grain, [&](int64_t begin, int64_t end) {
      kernel(from + begin * in.stride, in.stride, end - begin, in.columns, symmetric,
             codes + begin * in.columns, scales + begin, zeros + begin);
    });
  });
  return {std::move(q), std::move(scale), std::move(zero)};
}

void check_one(const char* name, const Tensor& value, ScalarType dtype, const char* dtype_text) {
  const char* op = "quantize_per_tensor";
  IPEX_CHECK(value.is_cpu(), op, ": ", name, " must be on the device of x = cpu");
  IPEX_CHECK(value.scalar_type() == dtype, op, ": ", name, " must have dtype ", dtype_text,
             ", got ", dtype_name(value.scalar_type()));
  IPEX_CHECK(value.numel() == 1, op, ": ", name, " must have one element, got ", shape_text(value));
}

Quantized quantize_per_tensor(const Tensor& x, const OptionalTensor& scale,
                              const OptionalTensor& zero, bool symmetric) {
  const char* op = "quantize_per_tensor";
  check_tensor(op, "x", x, 0);
  if (scale) check_one("scale", *scale, ScalarType::Float, "float32");
  if (zero) {
    IPEX_CHECK(scale.has_value(), op, ": zero must be None without scale, got a tensor");
    IPEX_CHECK(!symmetric, op, ": zero must be None for symmetric codes, got a tensor");
    check_one("zero", *zero, ScalarType::Int, "int32");
  }
  const int64_t n = x.numel();
  const Tensor plain = as_contiguous(x);
  TensorScale by;
  if (scale) {
    by.scale = *static_cast<const float*>(scale->const_data_ptr());
    if (zero) by.zero = *static_cast<const int32_t*>(zero->const_data_ptr());
    check_given_scale(op, "scale", by.scale);
    IPEX_CHECK(by.zero >= 0 && by.zero <= 255, op, ": zero must be in [0, 255], got ", by.zero);
  } else {
    by = find_tensor_scale(range_kernels, as_rows(plain), x.scalar_type(), symmetric);
  }
  Tensor q = new_codes(x, symmetric);
  Tensor new_scale = new_contiguous(nullptr, 0, ScalarType::Float);
  Tensor new_zero = new_contiguous(nullptr, 0, ScalarType::Int);
  *static_cast<float*>(new_scale.mutable_data_ptr()) = by.scale;
  *static_cast<int32_t*>(new_zero.mutable_data_ptr()) = by.zero;
  auto* codes = static_cast<uint8_t*>(q.mutable_data_ptr());
  with_kernels.visit(x.scalar_type(), [&]<class T>(auto* kernel) {
    const T* from = static_cast<const T*>(plain.const_data_ptr());
    parallel_for(n, row_grain<T>(1), [&](int64_t begin, int64_t end) {
      kernel(from + begin, end - begin, by.scale, by.zero, symmetric, codes + begin);
    });
  });
  return {std::move(q), std::move(new_scale), std::move(new_zero)};
}

}  // namespace
}  // namespace ipex

STABLE_TORCH_LIBRARY_IMPL(ipex, CPU, m) {
  IPEX_IMPL(m, "quantize_per_token", ipex::quantize_per_token);
  IPEX_IMPL(m, "quantize_per_tensor", ipex::quantize_per_tensor);
}
