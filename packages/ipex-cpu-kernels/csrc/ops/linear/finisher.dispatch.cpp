// SPDX-License-Identifier: Apache-2.0
// The one instance of Finisher for each type of a level.
#include "ipex/kernel/epilogue.h"
#include "ipex/kernel/vec.h"
#include "ipex/kernel/vec_math.h"

#include <type_traits>

namespace ipex {
namespace {

// Two vectors side by side.
template <class T>
IPEX_INLINE void store_pair(T* to, f32v a, f32v b) {
#if IPEX_HAVE_AVX512_BF16
  if constexpr (std::is_same_v<T, BFloat16>) {
    const __m512bh pair = _mm512_cvtne2ps_pbh(b, a);
    _mm512_storeu_si512(to, reinterpret_cast<__m512i>(pair));
    return;
  }
#endif
  store(to, a);
  store(to + kLanes, b);
}

}  // namespace

template <class T>
Finisher<T>::Finisher(const Epilogue& epilogue, int64_t column, int64_t count)
    : epilogue_(&epilogue), column_(column), count_(count) {
  if (epilogue.gated) {
    load_bias(2 * column, count, bias_);
    load_bias(2 * column + kGateColumns, count, bias_ + kGateColumns);
  } else {
    load_bias(column, count, bias_);
  }
}

template <class T>
void Finisher<T>::rows(const float* c, int64_t ldc, int64_t rows, int64_t row, T* y,
                       int64_t y_stride) const {
  constexpr bool kFast = kReducedPrecision<T>;
  const f32v alpha = set1(epilogue_->alpha);
  const auto sum = [&](const float* at, int64_t i)
                       IPEX_LAMBDA { return fma(alpha, load(at + i), load(bias_ + i)); };
  const auto each = [&](const auto& activate) IPEX_LAMBDA {
    if (epilogue_->gated) {
      run(c, ldc, rows, row, y, y_stride, [&](const float* at, int64_t i) IPEX_LAMBDA {
        return activate(sum(at, i)) * sum(at, kGateColumns + i);
      });
    } else {
      run(c, ldc, rows, row, y, y_stride,
          [&](const float* at, int64_t i) IPEX_LAMBDA { return activate(sum(at, i)); });
    }
  };
  switch (epilogue_->activation) {
    case Activation::kNone:
      return each([](f32v v) IPEX_LAMBDA { return v; });
    case Activation::kRelu:
      // The value last: max keeps the NaN of its second operand.
      return each([](f32v v) IPEX_LAMBDA { return max(zero(), v); });
    case Activation::kGelu:
      return each([](f32v v) IPEX_LAMBDA { return gelu<kFast>(v); });
    case Activation::kGeluTanh:
      return each([](f32v v) IPEX_LAMBDA { return gelu_tanh<kFast>(v); });
    case Activation::kSilu:
      return each([](f32v v) IPEX_LAMBDA { return silu<kFast>(v); });
    case Activation::kSwigluOai: {
      const f32v slope = set1(epilogue_->swiglu_alpha), limit = set1(epilogue_->swiglu_limit);
      return run(c, ldc, rows, row, y, y_stride, [&](const float* at, int64_t i) IPEX_LAMBDA {
        // The value last: min and max keep the NaN of their second operand.
        const f32v g = min(limit, sum(at, i));
        const f32v u = min(limit, sum(at, kGateColumns + i));
        const f32v s = kFast ? sigmoid_fast(g * slope) : sigmoid(g * slope);
        return (max(-limit, u) + set1(1.0f)) * (g * s);
      });
    }
  }
}

// Bias of `count` columns as float, zero without a bias.
template <class T>
void Finisher<T>::load_bias(int64_t column, int64_t count, float* to) const {
  for (int64_t i = 0; i < count; i += kLanes) {
    const int64_t at = column + i, n = count - i;
    f32v v = zero();
    if (epilogue_->bias && epilogue_->bias_is_f32) {
      const auto* bias = static_cast<const float*>(epilogue_->bias) + at;
      v = n >= kLanes ? load(bias) : load_n(bias, n);
    } else if (epilogue_->bias) {
      const auto* bias = static_cast<const T*>(epilogue_->bias) + at;
      v = n >= kLanes ? load(bias) : load_n(bias, n);
    }
    store(to + i, v);
  }
}

template <class T>
const T* Finisher<T>::operand(const void* base, int64_t stride, int64_t row) const {
  return base ? static_cast<const T*>(base) + row * stride + column_ : nullptr;
}

// `value(c, i)` are the columns i .. i + kLanes of one row before mul, add and add2.
template <class T>
template <class F>
IPEX_INLINE void Finisher<T>::run(const float* c, int64_t ldc, int64_t rows, int64_t row, T* y,
                                  int64_t y_stride, const F& value) const {
  const bool alone = !epilogue_->mul && !epilogue_->add && !epilogue_->add2;
  // A panel of two vectors: what a tile block is.
  if (alone && count_ == 2 * kLanes) {
    for (int64_t r = 0; r < rows; ++r, c += ldc, y += y_stride)
      store_pair(y, value(c, 0), value(c, kLanes));
    return;
  }
  for (int64_t r = 0; r < rows; ++r, c += ldc, y += y_stride) {
    if (alone) {
      int64_t i = 0;
      for (; i + kLanes <= count_; i += kLanes) store(y + i, value(c, i));
      if (i < count_) store_n(y + i, value(c, i), count_ - i);
      continue;
    }
    const T* mul = operand(epilogue_->mul, epilogue_->mul_stride, row + r);
    const T* add = operand(epilogue_->add, epilogue_->add_stride, row + r);
    const T* add2 = operand(epilogue_->add2, epilogue_->add2_stride, row + r);
    for (int64_t i = 0; i < count_; i += kLanes) {
      const int64_t n = count_ - i;
      const auto read = [&](const T* p)
                            IPEX_LAMBDA { return n >= kLanes ? load(p + i) : load_n(p + i, n); };
      f32v v = value(c, i);
      if (mul) v = v * read(mul);
      if (add) v = v + read(add);
      if (add2) v = v + read(add2);
      if (n >= kLanes)
        store(y + i, v);
      else
        store_n(y + i, v, n);
    }
  }
}

template class Finisher<float>;
template class Finisher<BFloat16>;
template class Finisher<Half>;

}  // namespace ipex
