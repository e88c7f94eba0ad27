// SPDX-License-Identifier: Apache-2.0
#include "layer_norm/layer_norm.h"

#include "ipex/affine.h"

namespace ipex {
namespace {

auto kernel_f32 = IPEX_KERNEL("layer_norm", ipex_k_layer_norm_f32);
auto kernel_bf16 = IPEX_KERNEL("layer_norm", ipex_k_layer_norm_bf16);
auto kernel_f16 = IPEX_KERNEL("layer_norm", ipex_k_layer_norm_f16);

template <class T, class F>
void run(const Kernel<F>& handle, const Rows& x, const Affine& affine, float eps, Tensor& out) {
  F* kernel = handle.get();
  const T* from = static_cast<const T*>(x.data);
  T* y = static_cast<T*>(out.mutable_data_ptr());
  parallel_for(x.rows, row_grain<T>(x.columns), [&](int64_t begin, int64_t end) {
    kernel(from, x.stride, affine.weight.data, affine.bias.data, affine.is_f32, eps, y, x.columns,
           begin, end);
  });
}

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
  switch (x.scalar_type()) {
    case ScalarType::Float:
      run<float>(kernel_f32, rows, affine, e, y);
      break;
    case ScalarType::BFloat16:
      run<BFloat16>(kernel_bf16, rows, affine, e, y);
      break;
    default:
      run<Half>(kernel_f16, rows, affine, e, y);
      break;
  }
  return y;
}

}  // namespace
}  // namespace ipex

STABLE_TORCH_LIBRARY_IMPL(ipex, CPU, m) { m.impl("layer_norm", TORCH_BOX(&ipex::layer_norm)); }
