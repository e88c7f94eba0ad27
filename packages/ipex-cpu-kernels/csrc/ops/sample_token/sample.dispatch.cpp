// SPDX-License-Identifier: Apache-2.0
#include "sample.h"

#include "ipex/kernel/vec_loops.h"
#include "ipex/kernel/vec_math.h"

namespace ipex {
namespace {

template <typename T>
IPEX_INLINE float largest_of(const T* x, int64_t n) {
  Maximum most;
  for_pairs(
      n, [&](int64_t i, int k) IPEX_LAMBDA { most.add(load2(x + i), k); },
      [&](int64_t i, int64_t count) IPEX_LAMBDA {
        const f32v v = keep_n(load_n(x + i, count), count, set1(-__builtin_inff()));
        most.part[0] = max(most.part[0], v);
      });
  return most.total();
}

template <typename T>
IPEX_INLINE float sum_of_weights(const T* x, int64_t n, float largest, float inverse_temperature) {
  const f32v shift = set1(largest);
  const f32v factor = set1(inverse_temperature);
  Sum sum;
  for_pairs(
      n,
      [&](int64_t i, int k) IPEX_LAMBDA {
        const f32v2 v = load2(x + i);
        sum.add({exp_nonpositive((v.a - shift) * factor), exp_nonpositive((v.b - shift) * factor)},
                k);
      },
      [&](int64_t i, int64_t count) IPEX_LAMBDA {
        const f32v e = exp_nonpositive((load_n(x + i, count) - shift) * factor);
        sum.part[0] = sum.part[0] + keep_n(e, count, zero());
      });
  return sum.total();
}

template <typename T>
IPEX_INLINE void blocks(const T* x, int64_t n, float inverse_temperature, float* largest,
                        float* sums, int64_t begin, int64_t end) {
  for (int64_t b = begin; b < end; ++b) {
    const int64_t first = b * kSampleBlock;
    const int64_t count = n - first < kSampleBlock ? n - first : kSampleBlock;
    const float most = largest_of(x + first, count);
    largest[b] = most;
    // A block of -infinity weighs nothing. The maximum may have missed a NaN; the sum does not.
    sums[b] = sum_of_weights(x + first, count, most == -__builtin_inff() ? 0.0f : most,
                             inverse_temperature);
  }
}

IPEX_INLINE Mask ge(f32v a, f32v b) {
#if IPEX_HAVE_AVX512
  return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ);
#else
  return a >= b;
#endif
}

// Appends the lanes of v that are >= least. Every lane is stored and only the count differs,
// because a branch per lane would be mispredicted.
IPEX_INLINE int64_t append(f32v v, int64_t lanes, float least, int64_t first, int64_t found,
                           float* values, int32_t* indices) {
  float lane[kLanes];
  storeu(lane, v);
  for (int64_t k = 0; k < lanes; ++k) {
    values[found] = lane[k];
    indices[found] = static_cast<int32_t>(first + k);
    found += lane[k] >= least ? 1 : 0;
  }
  return found;
}

// There is room for one element more than there are logits, for the stores of append().
template <typename T>
IPEX_INLINE int64_t collect(const T* x, int64_t n, float least, const float* largest, float* values,
                            int32_t* indices) {
  const f32v limit = set1(least);
  int64_t found = 0;
  for (int64_t first = 0; first < n; first += kSampleBlock) {
    if (largest[first / kSampleBlock] < least) continue;
    const int64_t end = n - first < kSampleBlock ? n : first + kSampleBlock;
    int64_t i = first;
    for (; i + kLanes <= end; i += kLanes) {
      const f32v v = load(x + i);
      if (!any(ge(v, limit))) continue;
      found = append(v, kLanes, least, i, found, values, indices);
    }
    if (i < end) found = append(load_n(x + i, end - i), end - i, least, i, found, values, indices);
  }
  return found;
}

}  // namespace
}  // namespace ipex

#define IPEX_DEFINE_SAMPLE(suffix, T)                                                              \
  void ipex_k_sample_blocks_##suffix(const T* x, int64_t n, float inverse_temperature,             \
                                     float* largest, float* sums, int64_t begin, int64_t end) {    \
    ipex::blocks(x, n, inverse_temperature, largest, sums, begin, end);                            \
  }                                                                                                \
  int64_t ipex_k_sample_collect_##suffix(const T* x, int64_t n, float least, const float* largest, \
                                         float* values, int32_t* indices) {                        \
    return ipex::collect(x, n, least, largest, values, indices);                                   \
  }

IPEX_DEFINE_SAMPLE(f32, float)
IPEX_DEFINE_SAMPLE(bf16, ipex::BFloat16)
IPEX_DEFINE_SAMPLE(f16, ipex::Half)

void ipex_k_sample_weights(const float* values, int64_t n, float largest, float inverse_temperature,
                           float* weights) {
  using namespace ipex;
  const f32v shift = set1(largest);
  const f32v factor = set1(inverse_temperature);
  map(values, weights, n,
      [=](f32v v) IPEX_LAMBDA { return exp_nonpositive((v - shift) * factor); });
}
