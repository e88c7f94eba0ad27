// SPDX-License-Identifier: Apache-2.0
#include "add_rms_norm/add_rms_norm.h"

#include "ipex/op_loops.h"

namespace ipex {
namespace {

const auto kernels = IPEX_KERNELS("add_rms_norm", add_rms_norm);

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
  kernels.visit(x.scalar_type(), [&]<class T>(auto* kernel) {
    const T* from = static_cast<const T*>(a.data);
    const T* add = static_cast<const T*>(b.data);
    T* to = static_cast<T*>(y.mutable_data_ptr());
    T* total = static_cast<T*>(sum.mutable_data_ptr());
    parallel_for(a.rows, row_grain<T>(2 * a.columns), [&](int64_t begin, int64_t end) {
      kernel(from, a.stride, add, b.stride, w.data, w.is_f32, e, offset, to, total, a.columns,
             begin, end);
    });
  });
  return {y, sum};
}

}  // namespace
}  // namespace ipex

STABLE_TORCH_LIBRARY_IMPL(ipex, CPU, m) { m.impl("add_rms_norm", TORCH_BOX(&ipex::add_rms_norm)); }
