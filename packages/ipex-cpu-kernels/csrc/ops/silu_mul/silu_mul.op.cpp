// SPDX-License-Identifier: Apache-2.0
#include "silu_mul/silu_mul.h"

#include "ipex/op_loops.h"

namespace ipex {
namespace {

auto kernel_f32 = IPEX_KERNEL("silu_mul", ipex_k_silu_mul_f32);
auto kernel_bf16 = IPEX_KERNEL("silu_mul", ipex_k_silu_mul_bf16);
auto kernel_f16 = IPEX_KERNEL("silu_mul", ipex_k_silu_mul_f16);

template <class T, class F>
void run(const Kernel<F>& handle, const Rows& gate, const Rows& up, Tensor& y) {
  for_element_pairs(gate, up, static_cast<T*>(y.mutable_data_ptr()), *handle.get());
}

Tensor silu_mul(const Tensor& gate, const Tensor& up) {
  check_tensor("silu_mul", "gate", gate, 0);
  check_like("silu_mul", "up", up, gate, "gate");
  Tensor y = new_contiguous_like(gate);
  if (gate.numel() == 0) return y;
  const Rows a = as_rows(gate);
  const Rows b = as_rows(up);
  switch (gate.scalar_type()) {
    case ScalarType::Float:
      run<float>(kernel_f32, a, b, y);
      break;
    case ScalarType::BFloat16:
      run<BFloat16>(kernel_bf16, a, b, y);
      break;
    default:
      run<Half>(kernel_f16, a, b, y);
      break;
  }
  return y;
}

}  // namespace
}  // namespace ipex

STABLE_TORCH_LIBRARY_IMPL(ipex, CPU, m) { m.impl("silu_mul", TORCH_BOX(&ipex::silu_mul)); }
