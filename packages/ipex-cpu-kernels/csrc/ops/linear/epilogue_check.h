// SPDX-License-Identifier: Apache-2.0
// Checks of the arguments that follow a matrix product, shared by the glue of linear, woq_linear,
// int8_linear and others; ipex_core.ops.linear has the same checks in Python.
#pragma once

#include <string>
#include <vector>

#include "ipex/epilogue_args.h"
#include "ipex/glue/dispatch.h"

namespace ipex {

// A new contiguous tensor with the shape of x but for its last dimension.
inline Tensor new_like(const Tensor& x, int64_t last) {
  std::vector<int64_t> shape(x.sizes().begin(), x.sizes().end());
  shape.back() = last;
  return new_contiguous(shape.data(), static_cast<int64_t>(shape.size()), x.scalar_type());
}

inline bool parse_activation(const std::string& name, Activation* activation) {
  constexpr const char* kNames[] = {"none", "relu", "gelu", "gelu_tanh", "silu"};
  for (int32_t i = 0; i < 5; ++i) {
    if (name != kNames[i]) continue;
    *activation = static_cast<Activation>(i);
    return true;
  }
  return false;
}

// The optional arguments of such an op.
struct EpilogueTensors {
  const OptionalTensor& bias;
  const OptionalTensor& mul;
  const OptionalTensor& residual;
  const OptionalTensor& residual2;
  const std::string& activation;
  const std::string& gate;
};

// The arguments as kernels take them, with the tensors whose memory they point to.
class CheckedEpilogue {
 public:
  // First check, which says how many rows the weight must have.
  CheckedEpilogue(const char* op, const EpilogueTensors& tensors) : op_(op), tensors_(tensors) {
    IPEX_CHECK(parse_activation(tensors.activation, &args.activation), op,
               ": activation must be one of none, relu, gelu, gelu_tanh, silu, got ",
               tensors.activation);
    if (tensors.gate == "none") return;
    IPEX_CHECK(tensors.gate != "relu" && parse_activation(tensors.gate, &args.activation), op,
               ": gate must be one of none, silu, gelu, gelu_tanh, got ", tensors.gate);
    IPEX_CHECK(tensors.activation == "none", op,
               ": activation must be none where there is a gate, got ", tensors.activation);
    args.gated = true;
  }

  // Rows of the weight, which are the columns of the product.
  int64_t weight_rows(int64_t out_features) const {
    return args.gated ? (out_features + 31) / 32 * 64 : out_features;
  }

  // Second check. y has the shape of x with `out_features` last, and its dtype.
  void check(const Tensor& x, int64_t out_features) {
    check(x, out_features, x.scalar_type(), "x");
  }

  // The same for operands of another dtype than x: the dtype of what messages call `of`.
  void check(const Tensor& x, int64_t out_features, ScalarType operand_dtype, const char* of) {
    dtype_ = operand_dtype;
    of_ = of;
    const int64_t n = weight_rows(out_features);
    if (tensors_.bias) {
      const Tensor& bias = *tensors_.bias;
      const ScalarType dtype = bias.scalar_type();
      IPEX_CHECK(bias.is_cpu(), op_, ": bias must be on the device of x = cpu");
      IPEX_CHECK(dtype == dtype_ || dtype == ScalarType::Float, op_,
                 ": bias must have the dtype of ", of_, " = ", dtype_name(dtype_),
                 " or float32, got ", dtype_name(dtype));
      IPEX_CHECK(bias.dim() == 1 && bias.size(0) == n, op_, ": bias must be 1-D of size ",
                 args.gated ? "of the interleaved weight = " : "out_features = ", n, ", got ",
                 shape_text(bias));
      bias_ = as_contiguous(bias);
      args.bias = bias_->const_data_ptr();
      args.bias_is_f32 = dtype == ScalarType::Float;
    }
    operand("mul", tensors_.mul, x, out_features, &mul_, &args.mul, &args.mul_stride);
    operand("residual", tensors_.residual, x, out_features, &add_, &args.add, &args.add_stride);
    operand("residual2", tensors_.residual2, x, out_features, &add2_, &args.add2,
            &args.add2_stride);
  }

  Epilogue args{};

 private:
  void operand(const char* name, const OptionalTensor& value, const Tensor& x, int64_t out_features,
               Rows* rows, const void** data, int64_t* stride) {
    if (!value) return;
    IPEX_CHECK(value->is_cpu(), op_, ": ", name, " must be on the device of x = cpu");
    IPEX_CHECK(value->scalar_type() == dtype_, op_, ": ", name, " must have the dtype of ", of_,
               " = ", dtype_name(dtype_), ", got ", dtype_name(value->scalar_type()));
    bool same = value->dim() == x.dim();
    for (int64_t i = 0; same && i < x.dim(); ++i)
      same = value->size(i) == (i + 1 < x.dim() ? x.size(i) : out_features);
    if (!same) {
      std::string text;
      for (int64_t i = 0; i + 1 < x.dim(); ++i) text += std::to_string(x.size(i)) + ", ";
      fail(op_, ": ", name, " must have shape [", text, out_features, "], got ",
           shape_text(*value));
    }
    *rows = as_rows(*value);
    *data = rows->data;
    *stride = rows->stride;
  }

  const char* op_;
  const char* of_ = "x";
  ScalarType dtype_ = ScalarType::Float;
  EpilogueTensors tensors_;
  OptionalTensor bias_;
  Rows mul_, add_, add2_;
};

}  // namespace ipex
