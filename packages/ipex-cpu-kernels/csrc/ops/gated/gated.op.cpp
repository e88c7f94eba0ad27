// SPDX-License-Identifier: Apache-2.0
// silu_mul and gelu_mul with gate and up in one tensor.
#include <vector>

#include "gelu_mul/gelu_mul.h"
#include "ipex/glue/op_loops.h"
#include "silu_mul/silu_mul.h"

namespace ipex {
namespace {

const auto silu_kernels = IPEX_KERNELS("silu_and_mul", silu_mul);
const auto gelu_kernels = IPEX_KERNELS("gelu_and_mul", gelu_mul);

// The output, and the halves of x.
struct Halves {
  Tensor y;
  Rows gate, up;

  Halves(const char* op, const Tensor& x) : y(x), gate{x}, up{x} {
    check_tensor(op, "x", x);
    const int64_t last = x.dim() - 1, columns = x.size(last);
    IPEX_CHECK(columns % 2 == 0, op, ": x must have a last dimension of even size, got ", columns);
    std::vector<int64_t> sizes(x.sizes().begin(), x.sizes().end());
    sizes.back() = columns / 2;
    y = new_contiguous(sizes.data(), x.dim(), x.scalar_type());
    if (x.numel() == 0) return;
    gate = up = as_rows(x);
    gate.columns = up.columns = columns / 2;
    const int64_t item = x.scalar_type() == ScalarType::Float ? 4 : 2;
    up.data = static_cast<const char*>(gate.data) + columns / 2 * item;
  }
};

Tensor silu_and_mul(const Tensor& x) {
  Halves halves("silu_and_mul", x);
  if (x.numel() == 0) return halves.y;
  silu_kernels.visit(x.scalar_type(), [&]<class T>(auto* kernel) {
    for_element_pairs(halves.gate, halves.up, static_cast<T*>(halves.y.mutable_data_ptr()),
                      *kernel);
  });
  return halves.y;
}

Tensor gelu_and_mul(const Tensor& x, const std::string& approximate) {
  Halves halves("gelu_and_mul", x);
  const bool tanh_form = is_tanh_form("gelu_and_mul", approximate);
  if (x.numel() == 0) return halves.y;
  gelu_kernels.visit(x.scalar_type(), [&]<class T>(auto* kernel) {
    for_element_pairs(
        halves.gate, halves.up, static_cast<T*>(halves.y.mutable_data_ptr()),
        [=](const T* g, const T* u, T* to, int64_t n) { kernel(g, u, to, n, tanh_form); });
  });
  return halves.y;
}

}  // namespace
}  // namespace ipex

STABLE_TORCH_LIBRARY_IMPL(ipex, CPU, m) {
  IPEX_IMPL(m, "silu_and_mul", ipex::silu_and_mul);
  IPEX_IMPL(m, "gelu_and_mul", ipex::gelu_and_mul);
}
