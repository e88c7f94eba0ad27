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

// A bit for each of the first n lanes that is >= low; no lane is NaN.
IPEX_INLINE uint32_t at_least(f32v v, f32v low, int64_t n) {
  const Mask below = lt(v, low);
#if IPEX_HAVE_AVX512
  const uint32_t bits = below;
#elif IPEX_HAVE_AVX2
  const uint32_t bits = static_cast<uint32_t>(_mm256_movemask_ps(as_float(below)));
#else
  const uint32_t bits = static_cast<uint32_t>(_mm_movemask_ps(as_float(below)));
#endif
  return ~bits & ((1u << n) - 1);
}

// Stores the lanes that have a bit, and others behind them.
IPEX_INLINE void put(f32v v, uint32_t bits, float* to) {
#if IPEX_HAVE_AVX512
  storeu(to, _mm512_maskz_compress_ps(static_cast<Mask>(bits), v));
#else
  // Every lane is stored and only the place differs: a branch per lane would be mispredicted.
  float lane[kLanes];
  storeu(lane, v);
  for (int64_t k = 0; k < kLanes; ++k) {
    *to = lane[k];
    to += bits >> k & 1;
  }
#endif
}
IPEX_INLINE void put_places(int64_t first, uint32_t bits, int32_t* to) {
#if IPEX_HAVE_AVX512
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i place = _mm512_add_epi32(_mm512_set1_epi32(static_cast<int>(first)), lane);
  _mm512_storeu_si512(to, _mm512_maskz_compress_epi32(static_cast<Mask>(bits), place));
#else
  for (int64_t k = 0; k < kLanes; ++k) {
    *to = static_cast<int32_t>(first + k);
    to += bits >> k & 1;
  }
#endif
}

template <typename T>
IPEX_INLINE int64_t collect(const T* x, int64_t n, float least, const float* largest, float* values,
                            int32_t* indices) {
  const f32v low = set1(least);
  int64_t found = 0;
  for (int64_t first = 0; first < n; first += kSampleBlock) {
    if (largest[first / kSampleBlock] < least) continue;
    const int64_t end = n - first < kSampleBlock ? n : first + kSampleBlock;
    for (int64_t i = first; i < end; i += kLanes) {
      const int64_t lanes = end - i < kLanes ? end - i : kLanes;
      const f32v v = lanes < kLanes ? load_n(x + i, lanes) : load(x + i);
      const uint32_t kept = at_least(v, low, lanes);
      if (kept == 0) continue;
      put(v, kept, values + found);
      put_places(i, kept, indices + found);
      found += __builtin_popcount(kept);
    }
  }
  return found;
}

// For each bound: the sum of the weights of the values that are >= it.
template <int kBounds>
IPEX_INLINE void add_above(const float* values, const float* weights, int64_t n,
                           const float* bounds, float* sums) {
  f32v sum[kBounds];
  for (int k = 0; k < kBounds; ++k) sum[k] = zero();
  for (int64_t i = 0; i < n; i += kLanes) {
    const bool whole = n - i >= kLanes;
    const f32v v = whole ? load(values + i) : load_n(values + i, n - i);
    const f32v w = whole ? load(weights + i) : load_n(weights + i, n - i);  // else 0
    for (int k = 0; k < kBounds; ++k) sum[k] = sum[k] + select(lt(v, set1(bounds[k])), zero(), w);
  }
  for (int k = 0; k < kBounds; ++k) sums[k] = reduce_add(sum[k]);
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

void ipex_k_sample_sums(const float* values, const float* weights, int64_t n, float least,
                        float* sums) {
  using namespace ipex;
  for (int64_t i = 0; i < n; i += kSampleBlock)
    add_above<1>(values + i, weights + i, n - i < kSampleBlock ? n - i : kSampleBlock, &least,
                 sums + i / kSampleBlock);
}

void ipex_k_sample_above(const float* values, const float* weights, int64_t n, const float* bounds,
                         double* above) {
  using namespace ipex;
  for (int k = 0; k < kSampleBounds; ++k) above[k] = 0.0;
  for (int64_t i = 0; i < n; i += kSampleBlock) {
    float sums[kSampleBounds];
    add_above<kSampleBounds>(values + i, weights + i, n - i < kSampleBlock ? n - i : kSampleBlock,
                             bounds, sums);
    for (int k = 0; k < kSampleBounds; ++k) above[k] += sums[k];
  }
}

int64_t ipex_k_sample_between(const float* values, const float* weights, int64_t n, float low,
                              float high, float* kept_values, float* kept_weights) {
  using namespace ipex;
  int64_t found = 0;
  for (int64_t i = 0; i < n; i += kLanes) {
    const int64_t lanes = n - i < kLanes ? n - i : kLanes;
    const f32v v = lanes < kLanes ? load_n(values + i, lanes) : load(values + i);
    const f32v w = lanes < kLanes ? load_n(weights + i, lanes) : load(weights + i);
    const uint32_t kept = at_least(v, set1(low), lanes) & ~at_least(v, set1(high), lanes);
    put(v, kept, kept_values + found);
    put(w, kept, kept_weights + found);
    found += __builtin_popcount(kept);
  }
  return found;
}
