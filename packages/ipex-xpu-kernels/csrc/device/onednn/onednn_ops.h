// SPDX-License-Identifier: Apache-2.0
// Products of matrices and convolutions by oneDNN, where it is installed. Each function returns
// false, having done nothing, where it is not, or has no fast implementation for what is asked.
#pragma once

#include <ATen/core/TensorBody.h>

#include "device/ops/conv/convolution_ops.h"

namespace ipex::xpu {

// As matmul_kernel.
bool onednn_matmul(const at::Tensor& out, const at::Tensor& a, const at::Tensor& b,
                   const at::Tensor* addend, float beta, float alpha);

// Which of the tensors of a convolution is the result; it has been made by the caller.
enum class ConvolutionResult : std::uint8_t { Output, InputGradient, WeightGradient };
bool onednn_convolution(ConvolutionResult result, const at::Tensor& input, const at::Tensor& weight,
                        const at::Tensor& output, const Convolution& conv);

}  // namespace ipex::xpu
