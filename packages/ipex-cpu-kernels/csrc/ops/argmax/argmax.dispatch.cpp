// SPDX-License-Identifier: Apache-2.0
#include "argmax.h"

#include "ipex/kernel/vec_loops.h"

namespace ipex {
namespace {

// Elements looked at between two comparisons with the best so far; they are read again if one of
// them is it.
constexpr int64_t kBlock = 1024;

// First element that is `value`, or first NaN.
template <typename T>
IPEX_INLINE int64_t find(const T* x, int64_t n, float value) {
  for (int64_t i = 0; i < n; ++i) {
    const float a = load_n(x + i, 1)[0];
    if (value != value ? a != a : a == value) return i;
  }
  return 0;
}

template <typename T>
IPEX_INLINE int64_t run(const T* x, int64_t n, float* largest) {
  float best = -__builtin_inff();
  int64_t where = 0;
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    const int64_t count = n - begin < kBlock ? n - begin : kBlock;
    Maximum most;
    Mask nan = is_nan(zero());
    for_pairs(
        count,
        [&](int64_t i, int k) IPEX_LAMBDA {
          const f32v2 v = load2(x + begin + i);
          nan = static_cast<Mask>(nan | is_nan(v.a) | is_nan(v.b));
          most.add(v, k);
        },
        [&](int64_t i, int64_t left) IPEX_LAMBDA {
          const f32v v = keep_n(load_n(x + begin + i, left), left, set1(-__builtin_inff()));
          nan = static_cast<Mask>(nan | is_nan(v));
          most.part[0] = max(most.part[0], v);
        });
    if (any(nan)) {
      *largest = __builtin_nanf("");
      return begin + find(x + begin, count, *largest);
    }
    const float value = most.total();
    if (value > best) {
      best = value;
      where = begin;
    }
  }
  *largest = best;
  return where + find(x + where, n - where, best);
}

}  // namespace
}  // namespace ipex

int64_t ipex_k_argmax_f32(const float* x, int64_t n, float* largest) {
  return ipex::run(x, n, largest);
}
int64_t ipex_k_argmax_bf16(const ipex::BFloat16* x, int64_t n, float* largest) {
  return ipex::run(x, n, largest);
}
int64_t ipex_k_argmax_f16(const ipex::Half* x, int64_t n, float* largest) {
  return ipex::run(x, n, largest);
}
