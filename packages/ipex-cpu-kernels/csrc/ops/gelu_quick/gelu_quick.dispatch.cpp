// SPDX-License-Identifier: Apache-2.0
#include "gelu_quick.h"

#include "ipex/kernel/vec_loops.h"
#include "ipex/kernel/vec_math.h"

namespace ipex {
namespace {

template <typename T>
IPEX_INLINE void run(const T* x, T* y, int64_t n) {
  constexpr float kFactor = 1.702f;
  map(x, y, n, [](f32v a) IPEX_LAMBDA {
    if constexpr (kReducedPrecision<T>) return a * sigmoid2_fast(a * set1(kFactor * kLog2E));
    return a / (set1(1.0f) + exp(a * set1(-kFactor)));
  });
}

}  // namespace
}  // namespace ipex

void ipex_k_gelu_quick_f32(const float* x, float* y, int64_t n) { ipex::run(x, y, n); }
void ipex_k_gelu_quick_bf16(const ipex::BFloat16* x, ipex::BFloat16* y, int64_t n) {
  ipex::run(x, y, n);
}
void ipex_k_gelu_quick_f16(const ipex::Half* x, ipex::Half* y, int64_t n) { ipex::run(x, y, n); }
