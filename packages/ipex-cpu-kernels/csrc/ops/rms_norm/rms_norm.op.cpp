// SPDX-License-Identifier: Apache-2.0
#include "rms_norm/rms_norm.h"

#include "ipex/op_loops.h"

namespace ipex {
namespace {

auto kernel_f32 = IPEX_KERNEL("rms_norm", ipex_k_rms_norm_f32);
auto kernel_bf16 = IPEX_KERNEL("rms_norm", ipex_k_rms_norm_bf16);
auto kernel_f16 = IPEX_KERNEL("rms_norm", ipex_k_rms_norm_f16);

template <class T, class F>
void run(const Kernel<F>& handle, const Rows& x, const Vector& weight, float eps, float offset,
         Tensor& out) {
  F* kernel = handle.get();
  const T* from = static_cast<const T*>(x.data);
  T* y = static_cast<T*>(out.mutable_data_ptr());
  parallel_for(x.rows, row_grain<T>(x.columns), [&](int64_t begin, int64_t end) {
    kernel(from, x.stride, weight.data, weight.is_f32, eps, offset, y, x.columns, begin, end);
  });
}

Tensor rms_norm(const Tensor& x, const OptionalTensor& weight, double eps, double weight_offset) {
  check_tensor("rms_norm", "x", x);
  check_vector("rms_norm", "weight", weight, x);
  Tensor y = new_contiguous_like(x);
  if (x.numel() == 0) return y;
  const Rows rows = as_rows(x);
  const Vector w(weight);
  const float e = static_cast<float>(eps);
  const float offset = static_cast<float>(weight_offset);
  switch (x.scalar_type()) {
    case ScalarType::Float:
      run<float>(kernel_f32, rows, w, e, offset, y);
      break;
    case ScalarType::BFloat16:
      run<BFloat16>(kernel_bf16, rows, w, e, offset, y);
      break;
    default:
      run<Half>(kernel_f16, rows, w, e, offset, y);
      break;
  }
  return y;
}

}  // namespace
}  // namespace ipex

STABLE_TORCH_LIBRARY_IMPL(ipex, CPU, m) { m.impl("rms_norm", TORCH_BOX(&ipex::rms_norm)); }
