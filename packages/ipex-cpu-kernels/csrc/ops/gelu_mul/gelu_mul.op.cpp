// SPDX-License-Identifier: Apache-2.0
#include "gelu_mul/gelu_mul.h"

#include "ipex/glue/op_loops.h"

namespace ipex {
namespace {

const auto kernels = IPEX_KERNELS("gelu_mul", gelu_mul);

Tensor gelu_mul(const Tensor& gate, const Tensor& up, const std::string& approximate) {
  check_tensor("gelu_mul", "gate", gate, 0);
  check_like("gelu_mul", "up", up, gate, "gate");
  const bool tanh_form = is_tanh_form("gelu_mul", approximate);
  Tensor y = new_contiguous_like(gate);
  if (gate.numel() == 0) return y;
  const Rows a = as_rows(gate);
  const Rows b = as_rows(up);
  kernels.visit(gate.scalar_type(), [&]<class T>(auto* kernel) {
    for_element_pairs(
        a, b, static_cast<T*>(y.mutable_data_ptr()),
        [=](const T* g, const T* u, T* to, int64_t n) { kernel(g, u, to, n, tanh_form); });
  });
  return y;
}

}  // namespace
}  // namespace ipex

STABLE_TORCH_LIBRARY_IMPL(ipex, CPU, m) { IPEX_IMPL(m, "gelu_mul", ipex::gelu_mul); }
