// SPDX-License-Identifier: Apache-2.0
#include "roi_align.h"

#include "ipex/kernel/vec_loops.h"
#include "roi_taps.h"

namespace ipex {
namespace {

// Pairs of vectors of channels that are summed at once, and their number of channels.
inline constexpr int kPairs = 2;
inline constexpr int64_t kBlock = kPairs * 2 * kLanes;
// Channels of all bins that are computed before they are stored: whole stretches of memory are read
// for each tap, and the sums stay in the L2 cache.
inline constexpr int64_t kGroup = kRoiGroup;
static_assert(kGroup % kBlock == 0);

// A pair in the lane order of T as floats in their natural order.
template <typename T>
IPEX_INLINE void store2_float(float* p, f32v2 v) {
  if constexpr (kIsBFloat16<T>) v = interleave(v);
  store2(p, v);
}

// call(pixel offset, weight) for all taps of one bin.
template <typename Call>
IPEX_INLINE void for_taps(const BoxTaps& box, const RoiGrid& grid, int64_t row, int64_t column,
                          const Call& call) {
  const RoiTap* rows = box.rows.taps + row * grid.height;
  const RoiTap* columns = box.columns.taps + column * grid.width;
  for (int32_t i = 0; i < box.rows.count[row]; ++i)
    for (int32_t j = 0; j < box.columns.count[column]; ++j)
      call((rows[i].pixel * grid.width + columns[j].pixel) * grid.channels,
           rows[i].weight * columns[j].weight);
}

// kBlock channels of one bin.
template <typename T>
IPEX_INLINE void sum_block(const BoxTaps& box, const RoiGrid& grid, int64_t row, int64_t column,
                           const T* x, float* sums) {
  f32v2 total[kPairs];
#pragma GCC unroll 2
  for (int k = 0; k < kPairs; ++k) total[k] = {zero(), zero()};
  for_taps(box, grid, row, column, [&](int64_t at, float weight) IPEX_LAMBDA {
    const f32v w = set1(weight);
#pragma GCC unroll 2
    for (int k = 0; k < kPairs; ++k) {
      const f32v2 v = load2(x + at + k * 2 * kLanes);
      total[k] = {fma(v.a, w, total[k].a), fma(v.b, w, total[k].b)};
    }
  });
#pragma GCC unroll 2
  for (int k = 0; k < kPairs; ++k) store2_float<T>(sums + k * 2 * kLanes, total[k]);
}

// n channels of all bins, n <= kGroup: sums[bin * kGroup + channel].
template <typename T>
IPEX_INLINE void sum_group(const BoxTaps& box, const RoiGrid& grid, const T* x, int64_t n,
                           float* sums) {
  for (int64_t r = 0; r < grid.bin_rows; ++r)
    for (int64_t c = 0; c < grid.bin_columns; ++c, sums += kGroup) {
      int64_t i = 0;
      for (; i + kBlock <= n; i += kBlock) sum_block(box, grid, r, c, x + i, sums + i);
      for (; i < n; i += kLanes) {
        const int64_t count = n - i < kLanes ? n - i : kLanes;
        f32v total = zero();
        for_taps(box, grid, r, c, [&](int64_t at, float weight) IPEX_LAMBDA {
          total = fma(load_n(x + at + i, count), set1(weight), total);
        });
        storeu(sums + i, total);
      }
    }
}

template <typename T>
IPEX_INLINE void store_group(const float* sums, int64_t bins, int64_t channels, int64_t n,
                             bool channels_last, T* y) {
  if (channels_last) {
    for (int64_t b = 0; b < bins; ++b)
      for (int64_t c = 0; c < n; c += kLanes)
        store_n(y + b * channels + c, loadu(sums + b * kGroup + c),
                n - c < kLanes ? n - c : kLanes);
    return;
  }
  for (int64_t c = 0; c < n; ++c)
    for (int64_t b = 0; b < bins; b += kLanes) {
      const int64_t count = bins - b < kLanes ? bins - b : kLanes;
      alignas(64) float lanes[kLanes];
      for (int64_t i = 0; i < kLanes; ++i) lanes[i] = i < count ? sums[(b + i) * kGroup + c] : 0.0f;
      store_n(y + c * bins + b, loadu(lanes), count);
    }
}

template <typename T>
IPEX_INLINE void forward(const RoiAlignArgs& args, int64_t begin, int64_t end, char* scratch) {
  const RoiGrid& grid = args.grid;
  const int64_t bins = grid.bin_rows * grid.bin_columns, channels = grid.channels;
  BoxTaps box(grid, scratch);
  for (int64_t k = begin; k < end; ++k) {
    const float* roi = grid.rois + k * 5;
    box.fill(grid, roi);
    const T* x = static_cast<const T*>(args.x) +
                 static_cast<int64_t>(roi[0]) * grid.height * grid.width * channels;
    T* y = static_cast<T*>(args.y) + k * bins * channels;
    for (int64_t c = 0; c < channels; c += kGroup) {
      const int64_t n = channels - c < kGroup ? channels - c : kGroup;
      sum_group(box, grid, x + c, n, box.block);
      store_group(box.block, bins, channels, n, args.y_channels_last,
                  y + (args.y_channels_last ? c : c * bins));
    }
  }
}

template <typename T>
IPEX_INLINE void backward(const RoiAlignBackwardArgs& args, int64_t image, int64_t begin,
                          int64_t end, char* scratch) {
  const RoiGrid& grid = args.grid;
  const int64_t bins = grid.bin_rows * grid.bin_columns, channels = grid.channels;
  BoxTaps box(grid, scratch);
  float* x = args.x + image * grid.height * grid.width * channels;
  for (int64_t k = 0; k < args.boxes; ++k) {
    const float* roi = grid.rois + k * 5;
    if (static_cast<int64_t>(roi[0]) != image) continue;
    box.fill(grid, roi);
    const T* grad = static_cast<const T*>(args.grad) + k * bins * channels;
    for (int64_t r = 0; r < grid.bin_rows; ++r)
      for (int64_t c = 0; c < grid.bin_columns; ++c, grad += channels)
        for_taps(box, grid, r, c, [&](int64_t at, float weight) IPEX_LAMBDA {
          const f32v w = set1(weight);
          int64_t i = begin;
          for (; i + kLanes <= end; i += kLanes)
            storeu(x + at + i, fma(load(grad + i), w, loadu(x + at + i)));
          if (i < end)
            storeu_n(x + at + i, fma(load_n(grad + i, end - i), w, loadu_n(x + at + i, end - i)),
                     end - i);
        });
  }
}

}  // namespace
}  // namespace ipex

