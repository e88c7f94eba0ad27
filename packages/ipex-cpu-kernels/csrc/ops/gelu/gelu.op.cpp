// SPDX-License-Identifier: Apache-2.0
#include "gelu/gelu.h"

#include "ipex/glue/op_loops.h"

namespace ipex {
namespace {

const auto kernels = IPEX_KERNELS("gelu", gelu);

Tensor gelu(const Tensor& x_any, const std::string& approximate) {
  check_tensor("gelu", "x", x_any, 0);
  const bool tanh_form = is_tanh_form("gelu", approximate);
  Tensor y = new_contiguous_like(x_any);
  if (x_any.numel() == 0) return y;
  const Tensor x = as_contiguous(x_any);
  kernels.visit(x.scalar_type(), [&]<class T>(auto* kernel) {
    for_elements(static_cast<const T*>(x.const_data_ptr()), static_cast<T*>(y.mutable_data_ptr()),
                 x.numel(),
                 [=](const T* from, T* to, int64_t n) { kernel(from, to, n, tanh_form); });
  });
  return y;
}

}  // namespace
}  // namespace ipex

STABLE_TORCH_LIBRARY_IMPL(ipex, CPU, m) { IPEX_IMPL(m, "gelu", ipex::gelu); }
