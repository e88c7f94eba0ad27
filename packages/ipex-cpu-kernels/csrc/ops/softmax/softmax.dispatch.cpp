// SPDX-License-Identifier: Apache-2.0
#include "softmax.h"

#include "ipex/vec_loops.h"
#include "ipex/vec_math.h"

namespace ipex {
namespace {

// Longest row of a 16-bit type whose scores are kept on the stack (32 KiB) between the sweeps.
constexpr int64_t kBuffer = 8192;

IPEX_INLINE f32v minus_infinity() { return set1(-__builtin_inff()); }

IPEX_INLINE float max_of(const f32v (&part)[kUnroll]) {
  f32v m = part[0];
#pragma GCC unroll 4
  for (int k = 1; k < kUnroll; ++k) m = max(m, part[k]);
  return reduce_max(m);
}

// A NaN may get lost in the maximum, but not in the sum: its exponential is NaN whatever the
// maximum.

// Keeps the scores and then the exponentials in a buffer, in float.
template <typename T, typename M>
__attribute__((noinline)) void buffered_row(const T* x, const M* mask, float scale, T* y,
                                            int64_t n) {
  alignas(64) float scores[kBuffer];
  const f32v s = set1(scale);
  f32v top[kUnroll];
#pragma GCC unroll 4
  for (int k = 0; k < kUnroll; ++k) top[k] = minus_infinity();
  for_vectors(
      n,
      [&](int64_t i, int k) IPEX_LAMBDA {
        const f32v score = fma(load(x + i), s, load_or(mask, i, zero()));
        storeu(scores + i, score);
        top[k] = max(top[k], score);
      },
      [&](int64_t i, int64_t count) IPEX_LAMBDA {
        f32v score = fma(load_n(x + i, count), s, load_n_or(mask, i, count, zero()));
        score = keep_n(score, count, minus_infinity());
        storeu(scores + i, score);
        top[0] = max(top[0], score);
      });
  // The scores are padded with -infinity to whole vectors, which adds exp(-infinity) = 0.
  const f32v m = set1(max_of(top));
  const auto no_tail = [](int64_t, int64_t) IPEX_LAMBDA {};
  Sum sum;
  for_vectors((n + kLanes - 1) / kLanes * kLanes,
              [&](int64_t i, int k) IPEX_LAMBDA {
                const f32v e = exp_fast(loadu(scores + i) - m);
                storeu(scores + i, e);
                sum.part[k] = sum.part[k] + e;
              },
              no_tail);
  const f32v factor = set1(1.0f / sum.total());
  for_vectors(
      n, [&](int64_t i, int) IPEX_LAMBDA { store(y + i, loadu(scores + i) * factor); },
      [&](int64_t i, int64_t count)
          IPEX_LAMBDA { store_n(y + i, loadu(scores + i) * factor, count); });
}

// Without a buffer: float keeps the exponentials in y, which leaves more of the L1 cache to x. The
// 16-bit types would lose precision there and compute them a second time.
template <typename T, typename M>
__attribute__((noinline)) void unbuffered_row(const T* x, const M* mask, float scale, T* y,
                                              int64_t n) {
  constexpr bool kFast = kReducedPrecision<T>;
  const f32v s = set1(scale);
  const auto score = [&](int64_t i)
                         IPEX_LAMBDA { return fma(load(x + i), s, load_or(mask, i, zero())); };
  const auto last_score = [&](int64_t i, int64_t count) IPEX_LAMBDA {
    const f32v a = fma(load_n(x + i, count), s, load_n_or(mask, i, count, zero()));
    return keep_n(a, count, minus_infinity());
  };
  f32v top[kUnroll];
#pragma GCC unroll 4
  for (int k = 0; k < kUnroll; ++k) top[k] = minus_infinity();
  for_vectors(
      n, [&](int64_t i, int k) IPEX_LAMBDA { top[k] = max(top[k], score(i)); },
      [&](int64_t i, int64_t count) IPEX_LAMBDA { top[0] = max(top[0], last_score(i, count)); });
  const f32v m = set1(max_of(top));
  Sum sum;
  for_vectors(
      n,
      [&](int64_t i, int k) IPEX_LAMBDA {
        const f32v e = exp_nonpositive_as<kFast>(score(i) - m);
        if constexpr (!kFast) store(y + i, e);
        sum.part[k] = sum.part[k] + e;
      },
      [&](int64_t i, int64_t count) IPEX_LAMBDA {
        const f32v e = exp_nonpositive_as<kFast>(last_score(i, count) - m);
        if constexpr (!kFast) store_n(y + i, e, count);
        sum.part[0] = sum.part[0] + e;
      });
  const f32v factor = set1(1.0f / sum.total());
  for_vectors(
      n,
      [&](int64_t i, int) IPEX_LAMBDA {
        if constexpr (kFast) {
          store(y + i, exp_nonpositive_as<kFast>(score(i) - m) * factor);
        } else {
          store(y + i, load(y + i) * factor);
        }
      },
      [&](int64_t i, int64_t count) IPEX_LAMBDA {
        if constexpr (kFast) {
          store_n(y + i, exp_nonpositive_as<kFast>(last_score(i, count) - m) * factor, count);
        } else {
          store_n(y + i, load_n(y + i, count) * factor, count);
        }
      });
}

template <typename T, typename M>
IPEX_INLINE void softmax_row(const T* x, const M* mask, float scale, T* y, int64_t n) {
  if constexpr (kReducedPrecision<T>) {
    if (n <= kBuffer) return buffered_row(x, mask, scale, y, n);
  }
  unbuffered_row(x, mask, scale, y, n);
}

// Element offset of the mask row that belongs to row r of x.
IPEX_INLINE int64_t mask_offset(int64_t r, const int64_t* sizes, const int64_t* strides,
                                int64_t dims) {
  int64_t offset = 0;
  for (int64_t d = dims - 1; d > 0; --d) {
    offset += r % sizes[d] * strides[d];
    r /= sizes[d];
  }
  return dims > 0 ? offset + r * strides[0] : 0;
}

template <typename T>
IPEX_INLINE void run(const T* x, int64_t x_stride, const void* mask, bool mask_is_f32,
                     const int64_t* sizes, const int64_t* strides, int64_t dims, float scale, T* y,
                     int64_t cols, int64_t begin, int64_t end) {
  for (int64_t r = begin; r < end; ++r) {
    const T* from = x + r * x_stride;
    T* to = y + r * cols;
    if (mask == nullptr) {
      softmax_row(from, static_cast<const None*>(nullptr), scale, to, cols);
      continue;
    }
    const int64_t offset = mask_offset(r, sizes, strides, dims);
    if (mask_is_f32) {
      softmax_row(from, static_cast<const float*>(mask) + offset, scale, to, cols);
    } else {
      softmax_row(from, static_cast<const T*>(mask) + offset, scale, to, cols);
    }
  }
}

}  // namespace
}  // namespace ipex

void ipex_k_softmax_f32(const float* x, int64_t x_stride, const void* mask, bool mask_is_f32,
                        const int64_t* sizes, const int64_t* strides, int64_t dims, float scale,
                        float* y, int64_t cols, int64_t begin, int64_t end) {
  ipex::run(x, x_stride, mask, mask_is_f32, sizes, strides, dims, scale, y, cols, begin, end);
}

void ipex_k_softmax_bf16(const ipex::BFloat16* x, int64_t x_stride, const void* mask,
                         bool mask_is_f32, const int64_t* sizes, const int64_t* strides,
                         int64_t dims, float scale, ipex::BFloat16* y, int64_t cols, int64_t begin,
                         int64_t end) {
  ipex::run(x, x_stride, mask, mask_is_f32, sizes, strides, dims, scale, y, cols, begin, end);
}

void ipex_k_softmax_f16(const ipex::Half* x, int64_t x_stride, const void* mask, bool mask_is_f32,
                        const int64_t* sizes, const int64_t* strides, int64_t dims, float scale,
                        ipex::Half* y, int64_t cols, int64_t begin, int64_t end) {
  ipex::run(x, x_stride, mask, mask_is_f32, sizes, strides, dims, scale, y, cols, begin, end);
}
