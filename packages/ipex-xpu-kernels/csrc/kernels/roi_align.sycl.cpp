// SPDX-License-Identifier: Apache-2.0
// RoIAlign. The bilinear weight of a sample is a product of one factor for each axis, and so is the
// sum over the samples of a bin: the axes are prepared alone, and samples that share a pixel become
// one tap.
#include "names.h"

using Index = unsigned long;

struct Tap {
  int pixel;
  float weight;
};

// Adds to the taps of a bin. Samples come in ascending order, so an equal pixel is one of the last
// two.
inline int add_tap(Tap* taps, int count, int pixel, float weight) {
  for (int i = count - 1; i >= 0 && i >= count - 2; --i) {
    if (taps[i].pixel == pixel) {
      taps[i].weight += weight;
      return count;
    }
  }
  taps[count] = {pixel, weight};
  return count + 1;
}

// The taps of one axis, an item for each bin of each box: `most` places for each bin, in ascending
// order, with the mean over the samples. `corner` is where a box holds its begin on this axis. A
// box that is not finite or of no image has none, and raises the flag. Real is double where the
// device has it.
template <typename Real>
IPEX_KERNEL(1)
void roi_taps(Tap* taps, int* counts, const float* rois, Index boxes, Index bins, Index most,
              Index images, int pixels, int corner, Real scale, int ratio, int aligned, int* flag) {
  constexpr Real kMany = 1e15f;
  const Index item = ipex::global_id();
  if (item >= boxes * bins) return;
  const float* roi = rois + item / bins * 5;
  counts[item] = 0;
  bool fine = roi[0] >= 0.f && roi[0] < static_cast<float>(images) && roi[0] == sycl::floor(roi[0]);
  for (int i = 1; i < 5; ++i) fine = fine && roi[i] - roi[i] == 0.f;
  if (!fine) {
    *flag = 1;
    return;
  }
  if (pixels == 0) return;
  const Real shift = aligned ? 0.5f : 0.f;
  const Real begin = roi[corner] * scale - shift;
  Real size = roi[corner + 2] * scale - shift - begin;
  if (!aligned && size < 1) size = 1;
  const Real step = size / static_cast<Real>(bins);
  const Real samples = ratio > 0 ? Real(ratio) : step > kMany ? kMany : sycl::ceil(step);
  // From the lower end on, also where a box of negative size begins at the upper one.
  const Index bin = item % bins;
  const Real first = begin + static_cast<Real>(step < 0 ? bin + 1 : bin) * step;
  const Real distance = (step < 0 ? -step : step) / samples;
  // The samples that can be inside, [from, to): a box may be far larger than the map.
  const Real last = pixels - 1;
  Real from = 0, to = samples > 0 ? samples : 0;
  if (distance > 0) {
    const Real low = (-1 - first) / distance - 2;
    const Real high = (last + 1 - first) / distance + 2;
    if (low > from) from = low < to ? sycl::floor(low) : to;
    if (high < to) to = high > from ? sycl::ceil(high) : from;
  }
  taps += item * most;
  int count = 0;
  for (Real i = from; i < to; i += 1) {
    Real place = first + (i + Real(0.5f)) * distance;
    if (!(place >= -1 && place <= last + 1)) continue;
    place = place < 0 ? 0 : place > last ? last : place;
    const int pixel = static_cast<int>(place);
    const auto share = static_cast<float>(place - pixel);
    count = add_tap(taps, count, pixel, 1.f - share);
    if (share > 0.f) count = add_tap(taps, count, pixel + 1, share);
  }
  const float factor = 1.f / static_cast<float>(samples < 1 ? Real(1) : samples);
  for (int i = 0; i < count; ++i) taps[i].weight *= factor;
  counts[item] = count;
}

// y [boxes, bin rows, bin columns, channels] of x [images, height, width, channels]; an item has
// one channel of a bin.
template <typename T>
IPEX_KERNEL(2)
void roi_align(T* y, const T* x, const float* rois, const Tap* row_taps, const int* row_counts,
               Index most_rows, const Tap* column_taps, const int* column_counts,
               Index most_columns, Index bin_rows, Index bin_columns, Index height, Index width,
               Index channels) {
  const auto item = sycl::ext::oneapi::this_work_item::get_nd_item<2>();
  const Index bin = item.get_global_id(0);
  const Index channel = item.get_global_id(1);
  if (channel >= channels) return;
  const Index box = bin / (bin_rows * bin_columns);
  const Index row = bin / bin_columns;
  const Index column = box * bin_columns + bin % bin_columns;
  row_taps += row * most_rows;
  column_taps += column * most_columns;
  float sum = 0.f;
  for (int i = 0; i < row_counts[row]; ++i) {
    const Index line = (static_cast<Index>(rois[box * 5]) * height + row_taps[i].pixel) * width;
    for (int j = 0; j < column_counts[column]; ++j) {
      const float weight = row_taps[i].weight * column_taps[j].weight;
      sum += weight * load(x + (line + column_taps[j].pixel) * channels, channel);
    }
  }
  store(y, bin * channels + channel, sum);
}

// Adds the gradient to x [images, height, width, channels], which begins with zeros. An item has
// one channel of a line of pixels and goes through the boxes in their order, so sums have one
// order.
template <typename T>
IPEX_KERNEL(2)
void roi_align_backward(float* x, const T* grad, const float* rois, const Tap* row_taps,
                        const int* row_counts, Index most_rows, const Tap* column_taps,
                        const int* column_counts, Index most_columns, Index boxes, Index bin_rows,
                        Index bin_columns, Index height, Index width, Index channels) {
  const auto item = sycl::ext::oneapi::this_work_item::get_nd_item<2>();
  const Index line = item.get_global_id(0);
  const Index channel = item.get_global_id(1);
  if (channel >= channels) return;
  const auto image = static_cast<float>(line / height);
  const int own = static_cast<int>(line % height);
  x += line * width * channels;
  for (Index box = 0; box < boxes; ++box) {
    if (rois[box * 5] != image) continue;
    for (Index row = box * bin_rows; row < (box + 1) * bin_rows; ++row) {
      const Tap* taps = row_taps + row * most_rows;
      const int count = row_counts[row];
      if (count == 0 || taps[0].pixel > own || taps[count - 1].pixel < own) continue;
      int i = 0;
      while (taps[i].pixel < own) ++i;
      if (taps[i].pixel != own) continue;
      for (Index c = 0; c < bin_columns; ++c) {
        const float value =
            taps[i].weight * load(grad + (row * bin_columns + c) * channels, channel);
        const Index column = box * bin_columns + c;
        for (int j = 0; j < column_counts[column]; ++j) {
          const Tap& tap = column_taps[column * most_columns + j];
          x[tap.pixel * channels + channel] += tap.weight * value;
        }
      }
    }
  }
}

#define TAPS(Real)                                                                             \
  template void roi_taps<Real>(Tap*, int*, const float*, Index, Index, Index, Index, int, int, \
                               Real, int, int, int*);
TAPS(float)
TAPS(double)

#define ALIGN(T)                                                                                 \
  template void roi_align<T>(T*, const T*, const float*, const Tap*, const int*, Index,          \
                             const Tap*, const int*, Index, Index, Index, Index, Index, Index);  \
  template void roi_align_backward<T>(float*, const T*, const float*, const Tap*, const int*,    \
                                      Index, const Tap*, const int*, Index, Index, Index, Index, \
                                      Index, Index, Index);
ALIGN(float)
ALIGN(half)
ALIGN(bf16)
