// SPDX-License-Identifier: Apache-2.0
#include "add_rms_norm/add_rms_norm.h"

#include "ipex/op_loops.h"

namespace ipex {
namespace {

auto kernel_f32 = IPEX_KERNEL("add_rms_norm", ipex_k_add_rms_norm_f32);
auto kernel_bf16 = IPEX_KERNEL("add_rms_norm", ipex_k_add_rms_norm_bf16);
auto kernel_f16 = IPEX_KERNEL("add_rms_norm", ipex_k_add_rms_norm_f16);

template <class T, class F>
void run(const Kernel<F>& handle, const Rows& x, const Rows& residual, const Vector& weight,
         float eps, float offset, Tensor& out, Tensor& total) {
  F* kernel = handle.get();
  const T* a = static_cast<const T*>(x.data);
  const T* b = static_cast<const T*>(residual.data);
  T* y = static_cast<T*>(out.mutable_data_ptr());
  T* sum = static_cast<T*>(total.mutable_data_ptr());
  parallel_for(x.rows, row_grain<T>(2 * x.columns), [&](int64_t begin, int64_t end) {
    kernel(a, x.stride, b, residual.stride, weight.data, weight.is_f32, eps, offset, y, sum,
           x.columns, begin, end);
  });
}

std::tuple<Tensor, Tensor> add_rms_norm(const Tensor& x, const Tensor& residual,
                                        const OptionalTensor& weight, double eps,
                                        double weight_offset) {
  check_tensor("add_rms_norm", "x", x);
  check_like("add_rms_norm", "residual", residual, x);
  check_vector("add_rms_norm", "weight", weight, x);
  Tensor y = new_contiguous_like(x);
  Tensor sum = new_contiguous_like(x);
  if (x.numel() == 0) return {y, sum};
  const Rows a = as_rows(x);
  const Rows b = as_rows(residual);
  const Vector w(weight);
  const float e = static_cast<float>(eps);
  const float offset = static_cast<float>(weight_offset);
  switch (x.scalar_type()) {
    case ScalarType::Float:
      run<float>(kernel_f32, a, b, w, e, offset, y, sum);
      break;
    case ScalarType::BFloat16:
      run<BFloat16>(kernel_bf16, a, b, w, e, offset, y, sum);
      break;
    default:
      run<Half>(kernel_f16, a, b, w, e, offset, y, sum);
      break;
  }
  return {y, sum};
}

}  // namespace
}  // namespace ipex

STABLE_TORCH_LIBRARY_IMPL(ipex, CPU, m) { m.impl("add_rms_norm", TORCH_BOX(&ipex::add_rms_norm)); }
