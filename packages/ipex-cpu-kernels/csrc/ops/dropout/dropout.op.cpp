// SPDX-License-Identifier: Apache-2.0
#include "dropout/dropout.h"

#include "ipex/glue/drop_glue.h"
#include "ipex/glue/op_loops.h"

namespace ipex {
namespace {

const auto kernels = IPEX_KERNELS("dropout", dropout);

Tensor dropout(const Tensor& x, double p, const Tensor& seed, int64_t stream) {
  check_tensor("dropout", "x", x);
  const Drop drop = read_drop("dropout", p, seed, stream);
  Tensor y = new_contiguous_like(x);
  if (x.numel() == 0) return y;
  const Rows rows = as_rows(x);
  kernels.visit(x.scalar_type(), [&]<class T>(auto* kernel) {
    const T* from = static_cast<const T*>(rows.data);
    T* to = static_cast<T*>(y.mutable_data_ptr());
    parallel_for(rows.rows, row_grain<T>(rows.columns), [&](int64_t begin, int64_t end) {
      kernel(from, rows.stride, &drop, to, rows.columns, begin, end);
    });
  });
  return y;
}

}  // namespace
}  // namespace ipex

STABLE_TORCH_LIBRARY_IMPL(ipex, CPU, m) { IPEX_IMPL(m, "dropout", ipex::dropout); }
