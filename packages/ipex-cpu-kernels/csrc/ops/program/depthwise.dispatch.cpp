// SPDX-License-Identifier: Apache-2.0
#include "program/depthwise.h"

#include "ipex/kernel/epilogue.h"
#include "ipex/kernel/vec.h"

namespace ipex {
namespace {

IPEX_INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// Neighboring places of the result that are computed at a time; with their weights they fill the
// registers.
inline constexpr int kFew = 7, kMany = kLanes == 16 ? 14 : kFew;

// The places of a window along one dimension that lie in the image: [begin, end).
struct Inside {
  int64_t begin, end;

  Inside(int64_t start, int64_t spread, int64_t window, int64_t size)
      : begin(start < 0 ? least(window, (-start + spread - 1) / spread) : 0),
        end(start < size ? least(window, (size - start + spread - 1) / spread) : 0) {}
};

template <typename T>
inline constexpr T kZeros[kLanes] = {};

// The channels [channel, channel + count) of the result, count <= kLanes.
template <typename T>
struct Block {
  Block(const DepthwiseCall& c, const T* weights, int64_t first, int64_t size)
      : call(c),
        weight(weights + first),
        finisher(c.epilogue, first, size),
        bias(load(finisher.bias())),
        count(size),
        lowest(set1(c.epilogue.activation == Activation::kRelu ? 0.0f : -__builtin_inff())),
        plain(size == kLanes && (c.epilogue.activation == Activation::kNone ||
                                 c.epilogue.activation == Activation::kRelu)) {}

  // Stores the sums of neighboring places.
  template <int kPlaces>
  IPEX_INLINE void store_sums(const f32v (&sums)[kPlaces], T* y) const {
    if (plain) {
#pragma GCC unroll 14
      for (int p = 0; p < kPlaces; ++p) {
        // The value last: max keeps the NaN of its second operand.
        store(y + p * call.channels, max(lowest, sums[p] + bias));
      }
      return;
    }
    alignas(64) float c[kPlaces * kLanes];
#pragma GCC unroll 14
    for (int p = 0; p < kPlaces; ++p) store(c + p * kLanes, sums[p]);
    finisher.rows(c, kLanes, kPlaces, 0, y, call.channels);
  }

