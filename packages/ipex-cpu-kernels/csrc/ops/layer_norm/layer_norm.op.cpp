// SPDX-License-Identifier: Apache-2.0
#include "layer_norm/layer_norm.h"

#include "ipex/affine.h"

namespace ipex {
namespace {

const auto kernels = IPEX_KERNELS("layer_norm", layer_norm);

Tensor layer_norm(const Tensor& x, const OptionalTensor& weight, const OptionalTensor& bias,
                  double eps) {
  check_tensor("layer_norm", "x", x);
  check_vector("layer_norm", "weight", weight, x);
  check_vector("layer_norm", "bias", bias, x);
  Tensor y = new_contiguous_like(x);
  if (x.numel() == 0) return y;
  const Rows rows = as_rows(x);
  const Affine affine(weight, bias);
  const float e = static_cast<float>(eps);
  kernels.visit(x.scalar_type(), [&]<class T>(auto* kernel) {
    const T* from = static_cast<const T*>(rows.data);
    T* to = static_cast<T*>(y.mutable_data_ptr());
    parallel_for(rows.rows, row_grain<T>(rows.columns), [&](int64_t begin, int64_t end) {
      kernel(from, rows.stride, affine.weight.data, affine.bias.data, affine.is_f32, e, to,
             rows.columns, begin, end);
    });
  });
  return y;
}

}  // namespace
}  // namespace ipex

STABLE_TORCH_LIBRARY_IMPL(ipex, CPU, m) { m.impl("layer_norm", TORCH_BOX(&ipex::layer_norm)); }
