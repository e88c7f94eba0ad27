// SPDX-License-Identifier: Apache-2.0
// Convolutions by oneDNN where it is there and fast, else as products of matrices
// (convolution.sycl.cpp).
#pragma once

#include <ATen/core/TensorBody.h>

#include <array>
#include <optional>

namespace ipex::xpu {

// Numbers for each spatial dimension, or one for all.
struct Convolution {
  at::IntArrayRef stride, padding, dilation;
  std::int64_t groups = 1;
};

// Whether there can be something on the device for these tensors. The functions below return an
// undefined tensor where there is nothing that may be used after all.
bool convolution_supported(const at::Tensor& input, const at::Tensor& weight);
// `sizes` of the result, if they are not those that follow from the input.
at::Tensor convolve(const at::Tensor& input, const at::Tensor& weight, const Convolution& conv,
                    std::optional<at::IntArrayRef> sizes = std::nullopt);
// The gradient of the input, which is a transposed convolution of `grad` too.
at::Tensor convolve_input_grad(const at::Tensor& grad, const at::Tensor& weight,
                               at::IntArrayRef sizes, const Convolution& conv);
at::Tensor convolve_weight_grad(const at::Tensor& grad, const at::Tensor& input,
                                at::IntArrayRef weight_sizes, const Convolution& conv);

}  // namespace ipex::xpu
