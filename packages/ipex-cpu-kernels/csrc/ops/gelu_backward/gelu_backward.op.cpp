// SPDX-License-Identifier: Apache-2.0
#include "gelu_backward/gelu_backward.h"

#include "column_sums/column_sums.h"
#include "ipex/glue/op_loops.h"
#include "ipex/kernel/column_blocks.h"

namespace ipex {
namespace {

const auto kernels = IPEX_KERNELS("gelu_backward", gelu_backward);
const auto column_kernels = IPEX_KERNELS("gelu_backward", column_sums);

std::tuple<Tensor, Tensor> gelu_backward(const Tensor& grad, const Tensor& x,
                                         const std::string& approximate) {
  const char* op = "gelu_backward";
  check_tensor(op, "grad", grad);
  check_like(op, "x", x, grad, "grad");
  const bool tanh_form = is_tanh_form(op, approximate);
  Tensor dx = new_contiguous_like(grad);
  const int64_t cols = grad.size(grad.dim() - 1);
  Tensor columns = new_contiguous(&cols, 1, ScalarType::Float);
  const Rows g = as_rows(grad);
  const Rows v = as_rows(x);
  const int64_t rows = cols == 0 ? 0 : g.rows;
  const int64_t blocks = (rows + kRowsOfBlock - 1) / kRowsOfBlock;
  const int64_t partial_sizes[] = {blocks, cols};
  Tensor partial = new_contiguous(partial_sizes, 2, ScalarType::Float);
  float* sums = static_cast<float*>(partial.mutable_data_ptr());
  float* out = static_cast<float*>(columns.mutable_data_ptr());
  kernels.visit(grad.scalar_type(), [&]<class T>(auto* kernel) {
    const T* from = static_cast<const T*>(g.data);
    const T* at = static_cast<const T*>(v.data);
    T* to = static_cast<T*>(dx.mutable_data_ptr());
    parallel_for(blocks, 1, [&](int64_t begin, int64_t end) {
      kernel(from, g.stride, at, v.stride, tanh_form, to, sums, rows, cols, begin, end);
    });
  });
  column_kernels.visit(grad.scalar_type(), [&]<class T>(auto* finish) {
    finish(static_cast<const T*>(nullptr), sums, blocks, cols, out, cols);
  });
  return {dx, columns};
}

}  // namespace
}  // namespace ipex

STABLE_TORCH_LIBRARY_IMPL(ipex, CPU, m) { IPEX_IMPL(m, "gelu_backward", ipex::gelu_backward); }
