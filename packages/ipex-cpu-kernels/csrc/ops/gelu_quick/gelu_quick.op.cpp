// SPDX-License-Identifier: Apache-2.0
#include "gelu_quick/gelu_quick.h"

#include "ipex/glue/op_loops.h"

namespace ipex {
namespace {

const auto kernels = IPEX_KERNELS("gelu_quick", gelu_quick);

Tensor gelu_quick(const Tensor& x_any) {
  check_tensor("gelu_quick", "x", x_any, 0);
  Tensor y = new_contiguous_like(x_any);
  if (x_any.numel() == 0) return y;
  const Tensor x = as_contiguous(x_any);
  kernels.visit(x.scalar_type(), [&]<class T>(auto* kernel) {
    for_elements(static_cast<const T*>(x.const_data_ptr()), static_cast<T*>(y.mutable_data_ptr()),
                 x.numel(), *kernel);
  });
  return y;
}

}  // namespace
}  // namespace ipex

STABLE_TORCH_LIBRARY_IMPL(ipex, CPU, m) { IPEX_IMPL(m, "gelu_quick", ipex::gelu_quick); }
