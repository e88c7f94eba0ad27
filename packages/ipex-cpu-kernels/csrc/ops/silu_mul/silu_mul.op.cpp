// SPDX-License-Identifier: Apache-2.0
#include "silu_mul/silu_mul.h"

#include "ipex/glue/op_loops.h"

namespace ipex {
namespace {

const auto kernels = IPEX_KERNELS("silu_mul", silu_mul);

Tensor silu_mul(const Tensor& gate, const Tensor& up) {
  check_tensor("silu_mul", "gate", gate, 0);
  check_like("silu_mul", "up", up, gate, "gate");
  Tensor y = new_contiguous_like(gate);
  if (gate.numel() == 0) return y;
  const Rows a = as_rows(gate);
  const Rows b = as_rows(up);
  kernels.visit(gate.scalar_type(), [&]<class T>(auto* kernel) {
    for_element_pairs(a, b, static_cast<T*>(y.mutable_data_ptr()), *kernel);
  });
  return y;
}

}  // namespace
}  // namespace ipex

STABLE_TORCH_LIBRARY_IMPL(ipex, CPU, m) { IPEX_IMPL(m, "silu_mul", ipex::silu_mul); }
