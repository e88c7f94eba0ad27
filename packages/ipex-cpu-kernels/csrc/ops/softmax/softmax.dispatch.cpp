// SPDX-License-Identifier: Apache-2.0
#include "softmax.h"

#include "ipex/kernel/vec_loops.h"
#include "ipex/kernel/vec_math.h"

namespace ipex {
namespace {

// Longest row of a 16-bit type whose scores are kept on the stack (32 KiB) between the sweeps.
constexpr int64_t kBuffer = 8192;

// The scores x * scale + mask of a row. A lane behind the end of the row is -infinity: it does not
// touch the maximum and its exponential is 0.
template <typename T, typename M>
struct Scores {
  const T* x;
  const M* mask;
  f32v scale;

  IPEX_INLINE f32v2 pair(int64_t i) const {
    const f32v2 a = load2(x + i);
    const f32v2 b = load2_or<T>(mask, i, zero());
    return {fma(a.a, scale, b.a), fma(a.b, scale, b.b)};
  }
  IPEX_INLINE f32v tail(int64_t i, int64_t count) const {
    const f32v a = fma(load_n(x + i, count), scale, load_n_or(mask, i, count, zero()));
    return keep_n(a, count, set1(-__builtin_inff()));
  }
};

// A NaN may get lost in the maximum, but not in the sum: its exponential is NaN whatever the
// maximum.

// Keeps the scores and then the exponentials in a buffer, in float and in the lane order of T.
template <typename T, typename M>
__attribute__((noinline)) void buffered_row(const T* x, const M* mask, float scale, T* y,
                                            int64_t n) {
  alignas(64) float buffer[kBuffer];
  const Scores<T, M> scores{x, mask, set1(scale)};
  Maximum top;
  for_pairs(
      n,
      [&](int64_t i, int k) IPEX_LAMBDA {
        const f32v2 score = scores.pair(i);
        store2(buffer + i, score);
        top.add(score, k);
      },
      [&](int64_t i, int64_t count) IPEX_LAMBDA {
        const f32v score = scores.tail(i, count);
        storeu(buffer + i, score);
        top.part[0] = max(top.part[0], score);
      });
  const f32v m = set1(top.total());
  Sum sum;
  for_pairs(
      n,
      [&](int64_t i, int k) IPEX_LAMBDA {
        const f32v2 score = load2(buffer + i);
        const f32v2 e = {exp_fast(score.a - m), exp_fast(score.b - m)};
        store2(buffer + i, e);
        sum.add(e, k);
      },
      [&](int64_t i, int64_t) IPEX_LAMBDA {
        const f32v e = exp_fast(loadu(buffer + i) - m);
        storeu(buffer + i, e);
        sum.part[0] = sum.part[0] + e;
      });
  const f32v factor = set1(1.0f / sum.total());
  for_pairs(
      n,
      [&](int64_t i, int) IPEX_LAMBDA {
        const f32v2 e = load2(buffer + i);
        store2(y + i, {e.a * factor, e.b * factor});
      },
      [&](int64_t i, int64_t count)
          IPEX_LAMBDA { store_n(y + i, loadu(buffer + i) * factor, count); });
}

// Without a buffer: float keeps the exponentials in y, which leaves more of the L1 cache to x. The
// 16-bit types would lose precision there and compute them a second time.
template <typename T, typename M>
__attribute__((noinline)) void unbuffered_row(const T* x, const M* mask, float scale, T* y,
                                              int64_t n) {
  constexpr bool kFast = kReducedPrecision<T>;
  const Scores<T, M> scores{x, mask, set1(scale)};
  Maximum top;
  for_pairs(
      n, [&](int64_t i, int k) IPEX_LAMBDA { top.add(scores.pair(i), k); },
      [&](int64_t i, int64_t count)
          IPEX_LAMBDA { top.part[0] = max(top.part[0], scores.tail(i, count)); });
  const f32v m = set1(top.total());
  const auto exponentials = [&](int64_t i) IPEX_LAMBDA -> f32v2 {
    const f32v2 score = scores.pair(i);
    return {exp_nonpositive_as<kFast>(score.a - m), exp_nonpositive_as<kFast>(score.b - m)};
  };
  Sum sum;
  for_pairs(
      n,
      [&](int64_t i, int k) IPEX_LAMBDA {
        const f32v2 e = exponentials(i);
        if constexpr (!kFast) store2(y + i, e);
        sum.add(e, k);
      },
      [&](int64_t i, int64_t count) IPEX_LAMBDA {
        const f32v e = exp_nonpositive_as<kFast>(scores.tail(i, count) - m);
        if constexpr (!kFast) store_n(y + i, e, count);
        sum.part[0] = sum.part[0] + e;
      });
  const f32v factor = set1(1.0f / sum.total());
  for_pairs(
      n,
      [&](int64_t i, int) IPEX_LAMBDA {
        f32v2 e;
        if constexpr (kFast) {
          e = exponentials(i);
        } else {
          e = load2(y + i);
        }
        store2(y + i, {e.a * factor, e.b * factor});
      },
      [&](int64_t i, int64_t count) IPEX_LAMBDA {
        f32v e;
        if constexpr (kFast) {
          e = exp_fast(scores.tail(i, count) - m);
        } else {
          e = load_n(y + i, count);
        }
        store_n(y + i, e * factor, count);
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
