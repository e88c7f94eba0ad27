// SPDX-License-Identifier: Apache-2.0
// Dropout on the kernels of random.sycl.cpp.
#include <ATen/Functions.h>

#include <tuple>

#include "device/ops/random/random_ops.h"

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
  const auto n = ulong(x.numel());
  const unsigned long quarter = (n + 3) / 4;
  const Philox philox = draw_from(x, std::nullopt);
  launch_for(x, kernel_name("dropout", *dtype), static_cast<std::int64_t>(quarter), data(dense),
             out_data(y), out_data(mask), n, quarter, static_cast<float>(p),
             static_cast<float>(1 / (1 - p)), philox.seed, philox.offset);
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
             out_data(y), ulong(grad.numel()), static_cast<float>(scale));
  return y;
}

}  // namespace

void register_dropout(torch::Library& aten) {
  add_kernel<&native_dropout>(aten, "native_dropout");
  add_kernel<&native_dropout_backward>(aten, "native_dropout_backward");
}

}  // namespace ipex::xpu
