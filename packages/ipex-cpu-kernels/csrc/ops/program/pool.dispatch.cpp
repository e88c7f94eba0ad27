// SPDX-License-Identifier: Apache-2.0
#include "program/pool.h"

#include "ipex/kernel/vec_functions.h"

namespace ipex {
namespace {

IPEX_INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
IPEX_INLINE int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

// The places of one window along one dimension that lie in the image: numbers `begin` to before
// `end` of the window, at start + number * spread.
struct Span {
  int64_t start, begin, end, padded;

  Span(const PoolCall& call, int d, int64_t at, int64_t size) {
    const int64_t spread = call.spread[d], window = call.window[d];
    start = at * call.step[d] - call.pad[d];
    begin = start < 0 ? (-start + spread - 1) / spread : 0;
    end = start < size ? least(window, (size - start + spread - 1) / spread) : 0;
    padded = least(start + window, size + call.pad[d]) - start;  // for a spread of 1
  }
  int64_t count() const { return most(0, end - begin); }
};

IPEX_INLINE float divisor_of(const PoolCall& call, const Span& h, const Span& w) {
  if (call.divisor != 0) return static_cast<float>(call.divisor);
  const int64_t count = call.count_padding ? h.padded * w.padded : h.count() * w.count();
  return static_cast<float>(most(1, count));
}

template <bool kAverage>
IPEX_INLINE f32v combine(f32v a, f32v b) {
  if constexpr (kAverage) return a + b;
  return maximum(a, b);
}

template <bool kAverage>
inline constexpr float kStart = kAverage ? 0.0f : -__builtin_inff();

// kVectors vectors of channels of one place of the result.
template <bool kAverage, int kVectors, typename T>
IPEX_INLINE void pool_channels(const PoolCall& call, const T* x, const Span& h, const Span& w,
                               f32v divisor, T* y, int64_t count) {
  f32v r[kVectors];
#pragma GCC unroll 4
  for (int k = 0; k < kVectors; ++k) r[k] = set1(kStart<kAverage>);
  for (int64_t i = h.begin; i < h.end; ++i)
    for (int64_t j = w.begin; j < w.end; ++j) {
      const int64_t row = h.start + i * call.spread[0], column = w.start + j * call.spread[1];
      const T* p = x + (row * call.width + column) * call.channels;
#pragma GCC unroll 4
      for (int k = 0; k < kVectors; ++k)
        r[k] = combine<kAverage>(r[k], count < kLanes ? load_n(p, count) : load(p + k * kLanes));
    }
#pragma GCC unroll 4
  for (int k = 0; k < kVectors; ++k) {
    if constexpr (kAverage) r[k] = r[k] / divisor;
    if (count < kLanes)
      store_n(y, r[k], count);
    else
      store(y + k * kLanes, r[k]);
  }
}

template <bool kAverage, typename T>
void channels_rows(const PoolCall& call, const T* x, T* y, int64_t begin, int64_t end) {
  for (int64_t number = begin; number < end; ++number) {
    const T* image = x + number / call.rows * call.height * call.width * call.channels;
    const Span h(call, 0, number % call.rows, call.height);
    for (int64_t column = 0; column < call.columns; ++column) {
      const Span w(call, 1, column, call.width);
      const f32v divisor = set1(divisor_of(call, h, w));
      T* to = y + (number * call.columns + column) * call.channels;
      int64_t c = 0;
      for (; c + 4 * kLanes <= call.channels; c += 4 * kLanes)
        pool_channels<kAverage, 4>(call, image + c, h, w, divisor, to + c, kLanes);
      for (; c < call.channels; c += kLanes)
        pool_channels<kAverage, 1>(call, image + c, h, w, divisor, to + c,
                                   least(kLanes, call.channels - c));
    }
  }
}

// Elements at even places of 2 * kLanes.
template <typename T>
IPEX_INLINE f32v load_even(const T* p) {
  return load_pairs(p).a;
}

// Places of the result whose windows lie in the image along the columns; p: column of the image
// where the first window begins.
template <bool kAverage, typename T, typename Load>
IPEX_INLINE f32v pool_places(const PoolCall& call, const T* p, const Span& h, const Load& load_at) {
  f32v r = set1(kStart<kAverage>);
  for (int64_t i = h.begin; i < h.end; ++i) {
    const T* row = p + (h.start + i * call.spread[0]) * call.width;
    for (int64_t j = 0; j < call.window[1]; ++j)
      r = combine<kAverage>(r, load_at(row + j * call.spread[1]));
  }
  return r;
}

template <bool kAverage, typename T>
void planes_row(const PoolCall& call, const T* plane, const Span& h, T* y) {
  const int64_t step = call.step[1], pad = call.pad[1];
  // The last place of a window that begins in `inside` is still in the image.
  const int64_t inside = call.width - 1 - (call.window[1] - 1) * call.spread[1] + pad;
  const int64_t low = least(call.columns, (pad + step - 1) / step);
  const int64_t high = inside < 0 ? low : most(low, least(call.columns, inside / step + 1));
  const auto edge = [&](int64_t column) {
    const Span w(call, 1, column, call.width);
    f32v r = set1(kStart<kAverage>);
    for (int64_t i = h.begin; i < h.end; ++i)
      for (int64_t j = w.begin; j < w.end; ++j)
        r = combine<kAverage>(r, load_n(plane + (h.start + i * call.spread[0]) * call.width +
                                            w.start + j * call.spread[1],
                                        1));
    if constexpr (kAverage) r = r / set1(divisor_of(call, h, w));
    store_n(y + column, r, 1);
  };
  for (int64_t column = 0; column < low; ++column) edge(column);
  if (low < high) {
    const f32v divisor = set1(divisor_of(call, h, Span(call, 1, low, call.width)));
    const auto finish = [&](f32v r) IPEX_LAMBDA {
      if constexpr (kAverage) r = r / divisor;
      return r;
    };
    const T* const first = plane - pad;
    int64_t c = low;
    if (step == 1) {
      for (; c + kLanes <= high; c += kLanes)
        store(y + c, finish(pool_places<kAverage>(call, first + c, h,
                                                  [](const T* p) IPEX_LAMBDA { return load(p); })));
      const int64_t n = high - c;
      if (n > 0)
        store_n(y + c,
                finish(pool_places<kAverage>(call, first + c, h,
                                             [=](const T* p) IPEX_LAMBDA { return load_n(p, n); })),
                n);
      c = high;
    } else if (step == 2) {
      // Reads one place more than it needs, which the next column has.
      for (; c + kLanes < high; c += kLanes)
        store(y + c,
              finish(pool_places<kAverage>(call, first + 2 * c, h,
                                           [](const T* p) IPEX_LAMBDA { return load_even(p); })));
    }
    for (; c < high; ++c) edge(c);
  }
  for (int64_t column = high; column < call.columns; ++column) edge(column);
}

template <bool kAverage, typename T>
void planes_rows(const PoolCall& call, const T* x, T* y, int64_t begin, int64_t end) {
  for (int64_t number = begin; number < end; ++number) {
    const T* plane = x + number / call.rows * call.height * call.width;
    const Span h(call, 0, number % call.rows, call.height);
    planes_row<kAverage>(call, plane, h, y + number * call.columns);
  }
}

template <typename T>
void channels(const PoolCall* call, const T* x, T* y, int64_t begin, int64_t end) {
  if (call->average)
    channels_rows<true>(*call, x, y, begin, end);
  else
    channels_rows<false>(*call, x, y, begin, end);
}

template <typename T>
void planes(const PoolCall* call, const T* x, T* y, int64_t begin, int64_t end) {
  if (call->average)
    planes_rows<true>(*call, x, y, begin, end);
  else
    planes_rows<false>(*call, x, y, begin, end);
}

}  // namespace
}  // namespace ipex

#define IPEX_POOL(layout, suffix, type)                                                    \
  void ipex_k_pool_##layout##_##suffix(const ipex::PoolCall* call, const type* x, type* y, \
                                       int64_t begin, int64_t end) {                       \
    ipex::layout(call, x, y, begin, end);                                                  \
  }
IPEX_POOL(channels, f32, float)
IPEX_POOL(channels, bf16, ipex::BFloat16)
IPEX_POOL(channels, f16, ipex::Half)
IPEX_POOL(planes, f32, float)
IPEX_POOL(planes, bf16, ipex::BFloat16)
IPEX_POOL(planes, f16, ipex::Half)