  const DepthwiseCall& call;
  const T* weight;
  Finisher<T> finisher;
  f32v bias;
  int64_t count;
  f32v lowest;
  bool plain;  // nothing follows but the bias and a lowest value
};

// kPlaces places of a row of the result from `column` on, for a window of kWindow columns side by
// side and a step of kStep. `rows`: the places of the window that lie in the image; `line`: the row
// of x that the first of them sees. kEdge: columns may lie outside of the image.
template <int kWindow, int kStep, int kPlaces, bool kEdge, typename T>
IPEX_NOINLINE void places(const Block<T>& block, const T* line, Inside rows, int64_t column, T* y) {
  constexpr int kSeen = (kPlaces - 1) * kStep + kWindow;
  const DepthwiseCall& call = block.call;
  const int64_t channels = call.channels, first = column * kStep - call.pad[1];
  const T* w = block.weight + rows.begin * kWindow * channels;
  const int64_t down = call.spread[0] * call.width * channels;
  f32v sums[kPlaces];
#pragma GCC unroll 14
  for (int p = 0; p < kPlaces; ++p) sums[p] = zero();
  for (int64_t i = rows.begin; i < rows.end; ++i, line += down, w += kWindow * channels) {
    f32v taps[kWindow];
#pragma GCC unroll 7
    for (int k = 0; k < kWindow; ++k) taps[k] = load(w + k * channels);
    const T* at = line + first * channels;
#pragma GCC unroll 32
    for (int j = 0; j < kSeen; ++j, at += channels) {
      const bool inside =
          !kEdge || static_cast<uint64_t>(first + j) < static_cast<uint64_t>(call.width);
      const f32v v = load(inside ? at : kZeros<T>);
#pragma GCC unroll 7
      for (int k = 0; k < kWindow; ++k)
        if (j >= k && (j - k) % kStep == 0 && (j - k) / kStep < kPlaces)
          sums[(j - k) / kStep] = fma(v, taps[k], sums[(j - k) / kStep]);
    }
  }
  block.store_sums(sums, y + column * channels);
}

// A row of the result, of kFew places or more. What is left over is computed with places that are
// done already.
template <int kWindow, int kStep, typename T>
void row_of_places(const Block<T>& block, const T* line, const Inside& rows, T* y) {
  const DepthwiseCall& call = block.call;
  const int64_t columns = call.columns;
  for (int64_t c = 0; c < columns;) {
    if (columns >= kMany && (columns - c > kFew || kMany == kFew)) {
      c = least(c, columns - kMany);
      const int64_t seen = c * kStep - call.pad[1];
      if (seen >= 0 && seen + (kMany - 1) * kStep + kWindow <= call.width)
        places<kWindow, kStep, kMany, false>(block, line, rows, c, y);
      else
        places<kWindow, kStep, kMany, true>(block, line, rows, c, y);
      c += kMany;
    } else {
      c = least(c, columns - kFew);
      places<kWindow, kStep, kFew, true>(block, line, rows, c, y);
      c += kFew;
    }
  }
}

// Any window, one place at a time.
template <typename T>
void row_of_any(const Block<T>& block, const T* line, const Inside& rows, T* y) {
  const DepthwiseCall& call = block.call;
  const int64_t channels = call.channels, count = block.count;
  for (int64_t c = 0; c < call.columns; ++c) {
    const int64_t first = c * call.step[1] - call.pad[1];
    const Inside columns(first, call.spread[1], call.window[1], call.width);
    f32v sums[1] = {zero()};
    for (int64_t i = rows.begin; i < rows.end; ++i) {
      const T* at = line + ((i - rows.begin) * call.spread[0] * call.width + first) * channels;
      const T* w = block.weight + i * call.window[1] * channels;
      for (int64_t j = columns.begin; j < columns.end; ++j)
        sums[0] = fma(load_n(at + j * call.spread[1] * channels, count),
                      load_n(w + j * channels, count), sums[0]);
    }
    block.store_sums(sums, y + c * channels);
  }
}

template <typename T>
using Row = void (*)(const Block<T>&, const T*, const Inside&, T*);

template <typename T>
Row<T> row_of(const DepthwiseCall& call) {
  if (call.spread[1] != 1 || call.channels < kLanes || call.columns < kFew) return row_of_any<T>;
  const int64_t window = call.window[1], step = call.step[1];
  if (step == 1 && window == 3) return row_of_places<3, 1, T>;
  if (step == 1 && window == 5) return row_of_places<5, 1, T>;
  if (step == 1 && window == 7) return row_of_places<7, 1, T>;
  if (step == 2 && window == 3) return row_of_places<3, 2, T>;
  if (step == 2 && window == 5) return row_of_places<5, 2, T>;
  return row_of_any<T>;
}

template <typename T>
void depthwise(const DepthwiseCall& call, const T* x, const T* weight, T* y, int64_t begin,
               int64_t end) {
  const Row<T> row = row_of<T>(call);
  const int64_t channels = call.channels, line = call.width * channels;
  // Rows whose lines of x stay in L2 while all channels pass.
  constexpr int64_t kSeen = 512 * 1024;
  const int64_t bytes = line * call.step[0] * static_cast<int64_t>(sizeof(T));
  const int64_t together = kSeen / bytes > 8 ? kSeen / bytes : 8;
  for (int64_t last; begin < end; begin = last) {
    last = least(end, begin + together);
    for (int64_t c = 0; c < channels; c += kLanes) {
      const int64_t count = least(kLanes, channels);
      const int64_t channel = least(c, channels - count);
      const Block<T> block(call, weight, channel, count);
      for (int64_t number = begin; number < last; ++number) {
        const int64_t first = number % call.rows * call.step[0] - call.pad[0];
        const Inside rows(first, call.spread[0], call.window[0], call.height);
        const T* image = x + number / call.rows * call.height * line;
        row(block, image + (first + rows.begin * call.spread[0]) * line + channel, rows,
            y + number * call.columns * channels + channel);
      }
    }
  }
}

}  // namespace
}  // namespace ipex

#define IPEX_DEPTHWISE(suffix, type)                                                        \
  void ipex_k_depthwise_##suffix(const ipex::DepthwiseCall* call, const type* x,            \
                                 const type* weight, type* y, int64_t begin, int64_t end) { \
    ipex::depthwise(*call, x, weight, y, begin, end);                                       \
  }
IPEX_DEPTHWISE(f32, float)
IPEX_DEPTHWISE(bf16, ipex::BFloat16)
IPEX_DEPTHWISE(f16, ipex::Half)
