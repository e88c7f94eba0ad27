// SPDX-License-Identifier: Apache-2.0
#include "apply_token_bitmask.h"

#include "ipex/kernel/vec.h"

namespace ipex {
namespace {

template <typename T>
IPEX_INLINE void run(T* x, const int32_t* bits, int64_t n) {
  i32v place = iset1(0);
  for (int i = 0; i < static_cast<int>(kLanes); ++i) place[i] = 1 << i;
  const i32v nothing = as_int(set1(-__builtin_inff()));
  const auto added = [&](int64_t i) IPEX_LAMBDA {
    const auto word = static_cast<int32_t>(static_cast<uint32_t>(bits[i / 32]) >> (i % 32));
    return as_float(((iset1(word) & place) == iset1(0)) & nothing);
  };
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(x + i, load(x + i) + added(i));
  if (i < n) store_n(x + i, load_n(x + i, n - i) + added(i), n - i);
}

}  // namespace
}  // namespace ipex

void ipex_k_apply_token_bitmask_f32(float* x, const int32_t* bits, int64_t n) {
  ipex::run(x, bits, n);
}
void ipex_k_apply_token_bitmask_bf16(ipex::BFloat16* x, const int32_t* bits, int64_t n) {
  ipex::run(x, bits, n);
}
void ipex_k_apply_token_bitmask_f16(ipex::Half* x, const int32_t* bits, int64_t n) {
  ipex::run(x, bits, n);
}
