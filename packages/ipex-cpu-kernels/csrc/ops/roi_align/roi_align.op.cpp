// SPDX-License-Identifier: Apache-2.0
#include "roi_align/roi_align.h"

#include <atomic>
#include <cmath>
#include <cstring>

#include "ipex/glue/argument_checks.h"
#include "ipex/glue/image.h"
#include "ipex/glue/op_loops.h"
#include "runtime/scratch.h"

namespace ipex {
namespace {

const auto kernels = IPEX_KERNELS("roi_align", roi_align);
const auto backward_kernels = IPEX_KERNELS("roi_align_backward", roi_align_backward);

// Limits of sizes that are given as numbers: beyond them the result could not be held anyway.
constexpr int64_t kMostBins = 4096, kMostPixels = 65536, kMostImages = 1048576;

void check_size(const char* op, const char* name, int64_t value, int64_t least, int64_t most) {
  IPEX_CHECK(value >= least && value <= most, op, ": ", name, " must be from ", least, " to ", most,
             ", got ", value);
}

void check_boxes(const char* op, const Tensor& rois, const Tensor& x, const char* of, double scale,
                 int64_t rows, int64_t columns, int64_t ratio) {
  constexpr int64_t kMostSamples = 4096;
  check_kind(op, "rois", rois, x, of, true);
  IPEX_CHECK(rois.dim() == 2 && rois.size(1) == 5, op, ": rois must have shape [K, 5], got ",
             shape_text(rois));
  IPEX_CHECK(scale > 0 && scale < 1e30, op,
             ": spatial_scale must be positive and below 1e+30, got ", scale);
  IPEX_CHECK(ratio <= kMostSamples, op, ": sampling_ratio must be at most ", kMostSamples, ", got ",
             ratio);
  check_size(op, "pooled_height", rows, 1, kMostBins);
  check_size(op, "pooled_width", columns, 1, kMostBins);
}

// The boxes as contiguous floats, all checked: nothing else guards the reads of the kernels.
Tensor checked_rois(const char* op, const Tensor& rois, int64_t images) {
  Tensor plain = as_float_contiguous(rois);
  const auto* p = static_cast<const float*>(plain.const_data_ptr());
  const int64_t count = plain.numel();
  for (int64_t i = 0; i < count; ++i)
    IPEX_CHECK(std::isfinite(p[i]), op, ": rois must be finite, got ", p[i]);
  for (int64_t i = 0; i < count; i += 5)
    IPEX_CHECK(p[i] >= 0.0f && p[i] < static_cast<float>(images) && p[i] == std::floor(p[i]), op,
               ": rois must begin with the index of one of ", images, " images, got ", p[i]);
  return plain;
}

void clear(const Tensor& x, int64_t item) {
  std::memset(x.mutable_data_ptr(), 0, static_cast<size_t>(x.numel() * item));
}

Tensor roi_align(const Tensor& x, const Tensor& rois, double spatial_scale, int64_t pooled_height,
                 int64_t pooled_width, int64_t sampling_ratio, bool aligned) {
  const char* op = "roi_align";
  check_tensor(op, "x", x);
  IPEX_CHECK(x.dim() == 4, op, ": x must be 4-D [N, C, H, W], got ", x.dim(), "-D");
  check_boxes(op, rois, x, "x", spatial_scale, pooled_height, pooled_width, sampling_ratio);
  const Tensor boxes = checked_rois(op, rois, x.size(0));
  const int64_t count = boxes.size(0), channels = x.size(1);
  const bool last = is_channels_last(x);
  Tensor y = new_image(count, channels, pooled_height, pooled_width, last, x.scalar_type());
  if (y.numel() == 0) return y;
  const Tensor from = as_channels_last(x);
  const RoiAlignArgs args{
      .grid = {.rois = static_cast<const float*>(boxes.const_data_ptr()),
               .scale = spatial_scale,
               .height = x.size(2),
               .width = x.size(3),
               .channels = channels,
               .bin_rows = pooled_height,
               .bin_columns = pooled_width,
               .sampling_ratio = sampling_ratio,
               .aligned = aligned},
      .x = from.const_data_ptr(),
      .y = y.mutable_data_ptr(),
      .y_channels_last = last,
  };
  const int64_t bytes = roi_scratch_bytes(args.grid);
  std::atomic<bool> no_memory{false};
  kernels.visit(x.scalar_type(), [&]<class T>(auto* kernel) {
    if (x.numel() == 0) return clear(y, sizeof(T));
    parallel_for(count, row_grain<T>(pooled_height * pooled_width * channels),
                 [&](int64_t begin, int64_t end) {
                   char* scratch = Scratch<Area::kRoiAlign>::get(bytes);
                   if (!scratch)
                     no_memory = true;
                   else
                     kernel(&args, begin, end, scratch);
                 });
  });
  IPEX_CHECK(!no_memory, op, ": out of memory");
  return y;
}

Tensor roi_align_backward(const Tensor& grad, const Tensor& rois, double spatial_scale,
                          int64_t pooled_height, int64_t pooled_width, int64_t batch_size,
                          int64_t channels, int64_t height, int64_t width, int64_t sampling_ratio,
                          bool aligned, bool channels_last) {
  const char* op = "roi_align_backward";
  check_tensor(op, "grad", grad);
  check_boxes(op, rois, grad, "grad", spatial_scale, pooled_height, pooled_width, sampling_ratio);
  check_size(op, "batch_size", batch_size, 0, kMostImages);
  check_size(op, "height", height, 0, kMostPixels);
  check_size(op, "width", width, 0, kMostPixels);
  IPEX_CHECK(channels >= 0, op, ": channels must not be negative, got ", channels);
  check_shape(op, "grad", grad, {rois.size(0), channels, pooled_height, pooled_width});
  const Tensor boxes = checked_rois(op, rois, batch_size);
  const ScalarType dtype = grad.scalar_type();
  Tensor result = new_image(batch_size, channels, height, width, channels_last, dtype);
  if (result.numel() == 0) return result;
  const bool direct = channels_last && dtype == ScalarType::Float;
  Tensor sums =
      direct ? result : new_image(batch_size, channels, height, width, true, ScalarType::Float);
  const Tensor from = as_channels_last(grad);
  clear(sums, sizeof(float));
  const RoiAlignBackwardArgs args{
      .grid = {.rois = static_cast<const float*>(boxes.const_data_ptr()),
               .scale = spatial_scale,
               .height = height,
               .width = width,
               .channels = channels,
               .bin_rows = pooled_height,
               .bin_columns = pooled_width,
               .sampling_ratio = sampling_ratio,
               .aligned = aligned},
      .grad = from.const_data_ptr(),
      .x = static_cast<float*>(sums.mutable_data_ptr()),
      .boxes = boxes.size(0),
  };
  // Boxes overlap, so the threads share images and channels: each sum has one owner and one order.
  constexpr int64_t kChannels = 64;
  const int64_t parts = (channels + kChannels - 1) / kChannels;
  const int64_t bytes = roi_scratch_bytes(args.grid);
  std::atomic<bool> no_memory{false};
  backward_kernels.visit(dtype, [&]<class T>(auto* kernel) {
    parallel_for(batch_size * parts, 1, [&](int64_t begin, int64_t end) {
      char* scratch = Scratch<Area::kRoiAlign>::get(bytes);
      if (!scratch) {
        no_memory = true;
        return;
      }
      for (int64_t i = begin; i < end; ++i) {
        const int64_t first = i % parts * kChannels;
        kernel(&args, i / parts, first, std::min(channels, first + kChannels), scratch);
      }
    });
  });
  IPEX_CHECK(!no_memory, op, ": out of memory");
  if (!direct) torch::stable::copy_(result, sums);
  return result;
}

}  // namespace
}  // namespace ipex

STABLE_TORCH_LIBRARY_IMPL(ipex, CPU, m) {
  IPEX_IMPL(m, "roi_align", ipex::roi_align);
  IPEX_IMPL(m, "roi_align_backward", ipex::roi_align_backward);
}
