// SPDX-License-Identifier: Apache-2.0
#include "softmax/softmax.h"

#include <array>

#include "ipex/glue/op_loops.h"

namespace ipex {
namespace {

const auto kernels = IPEX_KERNELS("softmax", softmax);

// The mask as kernels take it: its last dimension as long as in x and contiguous, the others
// merged where one stride can step through several of them.
struct Mask {
  static constexpr int64_t kMaxDims = 8;

  OptionalTensor tensor;  // keeps the memory alive
  const void* data = nullptr;
  bool is_f32 = false;
  int64_t dims = 0;
  int64_t sizes[kMaxDims];
  int64_t strides[kMaxDims];

  Mask(const OptionalTensor& mask, const Tensor& x) {
    if (!mask) return;
    tensor = mask;
    const int64_t columns = x.size(x.dim() - 1);
    const int64_t last = mask->dim() - 1;
    const bool one_column = last < 0 || mask->size(last) != columns;
    if (one_column || (columns > 1 && mask->stride(last) != 1) || !merge(x)) {
      tensor = torch::stable::contiguous(expand(*mask, x));
      merge(x);
    }
    data = tensor->const_data_ptr();
    is_f32 = tensor->scalar_type() == ScalarType::Float;
  }

  static Tensor expand(const Tensor& mask, const Tensor& x) {
    std::array<StableIValue, 3> stack{torch::stable::detail::from(mask),
                                      torch::stable::detail::from(x.sizes()),
                                      torch::stable::detail::from(false)};
    IPEX_SHIM_CALL(torch_call_dispatcher("aten::expand", "", stack.data(), TORCH_ABI_VERSION));
    return torch::stable::detail::to<Tensor>(stack[0]);
  }

  // Fills sizes and strides, outermost first; false if they do not fit.
  bool merge(const Tensor& x) {
    int64_t reversed_sizes[kMaxDims];
    int64_t reversed_strides[kMaxDims];
    const int64_t missing = x.dim() - tensor->dim();
    dims = 0;
    for (int64_t d = x.dim() - 2; d >= 0; --d) {
      const int64_t size = x.size(d);
      if (size == 1) continue;
      const bool broadcast = d < missing || tensor->size(d - missing) == 1;
      const int64_t stride = broadcast ? 0 : tensor->stride(d - missing);
      if (dims > 0 && stride == reversed_strides[dims - 1] * reversed_sizes[dims - 1]) {
        reversed_sizes[dims - 1] *= size;
        continue;
      }
      if (dims == kMaxDims) return false;
      reversed_sizes[dims] = size;
      reversed_strides[dims] = stride;
      ++dims;
    }
    for (int64_t i = 0; i < dims; ++i) {
      sizes[i] = reversed_sizes[dims - 1 - i];
      strides[i] = reversed_strides[dims - 1 - i];
    }
    return true;
  }
};

void check_mask(const OptionalTensor& mask, const Tensor& x) {
  if (!mask) return;
  IPEX_CHECK(mask->is_cpu(), "softmax: mask must be on the device of x = cpu");
  const ScalarType dtype = mask->scalar_type();
  IPEX_CHECK(dtype == x.scalar_type() || dtype == ScalarType::Float,
             "softmax: mask must have the dtype of x = ", dtype_name(x.scalar_type()),
             " or float32, got ", dtype_name(dtype));
  const int64_t missing = x.dim() - mask->dim();
  bool fits = missing >= 0;
  for (int64_t d = 0; fits && d < mask->dim(); ++d)
    fits = mask->size(d) == 1 || mask->size(d) == x.size(d + missing);
  IPEX_CHECK(fits, "softmax: mask must be broadcastable to x of shape ", shape_text(x), ", got ",
             shape_text(*mask));
}

Tensor softmax(const Tensor& x, const OptionalTensor& mask, double scale) {
  check_tensor("softmax", "x", x);
  check_mask(mask, x);
  Tensor y = new_contiguous_like(x);
  if (x.numel() == 0) return y;
  const Rows rows = as_rows(x);
  const Mask m(mask, x);
  const float s = static_cast<float>(scale);
  kernels.visit(x.scalar_type(), [&]<class T>(auto* kernel) {
    const T* from = static_cast<const T*>(rows.data);
    T* to = static_cast<T*>(y.mutable_data_ptr());
    parallel_for(rows.rows, row_grain<T>(rows.columns), [&](int64_t begin, int64_t end) {
      kernel(from, rows.stride, m.data, m.is_f32, m.sizes, m.strides, m.dims, s, to, rows.columns,
             begin, end);
    });
  });
  return y;
}

}  // namespace
}  // namespace ipex

STABLE_TORCH_LIBRARY_IMPL(ipex, CPU, m) { IPEX_IMPL(m, "softmax", ipex::softmax); }
