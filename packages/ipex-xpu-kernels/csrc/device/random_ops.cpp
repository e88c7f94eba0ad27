// SPDX-License-Identifier: Apache-2.0
// Dropout on the kernels of random.sycl.cpp.
#include <ATen/Functions.h>

#include <tuple>

#include "kernel_ops.h"

namespace ipex::xpu {
namespace {

using at::Tensor;
using std::optional;

optional<std::tuple<Tensor, Tensor>> native_dropout(const Tensor& x, double p,
                                                    optional<bool> train) {
  const auto dtype = kernel_dtype(x.scalar_type());
  if (!dtype || !train.value_or(true) || !(p > 0 && p < 1)) return std::nullopt;
  const Tensor dense = x.contiguous();
  const Tensor y = at::empty_like(dense);
  const Tensor mask = at::empty(x.sizes(), x.options().dtype(at::kBool));
  const auto n = static_cast<unsigned long>(x.numel());
  const unsigned long quarter = (n + 3) / 4;
  const auto [seed, offset] =
      next_philox(default_generator(static_cast<c10::DeviceIndex>(x.get_device())), 4);
  launch_for(x, kernel_name("dropout", *dtype), static_cast<std::int64_t>(quarter), data(dense),
             out_data(y), out_data(mask), n, quarter, static_cast<float>(p),
             static_cast<float>(1 / (1 - p)), static_cast<unsigned long>(seed),
             static_cast<unsigned long>(offset));
  return std::tuple(y, mask);
}

optional<Tensor> native_dropout_backward(const Tensor& grad, const Tensor& mask, double scale) {
  const auto dtype = kernel_dtype(grad.scalar_type());
  if (!dtype || mask.scalar_type() != at::kBool || mask.sizes() != grad.sizes())
    return std::nullopt;
  const Tensor dense = grad.contiguous();
  const Tensor kept = mask.contiguous();
  const Tensor y = at::empty_like(dense);
  launch_for(grad, kernel_name("dropout_backward", *dtype), grad.numel(), data(dense), data(kept),
             out_data(y), static_cast<unsigned long>(grad.numel()), static_cast<float>(scale));
  return y;
}

}  // namespace

void register_random() {
  static torch::Library aten(torch::Library::IMPL, "aten", c10::DispatchKey::XPU, __FILE__,
                             __LINE__);
  add_kernel<&native_dropout>(aten, "native_dropout");
  add_kernel<&native_dropout_backward>(aten, "native_dropout_backward");
}

}  // namespace ipex::xpu
