// SPDX-License-Identifier: Apache-2.0
#include "dropout_add_layer_norm/dropout_add_layer_norm.h"

#include "column_sums/column_sums.h"
#include "ipex/glue/affine.h"
#include "ipex/glue/drop_glue.h"
#include "ipex/kernel/column_blocks.h"

namespace ipex {
namespace {

const auto kernels = IPEX_KERNELS("dropout_add_layer_norm", dropout_add_layer_norm);
const auto backward_kernels =
    IPEX_KERNELS("dropout_add_layer_norm_backward", dropout_add_layer_norm_backward);
const auto column_kernels = IPEX_KERNELS("dropout_add_layer_norm_backward", column_sums);

std::tuple<Tensor, Tensor> dropout_add_layer_norm(const Tensor& x, const Tensor& residual,
                                                  const Tensor& weight, const Tensor& bias,
                                                  double p, const Tensor& seed, int64_t stream,
                                                  double eps) {
  const char* op = "dropout_add_layer_norm";
  check_tensor(op, "x", x);
  check_like(op, "residual", residual, x);
  check_vector(op, "weight", weight, x);
  check_vector(op, "bias", bias, x);
  const Drop drop = read_drop(op, p, seed, stream);
  Tensor y = new_contiguous_like(x);
  Tensor sum = new_contiguous_like(x);
  if (x.numel() == 0) return {y, sum};
  const Rows a = as_rows(x);
  const Rows b = as_rows(residual);
  const Affine affine(weight, bias);
  const float e = static_cast<float>(eps);
  kernels.visit(x.scalar_type(), [&]<class T>(auto* kernel) {
    const T* from = static_cast<const T*>(a.data);
    const T* add = static_cast<const T*>(b.data);
    T* to = static_cast<T*>(y.mutable_data_ptr());
    T* total = static_cast<T*>(sum.mutable_data_ptr());
    parallel_for(a.rows, row_grain<T>(2 * a.columns), [&](int64_t begin, int64_t end) {
      kernel(from, a.stride, add, b.stride, affine.weight.data, affine.bias.data, affine.is_f32, e,
             &drop, to, total, a.columns, begin, end);
    });
  });
  return {y, sum};
}

std::tuple<Tensor, Tensor, Tensor> dropout_add_layer_norm_backward(const Tensor& grad,
                                                                   const Tensor& sum,
                                                                   const Tensor& weight, double p,
                                                                   const Tensor& seed,
                                                                   int64_t stream, double eps) {
  const char* op = "dropout_add_layer_norm_backward";
  check_tensor(op, "grad", grad);
  check_like(op, "sum", sum, grad, "grad");
  check_vector(op, "weight", weight, grad);
  const Drop drop = read_drop(op, p, seed, stream);
  Tensor dsum = new_contiguous_like(grad);
  Tensor dx = new_contiguous_like(grad);
  const int64_t cols = grad.size(grad.dim() - 1);
  const int64_t sizes[] = {3, cols};
  Tensor columns = new_contiguous(sizes, 2, ScalarType::Float);
  const Rows g = as_rows(grad);
  const Rows s = as_rows(sum);
  const Vector w(weight);
  const int64_t rows = cols == 0 ? 0 : g.rows;
  const int64_t blocks = (rows + kRowsOfBlock - 1) / kRowsOfBlock;
  const int64_t partial_sizes[] = {blocks, 3 * cols};
  Tensor partial = new_contiguous(partial_sizes, 2, ScalarType::Float);
  float* sums = static_cast<float*>(partial.mutable_data_ptr());
  float* out = static_cast<float*>(columns.mutable_data_ptr());
  const float e = static_cast<float>(eps);
  backward_kernels.visit(grad.scalar_type(), [&]<class T>(auto* kernel) {
    const T* from = static_cast<const T*>(g.data);
    const T* total = static_cast<const T*>(s.data);
    T* to_sum = static_cast<T*>(dsum.mutable_data_ptr());
    T* to_x = static_cast<T*>(dx.mutable_data_ptr());
    parallel_for(blocks, 1, [&](int64_t begin, int64_t end) {
      kernel(from, g.stride, total, s.stride, w.data, w.is_f32, e, &drop, to_sum, to_x, sums, rows,
             cols, begin, end);
    });
  });
  column_kernels.visit(grad.scalar_type(), [&]<class T>(auto* finish) {
    for (int64_t i = 0; i < 3; ++i)
      finish(static_cast<const T*>(nullptr), sums + i * cols, blocks, 3 * cols, out + i * cols,
             cols);
  });
  return {dsum, dx, columns};
}

}  // namespace
}  // namespace ipex

STABLE_TORCH_LIBRARY_IMPL(ipex, CPU, m) {
  IPEX_IMPL(m, "dropout_add_layer_norm", ipex::dropout_add_layer_norm);
  IPEX_IMPL(m, "dropout_add_layer_norm_backward", ipex::dropout_add_layer_norm_backward);
}
