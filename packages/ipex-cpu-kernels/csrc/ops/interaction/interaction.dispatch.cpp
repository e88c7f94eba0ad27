// SPDX-License-Identifier: Apache-2.0
// Products of all pairs of N short vectors, sample by sample: what one sample needs fits the first
// cache, so each input is read from memory once.
#include "interaction.h"

#include <type_traits>

#include "interaction_tiles.h"
#include "ipex/kernel/vec.h"

namespace ipex {
namespace {

// A block is kI x kJ products, with the lanes along the vectors.
inline constexpr int64_t kI = kLanes == 16 ? 4 : 2;
inline constexpr int64_t kJ = 4;

// How vectors of T are read and multiplied.
template <class T>
struct Dot {
  using V = f32v;
  static constexpr int64_t kStep = kLanes;
  static IPEX_INLINE V read(const T* p) { return load(p); }
  static IPEX_INLINE V read_n(const T* p, int64_t n) { return load_n(p, n); }
  static IPEX_INLINE f32v add(f32v sum, V a, V b) { return fma(a, b, sum); }
};

#if IPEX_HAVE_AVX512_BF16
template <>
struct Dot<BFloat16> {
  using V = __m512i;
  static constexpr int64_t kStep = 32;
  static IPEX_INLINE V read(const BFloat16* p) { return _mm512_loadu_si512(p); }
  static IPEX_INLINE V read_n(const BFloat16* p, int64_t n) {
    return _mm512_maskz_loadu_epi16(static_cast<__mmask32>((uint64_t{1} << n) - 1), p);
  }
  static IPEX_INLINE f32v add(f32v sum, V a, V b) {
    return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
  }
};
#endif

// to[i * kJ + j] = sum of the lanes of parts[i][j].
IPEX_INLINE void add_lanes(const f32v (&parts)[kI][kJ], float* to) {
#if IPEX_HAVE_AVX512
  // 15 additions for 16 sums: each step halves what is left of two vectors and packs them into one.
  __m512 rows[kI];
#pragma GCC unroll 4
  for (int64_t i = 0; i < kI; ++i) {
    const __m512 a = parts[i][0], b = parts[i][1], c = parts[i][2], d = parts[i][3];
    const __m512d ab = _mm512_castps_pd(_mm512_unpacklo_ps(a, b) + _mm512_unpackhi_ps(a, b));
    const __m512d cd = _mm512_castps_pd(_mm512_unpacklo_ps(c, d) + _mm512_unpackhi_ps(c, d));
    rows[i] =
        _mm512_castpd_ps(_mm512_unpacklo_pd(ab, cd)) + _mm512_castpd_ps(_mm512_unpackhi_pd(ab, cd));
  }
  const __m512 low =
      _mm512_shuffle_f32x4(rows[0], rows[1], 0x44) + _mm512_shuffle_f32x4(rows[0], rows[1], 0xEE);
  const __m512 high =
      _mm512_shuffle_f32x4(rows[2], rows[3], 0x44) + _mm512_shuffle_f32x4(rows[2], rows[3], 0xEE);
  storeu(to, _mm512_shuffle_f32x4(low, high, 0x88) + _mm512_shuffle_f32x4(low, high, 0xDD));
#elif IPEX_HAVE_AVX2
#pragma GCC unroll 2
  for (int64_t i = 0; i < kI; ++i) {
    const __m256 all = _mm256_hadd_ps(_mm256_hadd_ps(parts[i][0], parts[i][1]),
                                      _mm256_hadd_ps(parts[i][2], parts[i][3]));
    _mm_storeu_ps(to + i * kJ, _mm256_castps256_ps128(all) + _mm256_extractf128_ps(all, 1));
  }
#else
  for (int64_t i = 0; i < kI; ++i)
    for (int64_t j = 0; j < kJ; ++j) to[i * kJ + j] = reduce_add(parts[i][j]);
#endif
}

template <class T>
IPEX_INLINE const T* row_of(const InteractionArgs& args, int64_t i, int64_t sample) {
  return static_cast<const T*>(args.inputs[i]) + sample * args.strides[i];
}

template <class T>
IPEX_INLINE void multiply_block(const T* const (&a)[kI], const T* const (&b)[kJ], int64_t dim,
                                float* to) {
  using D = Dot<T>;
  f32v parts[kI][kJ];
#pragma GCC unroll 4
  for (int64_t i = 0; i < kI; ++i)
#pragma GCC unroll 4
    for (int64_t j = 0; j < kJ; ++j) parts[i][j] = zero();
  const auto step = [&](auto&& read) IPEX_LAMBDA {
    typename D::V right[kJ];
#pragma GCC unroll 4
    for (int64_t j = 0; j < kJ; ++j) right[j] = read(b[j]);
#pragma GCC unroll 4
    for (int64_t i = 0; i < kI; ++i) {
      const typename D::V left = read(a[i]);
#pragma GCC unroll 4
      for (int64_t j = 0; j < kJ; ++j) parts[i][j] = D::add(parts[i][j], left, right[j]);
    }
  };
  int64_t d = 0;
  for (; d + D::kStep <= dim; d += D::kStep)
    step([&](const T* p) IPEX_LAMBDA { return D::read(p + d); });
  if (d < dim) step([&](const T* p) IPEX_LAMBDA { return D::read_n(p + d, dim - d); });
  add_lanes(parts, to);
}

template <class T>
IPEX_INLINE void copy_row(const T* from, T* to, int64_t n) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(to + i, load(from + i));
  if (i < n) store_n(to + i, load_n(from + i, n - i), n - i);
}

template <class T>
IPEX_INLINE void run_forward(const InteractionArgs& args, int64_t begin, int64_t end,
                             float* scratch) {
#if IPEX_HAVE_AMX
  if constexpr (kIsBFloat16<T>) {
    if (fits_tiles(args)) return interaction_tiles(args, begin, end, scratch);
  }
#endif
  const int64_t count = args.count, dim = args.dim, width = interaction_width(count, dim);
  for (int64_t sample = begin; sample < end; ++sample) {
    T* out = static_cast<T*>(args.out) + sample * width;
    copy_row(row_of<T>(args, 0, sample), out, dim);
    float* products = scratch;
    if constexpr (std::is_same_v<T, float>) products = out + dim;
    for (int64_t i0 = 1; i0 < count; i0 += kI) {
      // Rows behind the last one are computed and not stored.
      const T* a[kI];
      for (int64_t i = 0; i < kI; ++i)
        a[i] = row_of<T>(args, i0 + i < count ? i0 + i : count - 1, sample);
      const int64_t last = i0 + kI < count ? i0 + kI : count;
      for (int64_t j0 = 0; j0 + 1 < last; j0 += kJ) {
        const T* b[kJ];
        for (int64_t j = 0; j < kJ; ++j)
          b[j] = row_of<T>(args, j0 + j < count ? j0 + j : count - 1, sample);
        alignas(64) float block[kI * kJ];
        multiply_block(a, b, dim, block);
        for (int64_t i = i0; i < last; ++i) {
          float* to = products + i * (i - 1) / 2 + j0;
          const float* from = block + (i - i0) * kJ;
          const int64_t n = i - j0;
          if (n >= kJ) {
            __builtin_memcpy(to, from, kJ * sizeof(float));
          } else {
            for (int64_t j = 0; j < n; ++j) to[j] = from[j];
          }
        }
      }
    }
    if constexpr (!std::is_same_v<T, float>) {
      const int64_t n = width - dim;
      int64_t i = 0;
      for (; i + kLanes <= n; i += kLanes) store(out + dim + i, loadu(products + i));
      if (i < n) store_n(out + dim + i, loadu_n(products + i, n - i), n - i);
    }
  }
}

// Rows [i0, i0 + kRows) of weights * inputs, at the numbers [d, d + kVectors vectors).
template <class T, int64_t kRows, int64_t kVectors, class Load, class Store>
IPEX_INLINE void combine(const InteractionArgs& args, int64_t sample, int64_t i0,
                         const float* weights, const T* grad, const Load& read,
                         const Store& write) {
  const int64_t count = args.count;
  f32v sum[kRows][kVectors];
#pragma GCC unroll 4
  for (int64_t i = 0; i < kRows; ++i)
#pragma GCC unroll 4
    for (int64_t v = 0; v < kVectors; ++v) sum[i][v] = i0 + i == 0 ? read(grad, v) : zero();
  for (int64_t j = 0; j < count; ++j) {
    const T* row = row_of<T>(args, j, sample);
    f32v x[kVectors];
#pragma GCC unroll 4
    for (int64_t v = 0; v < kVectors; ++v) x[v] = read(row, v);
#pragma GCC unroll 4
    for (int64_t i = 0; i < kRows; ++i) {
      const f32v weight = set1(weights[(i0 + i) * count + j]);
#pragma GCC unroll 4
      for (int64_t v = 0; v < kVectors; ++v) sum[i][v] = fma(weight, x[v], sum[i][v]);
    }
  }
#pragma GCC unroll 4
  for (int64_t i = 0; i < kRows; ++i) {
    T* to = static_cast<T*>(args.out) + ((i0 + i) * args.batch + sample) * args.dim;
#pragma GCC unroll 4
    for (int64_t v = 0; v < kVectors; ++v) write(to, v, sum[i][v]);
  }
}

template <class T, int64_t kRows>
IPEX_INLINE void combine_rows(const InteractionArgs& args, int64_t sample, int64_t i0,
                              const float* weights, const T* grad) {
  constexpr int64_t kVectors = kLanes == 16 ? 4 : 2;
  const int64_t dim = args.dim;
  int64_t d = 0;
  const auto read = [&](const T* p, int64_t v) IPEX_LAMBDA { return load(p + d + v * kLanes); };
  const auto write = [&](T* p, int64_t v, f32v x) IPEX_LAMBDA { store(p + d + v * kLanes, x); };
  for (; d + kVectors * kLanes <= dim; d += kVectors * kLanes)
    combine<T, kRows, kVectors>(args, sample, i0, weights, grad, read, write);
  for (; d + kLanes <= dim; d += kLanes)
    combine<T, kRows, 1>(args, sample, i0, weights, grad, read, write);
  if (d < dim)
    combine<T, kRows, 1>(
        args, sample, i0, weights, grad,
        [&](const T* p, int64_t) IPEX_LAMBDA { return load_n(p + d, dim - d); },
        [&](T* p, int64_t, f32v x) IPEX_LAMBDA { store_n(p + d, x, dim - d); });
}

template <class T>
IPEX_INLINE void run_backward(const InteractionArgs& args, int64_t begin, int64_t end,
                              float* weights) {
  const int64_t count = args.count;
  for (int64_t sample = begin; sample < end; ++sample) {
    const T* grad = static_cast<const T*>(args.grad) + sample * args.grad_stride;
    const T* from = grad + args.dim;
    for (int64_t i = 0; i < count; ++i) {
      weights[i * count + i] = 0.0f;
      for (int64_t j = 0; j < i; ++j) {
        const float weight = load_n(from++, 1)[0];
        weights[i * count + j] = weight;
        weights[j * count + i] = weight;
      }
    }
    int64_t i = 0;
    for (; i + 4 <= count; i += 4) combine_rows<T, 4>(args, sample, i, weights, grad);
    for (; i < count; ++i) combine_rows<T, 1>(args, sample, i, weights, grad);
  }
}

}  // namespace
}  // namespace ipex

#define IPEX_DEFINE_INTERACTION(suffix, T)                                                        \
  void ipex_k_interaction_##suffix(const ipex::InteractionArgs* args, int64_t begin, int64_t end, \
                                   float* scratch) {                                              \
    ipex::run_forward<T>(*args, begin, end, scratch);                                             \
  }                                                                                               \
  void ipex_k_interaction_backward_##suffix(const ipex::InteractionArgs* args, int64_t begin,     \
                                            int64_t end, float* scratch) {                        \
    ipex::run_backward<T>(*args, begin, end, scratch);                                            \
  }
IPEX_DEFINE_INTERACTION(f32, float)
IPEX_DEFINE_INTERACTION(bf16, ipex::BFloat16)
IPEX_DEFINE_INTERACTION(f16, ipex::Half)
#undef IPEX_DEFINE_INTERACTION
