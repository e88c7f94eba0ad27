// SPDX-License-Identifier: Apache-2.0
#include "program/group_norm.h"

#include "ipex/kernel/vec_loops.h"

namespace ipex {
namespace {

IPEX_INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// Elements that are summed in float32 before they are added to a total in float64.
constexpr int64_t kRun = 4096;

// The sum of f(x) of n elements.
template <typename T, typename F>
IPEX_INLINE double sum_of(const T* x, int64_t n, const F& f) {
  double total = 0;
  for (int64_t first = 0; first < n; first += kRun) {
    const int64_t end = least(n, first + kRun);
    f32v part[2] = {zero(), zero()};
    int64_t i = first;
    for (; i + 2 * kLanes <= end; i += 2 * kLanes) {
      const f32v2 v = load2(x + i);
      part[0] = part[0] + f(v.a);
      part[1] = part[1] + f(v.b);
    }
    for (; i < end; i += kLanes) {
      const int64_t count = least(kLanes, end - i);
      part[0] = part[0] + keep_n(f(load_n(x + i, count)), count, zero());
    }
    total += static_cast<double>(reduce_add(part[0] + part[1]));
  }
  return total;
}

template <typename T>
void groups(const GroupNormCall& call, const T* x, T* y, int64_t begin, int64_t end) {
  const int64_t width = call.channels / call.groups, size = width * call.places;
  for (int64_t g = begin; g < end; ++g) {
    const T* from = x + g * size;
    T* to = y + g * size;
    const float mean = static_cast<float>(sum_of(from, size, [](f32v v) IPEX_LAMBDA { return v; }) /
                                          static_cast<double>(size));
    const f32v center = set1(mean);
    const double squares = sum_of(from, size, [&](f32v v) IPEX_LAMBDA {
      const f32v d = v - center;
      return d * d;
    });
    const float variance = static_cast<float>(squares / static_cast<double>(size));
    const float factor = 1.0f / sqrt_of(variance + call.eps);
    for (int64_t i = 0; i < width; ++i) {
      const int64_t channel = g % call.groups * width + i;
      const f32v scale = set1(call.weight ? call.weight[channel] * factor : factor);
      const f32v shift = set1(call.bias ? call.bias[channel] : 0.0f);
      map(from + i * call.places, to + i * call.places, call.places,
          [&](f32v v) IPEX_LAMBDA { return fma(v - center, scale, shift); });
    }
  }
}

template <typename T>
void sums(const T* x, const T* pivot, int64_t count, int64_t channels, float* y) {
  for (int64_t c = 0; c < channels; c += kLanes) {
    const int64_t n = least(kLanes, channels - c);
    const f32v center = load_n(pivot + c, n);
    f32v sum = zero(), square = zero();
    for (int64_t i = 0; i < count; ++i) {
      const f32v d = load_n(x + i * channels + c, n) - center;
      sum = sum + d;
      square = fma(d, d, square);
    }
    store_n(y + c, sum, n);
    store_n(y + channels + c, square, n);
  }
}

template <typename T>
void scale(const T* x, const float* factors, int64_t count, int64_t channels, T* y) {
  for (int64_t c = 0; c < channels; c += kLanes) {
    const int64_t n = least(kLanes, channels - c);
    const f32v factor = load_n(factors + c, n), shift = load_n(factors + channels + c, n);
    for (int64_t i = 0; i < count; ++i)
      store_n(y + i * channels + c, fma(load_n(x + i * channels + c, n), factor, shift), n);
  }
}

}  // namespace
}  // namespace ipex

#define IPEX_GROUP_NORM(suffix, type)                                                       \
  void ipex_k_group_norm_##suffix(const ipex::GroupNormCall* call, const type* x, type* y,  \
                                  int64_t begin, int64_t end) {                             \
    ipex::groups(*call, x, y, begin, end);                                                  \
  }                                                                                         \
  void ipex_k_group_norm_sums_##suffix(const type* x, const type* pivot, int64_t count,     \
                                       int64_t channels, float* sums) {                     \
    ipex::sums(x, pivot, count, channels, sums);                                            \
  }                                                                                         \
  void ipex_k_group_norm_scale_##suffix(const type* x, const float* factors, int64_t count, \
                                        int64_t channels, type* y) {                        \
    ipex::scale(x, factors, count, channels, y);                                            \
  }
IPEX_GROUP_NORM(f32, float)
IPEX_GROUP_NORM(bf16, ipex::BFloat16)
IPEX_GROUP_NORM(f16, ipex::Half)
