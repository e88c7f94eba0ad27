// SPDX-License-Identifier: Apache-2.0
#include "all_reduce.h"

#include "ipex/kernel/vec.h"

namespace ipex {
namespace {

template <typename T>
IPEX_INLINE void sum(const T* const* sources, int64_t count, T* y, int64_t n) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    f32v total = load(sources[0] + i);
    for (int64_t s = 1; s < count; ++s) total = total + load(sources[s] + i);
    store(y + i, total);
  }
  if (i == n) return;
  f32v total = load_n(sources[0] + i, n - i);
  for (int64_t s = 1; s < count; ++s) total = total + load_n(sources[s] + i, n - i);
  store_n(y + i, total, n - i);
}

}  // namespace
}  // namespace ipex

void ipex_k_sum_sources_f32(const float* const* sources, int64_t count, float* y, int64_t n) {
  ipex::sum(sources, count, y, n);
}
void ipex_k_sum_sources_bf16(const ipex::BFloat16* const* sources, int64_t count, ipex::BFloat16* y,
                             int64_t n) {
  ipex::sum(sources, count, y, n);
}
void ipex_k_sum_sources_f16(const ipex::Half* const* sources, int64_t count, ipex::Half* y,
                            int64_t n) {
  ipex::sum(sources, count, y, n);
}
