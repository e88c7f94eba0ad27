// SPDX-License-Identifier: Apache-2.0
// The pixels that a bin of a box reads and their weights. The bilinear weight of a sample is a
// product of one factor per axis, so the sum over all samples of a bin is one too: the two axes are
// prepared alone, and samples that share a pixel become one tap.
#pragma once

#include <cstdint>

#include "roi_align.h"

namespace ipex {
namespace {

inline double ceil_of(double a) {
  const double whole = static_cast<double>(static_cast<int64_t>(a));
  return whole < a ? whole + 1.0 : whole;
}

// Adds a tap; samples come in ascending order, so an equal pixel is one of the last two.
inline int32_t add_tap(RoiTap* taps, int32_t count, int64_t pixel, float weight) {
  const auto p = static_cast<int32_t>(pixel);
  for (int32_t i = count - 1; i >= 0 && i >= count - 2; --i)
    if (taps[i].pixel == p) {
      taps[i].weight += weight;
      return count;
    }
  taps[count] = {p, weight};
  return count + 1;
}

// Returns the number of samples per bin.
inline double fill_axis(double start, double size, int64_t bins, int64_t pixels,
                        int64_t sampling_ratio, const RoiAxis& axis) {
  constexpr double kMany = 1e15;
  const double step = size / static_cast<double>(bins);
  const double samples = sampling_ratio > 0 ? static_cast<double>(sampling_ratio)
                         : step > kMany     ? kMany
                                            : ceil_of(step);
  const double last = static_cast<double>(pixels - 1);
  for (int64_t b = 0; b < bins; ++b) {
    RoiTap* taps = axis.taps + b * pixels;
    int32_t count = 0;
    // From the lower end on, also where a box of negative size begins at the upper one.
    const double first_place = start + static_cast<double>(step < 0.0 ? b + 1 : b) * step;
    const double distance = (step < 0.0 ? -step : step) / samples;
    // The samples that can be inside, [from, to): a box may be far larger than the map.
    double from = 0.0, to = samples > 0.0 ? samples : 0.0;
    if (distance > 0.0) {
      const double low = (-1.0 - first_place) / distance - 2.0;
      const double high = (last + 1.0 - first_place) / distance + 2.0;
      if (low > from) from = low < to ? static_cast<double>(static_cast<int64_t>(low)) : to;
      if (high < to) to = high > from ? ceil_of(high) : from;
    }
    for (double i = from; i < to; i += 1.0) {
      double place = first_place + (i + 0.5) * distance;
      if (!(place >= -1.0 && place <= last + 1.0)) continue;
      place = place < 0.0 ? 0.0 : place > last ? last : place;
      const auto pixel = static_cast<int64_t>(place);
      const auto share = static_cast<float>(place - static_cast<double>(pixel));
      count = add_tap(taps, count, pixel, 1.0f - share);
      if (share > 0.0f) count = add_tap(taps, count, pixel + 1, share);
    }
    axis.count[b] = count;
  }
  return samples > 0.0 ? samples : 0.0;
}

// The two axes of a box. The weights of the rows are divided by the number of samples.
struct BoxTaps {
  RoiAxis rows, columns;
  int64_t row_pixels, column_pixels;
  float* block;  // what is left of the working memory

  BoxTaps(const RoiGrid& grid, char* scratch) : row_pixels(grid.height), column_pixels(grid.width) {
    rows.taps = reinterpret_cast<RoiTap*>(scratch);
    columns.taps = rows.taps + grid.bin_rows * grid.height;
    rows.count = reinterpret_cast<int32_t*>(columns.taps + grid.bin_columns * grid.width);
    columns.count = rows.count + grid.bin_rows;
    const auto end = reinterpret_cast<uintptr_t>(columns.count + grid.bin_columns);
    block = reinterpret_cast<float*>((end + 63) / 64 * 64);
  }

  void fill(const RoiGrid& grid, const float* roi) {
    const double shift = grid.aligned ? 0.5 : 0.0;
    const double left = roi[1] * grid.scale - shift, top = roi[2] * grid.scale - shift;
    double width = roi[3] * grid.scale - shift - left;
    double height = roi[4] * grid.scale - shift - top;
    if (!grid.aligned) {
      width = width < 1.0 ? 1.0 : width;
      height = height < 1.0 ? 1.0 : height;
    }
    const double samples =
        fill_axis(top, height, grid.bin_rows, grid.height, grid.sampling_ratio, rows) *
        fill_axis(left, width, grid.bin_columns, grid.width, grid.sampling_ratio, columns);
    const auto factor = static_cast<float>(1.0 / (samples < 1.0 ? 1.0 : samples));
    for (int64_t b = 0; b < grid.bin_rows; ++b)
      for (int32_t i = 0; i < rows.count[b]; ++i) rows.taps[b * grid.height + i].weight *= factor;
  }
};

}  // namespace
}  // namespace ipex
