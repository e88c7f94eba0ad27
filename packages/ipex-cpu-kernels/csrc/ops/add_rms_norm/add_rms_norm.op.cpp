// SPDX-License-Identifier: Apache-2.0
#include "add_rms_norm/add_rms_norm.h"

#include "ipex/glue/in_place.h"
#include "ipex/glue/op_loops.h"

namespace ipex {
namespace {

const auto kernels = IPEX_KERNELS("add_rms_norm", add_rms_norm);
const auto in_place_kernels = IPEX_KERNELS("add_rms_norm_", add_rms_norm);

void check_arguments(const char* op, const Tensor& x, const Tensor& residual,
                     const OptionalTensor& weight) {
  check_tensor(op, "x", x);
  check_like(op, "residual", residual, x);
  check_vector(op, "weight", weight, x);
}

// `sum` is contiguous and may be the residual itself.
template <class Kernels>
void run(const Kernels& dispatch, const Tensor& x, const Tensor& residual,
         const OptionalTensor& weight, double eps, double weight_offset, Tensor& y, Tensor& sum) {
  const Rows a = as_rows(x);
  const Rows b = as_rows(residual);
  const Vector w(weight);
  const float e = static_cast<float>(eps);
  const float offset = static_cast<float>(weight_offset);
  dispatch.visit(x.scalar_type(), [&]<class T>(auto* kernel) {
    const T* from = static_cast<const T*>(a.data);
    const T* add = static_cast<const T*>(b.data);
    T* to = static_cast<T*>(y.mutable_data_ptr());
    T* total = static_cast<T*>(sum.mutable_data_ptr());
    parallel_for(a.rows, row_grain<T>(2 * a.columns), [&](int64_t begin, int64_t end) {
      kernel(from, a.stride, add, b.stride, w.data, w.is_f32, e, offset, to, total, a.columns,
             begin, end);
    });
  });
}

std::tuple<Tensor, Tensor> add_rms_norm(const Tensor& x, const Tensor& residual,
                                        const OptionalTensor& weight, double eps,
                                        double weight_offset) {
  check_arguments("add_rms_norm", x, residual, weight);
  Tensor y = new_contiguous_like(x);
  Tensor sum = new_contiguous_like(x);
  if (x.numel() != 0) run(kernels, x, residual, weight, eps, weight_offset, y, sum);
  return {y, sum};
}

Tensor add_rms_norm_(const Tensor& x, const Tensor& residual, const OptionalTensor& weight,
                     double eps, double weight_offset) {
  check_arguments("add_rms_norm_", x, residual, weight);
  check_not_expanded("add_rms_norm_", "residual", residual);
  Tensor y = new_contiguous_like(x);
  if (x.numel() == 0) return y;
  InPlace both(residual, as_contiguous(residual));
  Tensor sum = both.tensor();
  run(in_place_kernels, x, sum, weight, eps, weight_offset, y, sum);
  both.finish();
  return y;
}

}  // namespace
}  // namespace ipex

STABLE_TORCH_LIBRARY_IMPL(ipex, CPU, m) {
  IPEX_IMPL(m, "add_rms_norm", ipex::add_rms_norm);
  IPEX_IMPL(m, "add_rms_norm_", ipex::add_rms_norm_);
}