void ipex_k_roi_align_f32(const RoiAlignArgs* args, int64_t begin, int64_t end, char* scratch) {
  ipex::forward<float>(*args, begin, end, scratch);
}

void ipex_k_roi_align_bf16(const RoiAlignArgs* args, int64_t begin, int64_t end, char* scratch) {
  ipex::forward<ipex::BFloat16>(*args, begin, end, scratch);
}

void ipex_k_roi_align_f16(const RoiAlignArgs* args, int64_t begin, int64_t end, char* scratch) {
  ipex::forward<ipex::Half>(*args, begin, end, scratch);
}

void ipex_k_roi_align_backward_f32(const RoiAlignBackwardArgs* args, int64_t image, int64_t begin,
                                   int64_t end, char* scratch) {
  ipex::backward<float>(*args, image, begin, end, scratch);
}

void ipex_k_roi_align_backward_bf16(const RoiAlignBackwardArgs* args, int64_t image, int64_t begin,
                                    int64_t end, char* scratch) {
  ipex::backward<ipex::BFloat16>(*args, image, begin, end, scratch);
}

void ipex_k_roi_align_backward_f16(const RoiAlignBackwardArgs* args, int64_t image, int64_t begin,
                                   int64_t end, char* scratch) {
  ipex::backward<ipex::Half>(*args, image, begin, end, scratch);
}
