// SPDX-License-Identifier: Apache-2.0
// The steps between the two products of attention, on one row of scores.
#pragma once

#include <cmath>
#include <cstring>

#include "attention.h"
#include "ipex/kernel/vec_math.h"

namespace ipex {
namespace {

// The mask of one row and the keys [first, first + count) as an addend.
template <class T>
IPEX_INLINE void load_mask(const AttentionArgs& args, const void* from, int64_t offset,
                           int64_t count, float* to) {
  const int64_t step = args.mask_key_stride;
  if (args.mask_kind == MaskKind::kBool) {
    const auto* mask = static_cast<const uint8_t*>(from) + offset;
    if (step == 1) {  // a loop that compilers make vectors of
      for (int64_t j = 0; j < count; ++j) to[j] = mask[j] ? 0.0f : -INFINITY;
    } else {
      for (int64_t j = 0; j < count; ++j) to[j] = mask[j * step] ? 0.0f : -INFINITY;
    }
  } else if (args.mask_kind == MaskKind::kFloat) {
    const auto* mask = static_cast<const float*>(from) + offset;
    if (step == 1) {
      std::memcpy(to, mask, sizeof(float) * static_cast<size_t>(count));
    } else {
      for (int64_t j = 0; j < count; ++j) to[j] = mask[j * step];
    }
  } else if (step == 1) {
    const T* mask = static_cast<const T*>(from) + offset;
    int64_t j = 0;
    for (; j + kLanes <= count; j += kLanes) store(to + j, load(mask + j));
    if (j < count) store_n(to + j, load_n(mask + j, count - j), count - j);
  } else {
    const f32v value = load_n(static_cast<const T*>(from) + offset, 1);
    for (int64_t j = 0; j < count; ++j) to[j] = value[0];
  }
}

// s = softcap * tanh(s * scale / softcap)
template <bool kFast>
IPEX_INLINE void cap_scores(float* s, float scale, float softcap, int64_t begin, int64_t end) {
  const f32v inner = set1(scale / softcap), outer = set1(softcap);
  for (int64_t j = begin; j < end; j += kLanes) {  // whole vectors: the row has room
    const f32v x = load(s + j) * inner;
    if constexpr (kFast)
      store(s + j, tanh_fast(x) * outer);
    else
      store(s + j, tanh(x) * outer);
  }
}

// s = s * factor - slope * |distance|, where key `begin` is `distance` behind the query.
IPEX_INLINE void add_alibi(float* s, float factor, float slope, int64_t distance, int64_t begin,
                           int64_t end) {
  alignas(64) float steps[kLanes];
  for (int64_t i = 0; i < kLanes; ++i) steps[i] = static_cast<float>(i);
  f32v place = load(steps) - set1(static_cast<float>(distance));
  const f32v step = set1(static_cast<float>(kLanes)), f = set1(factor), k = set1(slope);
  for (int64_t j = begin; j < end; j += kLanes) {
    store(s + j, fnma(k, abs(place), load(s + j) * f));
    place = place + step;
  }
}

// s = s * factor + near; `near` ends at the key of the query, which is `place` here.
template <class T>
IPEX_INLINE void add_near(float* s, float factor, const T* near, int64_t count, int64_t place,
                          int64_t begin, int64_t end) {
  for (int64_t j = begin; j < end; j += kLanes) store(s + j, load(s + j) * set1(factor));
  int64_t j = place + 1 - count > begin ? place + 1 - count : begin;
  const int64_t last = place + 1 < end ? place + 1 : end;
  const T* from = near + count - 1 - place;
  for (; j + kLanes <= last; j += kLanes) store(s + j, load(s + j) + load(from + j));
  if (j < last) store_n(s + j, load_n(s + j, last - j) + load_n(from + j, last - j), last - j);
}

// s = s * factor + mask; returns the maximum.
IPEX_INLINE float add_mask(float* s, const float* mask, float factor, int64_t begin, int64_t end) {
  f32v largest = set1(-INFINITY);
  const f32v f = set1(factor);
  int64_t j = begin;
  for (; j + kLanes <= end; j += kLanes) {
    const f32v v = fma(load(s + j), f, load(mask + j));
    store(s + j, v);
    largest = max(largest, v);
  }
  if (j < end) {
    const int64_t n = end - j;
    const f32v v = fma(load_n(s + j, n), f, load_n(mask + j, n));
    store_n(s + j, v, n);
    largest = max(largest, keep_n(v, n, largest));
  }
  return reduce_max(largest);
}

IPEX_INLINE float find_max(const float* s, int64_t begin, int64_t end) {
  f32v largest = set1(-INFINITY);
  int64_t j = begin;
  for (; j + kLanes <= end; j += kLanes) largest = max(largest, load(s + j));
  if (j < end) largest = max(largest, keep_n(load_n(s + j, end - j), end - j, largest));
  return reduce_max(largest);
}

// Whether any of the scores is NaN. The maximum does not tell: it loses a NaN to a number.
IPEX_INLINE bool has_nan(const float* s, int64_t begin, int64_t end) {
  bool found = false;
  for (int64_t j = begin; j < end; ++j) found |= s[j] != s[j];
  return found;
}

// e^(s * scale - largest). A positive scale is folded into the exponent; without one (1.0) the
// difference comes first, because a mask may be as small as a number can be.
template <bool kFast, bool kScaled>
class Exponential {
 public:
  IPEX_INLINE Exponential(float scale, float largest)
      : factor_(set1(kFast ? scale * kLog2E : scale)),
        shift_(set1(kFast && kScaled ? -largest * kLog2E : -largest)) {}
  IPEX_INLINE f32v operator()(f32v s) const {
    if constexpr (kFast)
      return exp2_fast(kScaled ? fma(s, factor_, shift_) : (s + shift_) * factor_);
    return exp_nonpositive(kScaled ? fma(s, factor_, shift_) : s + shift_);
  }

 private:
  f32v factor_, shift_;
};

// weights = f(s) for [begin, end), which starts at a whole vector, and zero elsewhere up to
// `padded`; returns their sum.
template <class W, class F>
IPEX_INLINE float exponentiate(const float* s, W* weights, const F& f, int64_t begin, int64_t end,
                               int64_t padded) {
  f32v total = zero();
  int64_t j = 0;
  for (; j < begin; j += kLanes) store(weights + j, zero());
  for (; j + kLanes <= end; j += kLanes) {
    const f32v e = f(load(s + j));
    total = total + e;
    store(weights + j, e);
  }
  if (j < end) {
    const f32v e = keep_n(f(load_n(s + j, end - j)), end - j, zero());
    total = total + e;
    store(weights + j, e);  // padding is a multiple of kLanes: the row has room
    j += kLanes;
  }
  for (; j < padded; j += kLanes) store(weights + j, zero());
  return reduce_add(total);
}

template <class W>
IPEX_INLINE void clear(W* weights, int64_t padded) {
  for (int64_t j = 0; j < padded; j += kLanes) store(weights + j, zero());
}

IPEX_INLINE void scale_row(float* row, float factor, int64_t count) {
  for (int64_t d = 0; d < count; d += kLanes) store(row + d, load(row + d) * set1(factor));
}

}  // namespace
}  // namespace ipex
