// SPDX-License-Identifier: Apache-2.0
#include "rms_norm/rms_norm.h"

#include "ipex/glue/op_loops.h"

namespace ipex {
namespace {

const auto kernels = IPEX_KERNELS("rms_norm", rms_norm);

Tensor rms_norm(const Tensor& x, const OptionalTensor& weight, double eps, double weight_offset) {
  check_tensor("rms_norm", "x", x);
  check_vector("rms_norm", "weight", weight, x);
  Tensor y = new_contiguous_like(x);
  if (x.numel() == 0) return y;
  const RowGroups in(x);
  const Vector w(weight);
  const float e = static_cast<float>(eps);
  const float offset = static_cast<float>(weight_offset);
  kernels.visit(x.scalar_type(), [&]<class T>(auto* kernel) {
    T* to = static_cast<T*>(y.mutable_data_ptr());
    const int64_t columns = in.columns;
    parallel_for(in.groups * in.rows, row_grain<T>(columns), [&](int64_t begin, int64_t end) {
      in.for_parts<T>(begin, end, [&](const T* from, int64_t first, int64_t count) {
        kernel(from, in.stride, w.data, w.is_f32, e, offset, to + first * columns, columns, 0,
               count);
      });
    });
  });
  return y;
}

}  // namespace
}  // namespace ipex

STABLE_TORCH_LIBRARY_IMPL(ipex, CPU, m) { IPEX_IMPL(m, "rms_norm", ipex::rms_norm); }
