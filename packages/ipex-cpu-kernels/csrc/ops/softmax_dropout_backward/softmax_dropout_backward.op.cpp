// SPDX-License-Identifier: Apache-2.0
#include "softmax_dropout_backward/softmax_dropout_backward.h"

#include "ipex/glue/drop_glue.h"
#include "ipex/glue/op_loops.h"

namespace ipex {
namespace {

const auto kernels = IPEX_KERNELS("softmax_dropout_backward", softmax_dropout_backward);

std::tuple<Tensor, Tensor> softmax_dropout_backward(const Tensor& grad, const Tensor& probs,
                                                    double scale, double p, const Tensor& seed,
                                                    int64_t stream) {
  const char* op = "softmax_dropout_backward";
  check_tensor(op, "grad", grad);
  check_like(op, "probs", probs, grad, "grad");
  const Drop drop = read_drop(op, p, seed, stream);
  Tensor dx = new_contiguous_like(grad);
  Tensor dropped = new_contiguous_like(grad);
  if (grad.numel() == 0) return {dx, dropped};
  const Rows g = as_rows(grad);
  const Rows q = as_rows(probs);
  const float s = static_cast<float>(scale);
  kernels.visit(grad.scalar_type(), [&]<class T>(auto* kernel) {
    const T* from = static_cast<const T*>(g.data);
    const T* at = static_cast<const T*>(q.data);
    T* to = static_cast<T*>(dx.mutable_data_ptr());
    T* to_dropped = static_cast<T*>(dropped.mutable_data_ptr());
    parallel_for(g.rows, row_grain<T>(2 * g.columns), [&](int64_t begin, int64_t end) {
      kernel(from, g.stride, at, q.stride, s, &drop, to, to_dropped, g.columns, begin, end);
    });
  });
  return {dx, dropped};
}

}  // namespace
}  // namespace ipex

STABLE_TORCH_LIBRARY_IMPL(ipex, CPU, m) {
  IPEX_IMPL(m, "softmax_dropout_backward", ipex::softmax_dropout_backward);
}
