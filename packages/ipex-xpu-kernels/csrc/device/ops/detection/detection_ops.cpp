// SPDX-License-Identifier: Apache-2.0
// RoIAlign and non-maximum suppression on the kernels of roi_align.sycl.cpp and nms.sycl.cpp.
#include <ATen/Functions.h>

#include <algorithm>
#include <cmath>

#include "core/core.h"
#include "device/core/ipex_ops.h"

namespace ipex::xpu {
namespace {

using at::Tensor;
using std::optional;

// On the CPU device 0.2 (nms_mask) and 0.3 to 1 (roi_align) of the rate of the kernels for CPUs.
// The gradient of roi_align has 0.8 to 1.4 of theirs.
constexpr KernelSpeed kDetectionSpeed = KernelSpeed::Slower;

constexpr std::int64_t kMostBytes = std::int64_t{1} << 30;  // of working memory

// RoIAlign
// -----------------------------------------------------------------------------------------------

struct Map {
  std::int64_t images, channels, height, width;
  Map(std::int64_t n, std::int64_t c, std::int64_t h, std::int64_t w)
      : images(n), channels(c), height(h), width(w) {}
};
struct Grid {
  double scale;
  std::int64_t rows, columns, ratio;
  bool aligned;
};

bool fits(const Tensor& x, const Tensor& rois, const Map& map, const Grid& grid) {
  constexpr std::int64_t kMostBins = 4096, kMostSamples = 4096, kMostPixels = 65536,
                         kMostImages = 1048576;
  const auto size = [](std::int64_t value, std::int64_t most) {
    return 0 <= value && value <= most;
  };
  return kernel_dtype(x.scalar_type()) && rois.dim() == 2 && rois.size(1) == 5 &&
         (rois.scalar_type() == x.scalar_type() || rois.scalar_type() == at::kFloat) &&
         grid.scale > 0 && grid.scale < 1e30 && grid.ratio <= kMostSamples && grid.rows > 0 &&
         size(grid.rows, kMostBins) && grid.columns > 0 && size(grid.columns, kMostBins) &&
         size(map.images, kMostImages) && size(map.height, kMostPixels) &&
         size(map.width, kMostPixels) && map.channels >= 0;
}

// What the bins of all boxes read of one axis.
struct Taps {
  Tensor taps;
  Tensor counts;
  std::int64_t most;  // taps of a bin
};
class Boxes {
 public:
  // Nothing where a box is not valid, or for more working memory than there should be.
  static optional<Boxes> of(const char* op, const Tensor& rois, const Map& map, const Grid& grid) {
    Boxes boxes;
    boxes.rois = rois.to(at::kFloat).contiguous();
    for (auto [taps, bins, pixels] : {std::tuple(&boxes.rows, grid.rows, map.height),
                                      std::tuple(&boxes.columns, grid.columns, map.width)}) {
      taps->most = grid.ratio > 0 ? std::min(2 * grid.ratio, pixels) : pixels;
      const std::int64_t count = rois.size(0) * bins;
      if (taps->most != 0 && count > kMostBytes / 8 / taps->most) return std::nullopt;
      taps->taps = at::empty({count, taps->most}, rois.options().dtype(at::kLong));
      taps->counts = at::empty({count}, rois.options().dtype(at::kInt));
    }
    const auto device = static_cast<c10::DeviceIndex>(rois.get_device());
    const bool wide = device_info(device).has_fp64;
    DeviceCheck check;
    check.check = [&](void* flag) {
      wide ? boxes.fill<double>(map, grid, flag) : boxes.fill<float>(map, grid, flag);
    };
    check.message = [op, images = map.images](std::size_t, std::int64_t) {
      return c10::str(op, ": rois must be finite and begin with the index of one of ", images,
                      " images");
    };
    check.is_index = false;
    return in_bounds(rois, std::move(check)) ? optional(std::move(boxes)) : std::nullopt;
  }

  Tensor rois;  // float32, contiguous
  Taps rows, columns;

