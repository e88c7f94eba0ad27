// SPDX-License-Identifier: Apache-2.0
#include "program/upsample.h"

#include "ipex/kernel/vec.h"

namespace ipex {
namespace {

IPEX_INLINE f32v blend(f32v a, f32v b, f32v of_a, f32v of_b) { return fma(b, of_b, a * of_a); }
IPEX_INLINE f32v2 blend(f32v2 a, f32v2 b, f32v of_a, f32v of_b) {
  return {blend(a.a, b.a, of_a, of_b), blend(a.b, b.b, of_a, of_b)};
}

// Neighboring places of the result that lie between the same two columns of x.
struct Group {
  int64_t count;
  const float *of_low, *of_high;
};

// kPairs pairs of vectors of channels. The corners of x: low and high columns of two rows.
template <int kPairs, typename T>
IPEX_INLINE void blend_pairs(const T* const (&corners)[4], int64_t c, f32v of_top, f32v of_bottom,
                             const Group& group, int64_t channels, T* y) {
  f32v2 low[kPairs], high[kPairs];
#pragma GCC unroll 2
  for (int k = 0; k < kPairs; ++k) {
    const int64_t at = c + k * 2 * kLanes;
    low[k] = blend(load2(corners[0] + at), load2(corners[2] + at), of_top, of_bottom);
    high[k] = blend(load2(corners[1] + at), load2(corners[3] + at), of_top, of_bottom);
  }
  for (int64_t i = 0; i < group.count; ++i) {
    const f32v a = set1(group.of_low[i]), b = set1(group.of_high[i]);
#pragma GCC unroll 2
    for (int k = 0; k < kPairs; ++k)
      store2(y + i * channels + c + k * 2 * kLanes, blend(low[k], high[k], a, b));
  }
}

template <typename T>
void channels_row(const UpsampleCall& call, const T* top, const T* bottom, float of_top,
                  float of_bottom, T* y) {
  const int64_t channels = call.channels;
  const Between& right = call.right;
  const f32v u = set1(of_top), v = set1(of_bottom);
  for (int64_t first = 0, end; first < call.columns; first = end) {
    const int64_t low = right.low[first], high = right.high[first];
    for (end = first + 1; end < call.columns && right.low[end] == low; ++end) {
    }
    const Group group{end - first, right.of_low + first, right.of_high + first};
    const T* const corners[4] = {top + low * channels, top + high * channels,
                                 bottom + low * channels, bottom + high * channels};
    T* to = y + first * channels;
    int64_t c = 0;
    for (; c + 4 * kLanes <= channels; c += 4 * kLanes)
      blend_pairs<2>(corners, c, u, v, group, channels, to);
    for (; c + 2 * kLanes <= channels; c += 2 * kLanes)
      blend_pairs<1>(corners, c, u, v, group, channels, to);
    for (; c < channels; c += kLanes) {
      const int64_t n = channels - c < kLanes ? channels - c : kLanes;
      const auto read = [&](const T* p) IPEX_LAMBDA { return load_n(p + c, n); };
      const f32v left = blend(read(corners[0]), read(corners[2]), u, v);
      const f32v beside = blend(read(corners[1]), read(corners[3]), u, v);
      for (int64_t i = 0; i < group.count; ++i)
        store_n(to + i * channels + c,
                blend(left, beside, set1(group.of_low[i]), set1(group.of_high[i])), n);
    }
  }
}

template <typename T>
void channels(const UpsampleCall& call, const T* x, T* y, int64_t begin, int64_t end, float*) {
  const int64_t line = call.width * call.channels;
  for (int64_t number = begin; number < end; ++number) {
    const T* image = x + number / call.rows * call.height * line;
    const int64_t row = number % call.rows;
    channels_row(call, image + call.down.low[row] * line, image + call.down.high[row] * line,
                 call.down.of_low[row], call.down.of_high[row],
                 y + number * call.columns * call.channels);
  }
}

template <typename T>
void planes(const UpsampleCall& call, const T* x, T* y, int64_t begin, int64_t end,
            float* scratch) {
  const int64_t width = call.width, columns = call.columns;
  float* const line = scratch;
  float* const result = scratch + width;
  for (int64_t number = begin; number < end; ++number) {
    const T* plane = x + number / call.rows * call.height * width;
    const int64_t row = number % call.rows;
    T* const to = y + number * columns;
    const T *top = plane + call.down.low[row] * width,
            *bottom = plane + call.down.high[row] * width;
    const f32v u = set1(call.down.of_low[row]), v = set1(call.down.of_high[row]);
    int64_t i = 0;
    for (; i + kLanes <= width; i += kLanes)
      store(line + i, blend(load(top + i), load(bottom + i), u, v));
    if (i < width)
      store_n(line + i, blend(load_n(top + i, width - i), load_n(bottom + i, width - i), u, v),
              width - i);
    const Between& right = call.right;
#pragma GCC ivdep
    for (int64_t c = 0; c < columns; ++c)
      result[c] = line[right.low[c]] * right.of_low[c] + line[right.high[c]] * right.of_high[c];
    for (i = 0; i + kLanes <= columns; i += kLanes) store(to + i, load(result + i));
    if (i < columns) store_n(to + i, load_n(result + i, columns - i), columns - i);
  }
}

}  // namespace
}  // namespace ipex

#define IPEX_UPSAMPLE(layout, suffix, type)                                                        \
  void ipex_k_upsample_##layout##_##suffix(const ipex::UpsampleCall* call, const type* x, type* y, \
                                           int64_t begin, int64_t end, float* scratch) {           \
    ipex::layout(*call, x, y, begin, end, scratch);                                                \
  }
IPEX_UPSAMPLE(channels, f32, float)
IPEX_UPSAMPLE(channels, bf16, ipex::BFloat16)
IPEX_UPSAMPLE(channels, f16, ipex::Half)
IPEX_UPSAMPLE(planes, f32, float)
IPEX_UPSAMPLE(planes, bf16, ipex::BFloat16)
IPEX_UPSAMPLE(planes, f16, ipex::Half)
