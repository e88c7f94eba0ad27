// SPDX-License-Identifier: Apache-2.0
#include "gelu_mul.h"

#include "ipex/kernel/vec_loops.h"
#include "ipex/kernel/vec_math.h"

namespace ipex {
namespace {

template <typename T>
IPEX_INLINE void run(const T* gate, const T* up, T* y, int64_t n, bool tanh_form) {
  constexpr bool kFast = kReducedPrecision<T>;
  if (tanh_form) {
    map(gate, up, y, n, [](f32v a, f32v b) IPEX_LAMBDA { return gelu_tanh<kFast>(a) * b; });
  } else {
    map(gate, up, y, n, [](f32v a, f32v b) IPEX_LAMBDA { return gelu<kFast>(a) * b; });
  }
}

}  // namespace
}  // namespace ipex

void ipex_k_gelu_mul_f32(const float* gate, const float* up, float* y, int64_t n, bool tanh_form) {
  ipex::run(gate, up, y, n, tanh_form);
}
void ipex_k_gelu_mul_bf16(const ipex::BFloat16* gate, const ipex::BFloat16* up, ipex::BFloat16* y,
                          int64_t n, bool tanh_form) {
  ipex::run(gate, up, y, n, tanh_form);
}
void ipex_k_gelu_mul_f16(const ipex::Half* gate, const ipex::Half* up, ipex::Half* y, int64_t n,
                         bool tanh_form) {
  ipex::run(gate, up, y, n, tanh_form);
}
