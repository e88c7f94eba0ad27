// SPDX-License-Identifier: Apache-2.0
#include "layer_norm/layer_norm.h"

#include "ipex/glue/affine.h"

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
  const RowGroups in(x);
  const Affine affine(weight, bias);
  const float e = static_cast<float>(eps);
  kernels.visit(x.scalar_type(), [&]<class T>(auto* kernel) {
    T* to = static_cast<T*>(y.mutable_data_ptr());
    const int64_t columns = in.columns;
    parallel_for(in.groups * in.rows, row_grain<T>(columns), [&](int64_t begin, int64_t end) {
      in.for_parts<T>(begin, end, [&](const T* from, int64_t first, int64_t count) {
        kernel(from, in.stride, affine.weight.data, affine.bias.data, affine.is_f32, e,
               to + first * columns, columns, 0, count);
      });
    });
  });
  return y;
}

}  // namespace
}  // namespace ipex

STABLE_TORCH_LIBRARY_IMPL(ipex, CPU, m) { IPEX_IMPL(m, "layer_norm", ipex::layer_norm); }
