// SPDX-License-Identifier: Apache-2.0
// The ops of static INT8 that ipex_quant has in Python: convolutions on codes and embedding bags on
// 8-bit rows.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace ipex::cpp {

// The ops ipex_quant::int8_conv and int8_conv_sum_, by oneDNN's convolution.
torch::stable::Tensor int8_conv(const torch::stable::Tensor& x, const torch::stable::Tensor& weight,
                                const torch::stable::Tensor& weight_scale, double x_scale,
                                int64_t x_zero, const std::optional<torch::stable::Tensor>& bias,
                                const std::vector<int64_t>& stride,
                                const std::vector<int64_t>& padding,
                                const std::vector<int64_t>& dilation, int64_t groups,
                                const std::string& activation, torch::headeronly::ScalarType dtype,
                                double output_scale, int64_t output_zero,
                                const std::optional<torch::stable::Tensor>& residual,
                                double residual_scale, int64_t residual_zero);
torch::stable::Tensor int8_conv_sum_(
    const torch::stable::Tensor& x, const torch::stable::Tensor& weight,
    const torch::stable::Tensor& weight_scale, double x_scale, int64_t x_zero,
    const std::optional<torch::stable::Tensor>& bias, const std::vector<int64_t>& stride,
    const std::vector<int64_t>& padding, const std::vector<int64_t>& dilation, int64_t groups,
    const std::string& activation, torch::headeronly::ScalarType dtype, double output_scale,
    int64_t output_zero, const torch::stable::Tensor& residual, double residual_scale,
    int64_t residual_zero);

// Gives torch these ops, except where Python has defined them before. Reports failures on standard
// error.
void define_int8_ops();

}  // namespace ipex::cpp
