// SPDX-License-Identifier: Apache-2.0
#include "gelu_mul/gelu_mul.h"

#include "ipex/op_loops.h"

namespace ipex {
namespace {

auto kernel_f32 = IPEX_KERNEL("gelu_mul", ipex_k_gelu_mul_f32);
auto kernel_bf16 = IPEX_KERNEL("gelu_mul", ipex_k_gelu_mul_bf16);
auto kernel_f16 = IPEX_KERNEL("gelu_mul", ipex_k_gelu_mul_f16);

template <class T, class F>
void run(const Kernel<F>& handle, const Rows& gate, const Rows& up, Tensor& y, bool tanh_form) {
  F* kernel = handle.get();
  for_element_pairs(
      gate, up, static_cast<T*>(y.mutable_data_ptr()),
      [=](const T* a, const T* b, T* to, int64_t n) { kernel(a, b, to, n, tanh_form); });
}

Tensor gelu_mul(const Tensor& gate, const Tensor& up, const std::string& approximate) {
  check_tensor("gelu_mul", "gate", gate, 0);
  check_like("gelu_mul", "up", up, gate, "gate");
  const bool tanh_form = is_tanh_form("gelu_mul", approximate);
  Tensor y = new_contiguous_like(gate);
  if (gate.numel() == 0) return y;
  const Rows a = as_rows(gate);
  const Rows b = as_rows(up);
  switch (gate.scalar_type()) {
    case ScalarType::Float:
      run<float>(kernel_f32, a, b, y, tanh_form);
      break;
    case ScalarType::BFloat16:
      run<BFloat16>(kernel_bf16, a, b, y, tanh_form);
      break;
    default:
      run<Half>(kernel_f16, a, b, y, tanh_form);
      break;
  }
  return y;
}

}  // namespace
}  // namespace ipex

STABLE_TORCH_LIBRARY_IMPL(ipex, CPU, m) { m.impl("gelu_mul", TORCH_BOX(&ipex::gelu_mul)); }