 private:
  template <typename Real>
  void fill(const Map& map, const Grid& grid, void* flag) const {
    constexpr int kTop = 2, kLeft = 1;
    fill_axis<Real>(rows, grid.rows, map.height, kTop, map, grid, flag);
    fill_axis<Real>(columns, grid.columns, map.width, kLeft, map, grid, flag);
  }
  template <typename Real>
  void fill_axis(const Taps& axis, std::int64_t bins, std::int64_t pixels, int corner,
                 const Map& map, const Grid& grid, void* flag) const {
    launch_for(rois, std::is_same_v<Real, double> ? "roi_taps<double>" : "roi_taps<float>",
               axis.counts.numel(), out_data(axis.taps), out_data(axis.counts), data(rois),
               ulong(rois.size(0)), ulong(bins), ulong(axis.most), ulong(map.images),
               static_cast<int>(pixels), corner, static_cast<Real>(grid.scale),
               static_cast<int>(std::max<std::int64_t>(grid.ratio, 0)), grid.aligned ? 1 : 0, flag);
  }
};

Tensor image_like(const Tensor& x, at::IntArrayRef sizes, at::ScalarType dtype, bool last) {
  return at::empty(sizes,
                   x.options().dtype(dtype).memory_format(last ? at::MemoryFormat::ChannelsLast
                                                               : at::MemoryFormat::Contiguous));
}
// `image` is channels-last.
Tensor in_format(const Tensor& image, at::ScalarType dtype, bool last) {
  if (last && image.scalar_type() == dtype) return image;
  return image_like(image, image.sizes(), dtype, last).copy_(image);
}
bool is_channels_last(const Tensor& x) {
  return !x.is_contiguous() && x.is_contiguous(at::MemoryFormat::ChannelsLast);
}

optional<Tensor> roi_align(const Tensor& x, const Tensor& rois, double scale, std::int64_t rows,
                           std::int64_t columns, std::int64_t ratio, bool aligned) {
  if (x.dim() != 4) return std::nullopt;
  const Map map(x.size(0), x.size(1), x.size(2), x.size(3));
  const Grid grid{scale, rows, columns, ratio, aligned};
  if (!fits(x, rois, map, grid)) return std::nullopt;
  const auto boxes = Boxes::of("roi_align", rois, map, grid);
  if (!boxes) return std::nullopt;
  const Tensor y =
      image_like(x, {rois.size(0), map.channels, rows, columns}, x.scalar_type(), true);
  const Tensor image = x.contiguous(at::MemoryFormat::ChannelsLast);
  launch_columns(x, kernel_name("roi_align", *kernel_dtype(x.scalar_type())),
                 rois.size(0) * rows * columns, map.channels, out_data(y), data(image),
                 data(boxes->rois), data(boxes->rows.taps), data(boxes->rows.counts),
                 ulong(boxes->rows.most), data(boxes->columns.taps), data(boxes->columns.counts),
                 ulong(boxes->columns.most), ulong(rows), ulong(columns), ulong(map.height),
                 ulong(map.width), ulong(map.channels));
  return in_format(y, y.scalar_type(), is_channels_last(x));
}

optional<Tensor> roi_align_backward(const Tensor& grad, const Tensor& rois, double scale,
                                    std::int64_t rows, std::int64_t columns, std::int64_t images,
                                    std::int64_t channels, std::int64_t height, std::int64_t width,
                                    std::int64_t ratio, bool aligned, bool last) {
  const Map map(images, channels, height, width);
  const Grid grid{scale, rows, columns, ratio, aligned};
  if (!fits(grad, rois, map, grid) ||
      grad.sizes() != at::IntArrayRef({rois.size(0), channels, rows, columns}))
    return std::nullopt;
  const auto boxes = Boxes::of("roi_align_backward", rois, map, grid);
  if (!boxes) return std::nullopt;
  const Tensor sums = image_like(grad, {images, channels, height, width}, at::kFloat, true).zero_();
  const Tensor grads = grad.contiguous(at::MemoryFormat::ChannelsLast);
  launch_columns(grad, kernel_name("roi_align_backward", *kernel_dtype(grad.scalar_type())),
                 images * height, channels, out_data(sums), data(grads), data(boxes->rois),
                 data(boxes->rows.taps), data(boxes->rows.counts), ulong(boxes->rows.most),
                 data(boxes->columns.taps), data(boxes->columns.counts), ulong(boxes->columns.most),
                 ulong(rois.size(0)), ulong(rows), ulong(columns), ulong(height), ulong(width),
                 ulong(channels));
  return in_format(sums, grad.scalar_type(), last);
}

// Non-maximum suppression
// -----------------------------------------------------------------------------------------------

optional<Tensor> nms_mask(const Tensor& boxes, const Tensor& scores, double threshold, bool sorted,
                          double offset, optional<double> min_score, std::int64_t max_candidates,
                          std::int64_t max_output) {
  if (boxes.dim() < 2 || boxes.size(-1) != 4 || !kernel_dtype(boxes.scalar_type()) ||
      scores.sizes() != boxes.sizes().slice(0, boxes.dim() - 1) ||
      (scores.scalar_type() != boxes.scalar_type() && scores.scalar_type() != at::kFloat) ||
      !std::isfinite(threshold) || !std::isfinite(offset))
    return std::nullopt;
  const Tensor keep = at::zeros(scores.sizes(), scores.options().dtype(at::kBool));
  if (keep.numel() == 0) return keep;
  constexpr std::int64_t kBits = 64;
  const std::int64_t count = scores.size(-1);
  const std::int64_t groups = scores.numel() / count;
  const std::int64_t most = max_candidates > 0 ? std::min(count, max_candidates) : count;
  const std::int64_t words = (most + kBits - 1) / kBits;
  if (count > std::numeric_limits<int>::max() / 4 || groups * most > kMostBytes / 8 / words)
    return std::nullopt;
  const Tensor values = scores.to(at::kFloat).contiguous();
  const Tensor corners = boxes.to(at::kFloat).contiguous();
  const Tensor order = at::full({groups, most}, -1, scores.options().dtype(at::kInt));
  launch_columns(scores, "nms_order", groups, count, out_data(order), data(values), ulong(count),
                 ulong(most), sorted ? 1 : 0, min_score ? 1 : 0,
                 static_cast<float>(min_score.value_or(0)));
  const Tensor goes = at::empty({groups, most, words}, scores.options().dtype(at::kLong));
  launch_columns(scores, "nms_overlaps", groups * words, most, out_data(goes), data(order),
                 data(corners), ulong(count), ulong(most), ulong(words), static_cast<float>(offset),
                 static_cast<float>(threshold));
  const Tensor gone = at::zeros({groups, words}, goes.options());
  launch_rows(scores, "nms_sweep", groups, words, out_data(keep), out_data(gone), data(goes),
              data(order), ulong(count), ulong(most), ulong(words),
              ulong(max_output > 0 ? max_output : count));
  return keep;
}

}  // namespace

void register_detection() {
  static torch::Library ours(torch::Library::IMPL, "ipex", c10::DispatchKey::XPU, __FILE__,
                             __LINE__);
  add_kernel<&roi_align, kDetectionSpeed>(ours, "roi_align");
  add_kernel<&roi_align_backward>(ours, "roi_align_backward");
  add_kernel<&nms_mask, kDetectionSpeed>(ours, "nms_mask");
}

}  // namespace ipex::xpu
