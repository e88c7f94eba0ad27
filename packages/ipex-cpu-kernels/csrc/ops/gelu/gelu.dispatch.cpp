// SPDX-License-Identifier: Apache-2.0
#include "gelu.h"

#include "ipex/kernel/vec_loops.h"
#include "ipex/kernel/vec_math.h"

namespace ipex {
namespace {

template <typename T>
IPEX_INLINE void run(const T* x, T* y, int64_t n, bool tanh_form) {
  constexpr bool kFast = kReducedPrecision<T>;
  if (tanh_form) {
    map(x, y, n, [](f32v a) IPEX_LAMBDA { return gelu_tanh<kFast>(a); });
  } else {
    map(x, y, n, [](f32v a) IPEX_LAMBDA { return gelu<kFast>(a); });
  }
}

}  // namespace
}  // namespace ipex

void ipex_k_gelu_f32(const float* x, float* y, int64_t n, bool tanh_form) {
  ipex::run(x, y, n, tanh_form);
}
void ipex_k_gelu_bf16(const ipex::BFloat16* x, ipex::BFloat16* y, int64_t n, bool tanh_form) {
  ipex::run(x, y, n, tanh_form);
}
void ipex_k_gelu_f16(const ipex::Half* x, ipex::Half* y, int64_t n, bool tanh_form) {
  ipex::run(x, y, n, tanh_form);
}
