// SPDX-License-Identifier: Apache-2.0
#include "gelu/gelu.h"

#include "ipex/op_loops.h"

namespace ipex {
namespace {

auto kernel_f32 = IPEX_KERNEL("gelu", ipex_k_gelu_f32);
auto kernel_bf16 = IPEX_KERNEL("gelu", ipex_k_gelu_bf16);
auto kernel_f16 = IPEX_KERNEL("gelu", ipex_k_gelu_f16);

template <class T, class F>
void run(const Kernel<F>& handle, const Tensor& x, Tensor& y, bool tanh_form) {
  F* kernel = handle.get();
  for_elements(static_cast<const T*>(x.const_data_ptr()), static_cast<T*>(y.mutable_data_ptr()),
               x.numel(), [=](const T* from, T* to, int64_t n) { kernel(from, to, n, tanh_form); });
}

Tensor gelu(const Tensor& x_any, const std::string& approximate) {
  check_tensor("gelu", "x", x_any, 0);
  const bool tanh_form = is_tanh_form("gelu", approximate);
  Tensor y = new_contiguous_like(x_any);
  if (x_any.numel() == 0) return y;
  const Tensor x = as_contiguous(x_any);
  switch (x.scalar_type()) {
    case ScalarType::Float:
      run<float>(kernel_f32, x, y, tanh_form);
      break;
    case ScalarType::BFloat16:
      run<BFloat16>(kernel_bf16, x, y, tanh_form);
      break;
    default:
      run<Half>(kernel_f16, x, y, tanh_form);
      break;
  }
  return y;
}

}  // namespace
}  // namespace ipex

STABLE_TORCH_LIBRARY_IMPL(ipex, CPU, m) { m.impl("gelu", TORCH_BOX(&ipex::gelu)); }
