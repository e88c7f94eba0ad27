// SPDX-License-Identifier: Apache-2.0
#include "program/upsample.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "ipex/glue/image.h"
#include "ipex/glue/op_loops.h"
#include "runtime/scratch.h"

namespace ipex::program {
namespace {

const auto channels_kernels = IPEX_KERNELS("program", upsample_channels);
const auto planes_kernels = IPEX_KERNELS("program", upsample_planes);

void check_image(const char* op, const Tensor& x, int64_t height, int64_t width) {
  IPEX_CHECK(height > 0, op, ": height must be positive, got ", height);
  IPEX_CHECK(width > 0, op, ": width must be positive, got ", width);
  check_tensor(op, "x", x, 0);
  const bool some = x.dim() == 4 && x.size(1) > 0 && x.size(2) > 0 && x.size(3) > 0;
  IPEX_CHECK(some, op, ": x must be 4-D [N, C, H, W] with C, H, W > 0, got shape ", shape_text(x));
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  IPEX_CHECK(std::max(x.size(2), x.size(3)) <= kMost, op,
             ": x must have less than 2^31 rows and columns, got shape ", shape_text(x));
}

// Elements of x for one of the result; `given` is its inverse, or 0 if the sizes say it.
float step_of(int64_t size, int64_t count, double given) {
  if (given > 0.0) return static_cast<float>(1.0 / given);
  return static_cast<float>(size) / static_cast<float>(count);
}

// The places of one dimension and what Between points to.
class Places {
 public:
  Places(int64_t size, int64_t count, bool align_corners, double scale)
      : low_(static_cast<size_t>(count)), high_(low_), of_low_(low_.size()), of_high_(of_low_) {
    float step = 0.0f;
    if (!align_corners)
      step = step_of(size, count, scale);
    else if (count > 1)
      step = static_cast<float>(size - 1) / static_cast<float>(count - 1);
    for (int64_t i = 0; i < count; ++i) {
      const auto at = static_cast<float>(i);
      float place = align_corners ? step * at : std::max(0.0f, std::fma(step, at + 0.5f, -0.5f));
      if (size == count) place = at;
      const int64_t low = std::min(static_cast<int64_t>(place), size - 1);
      const float rest = std::clamp(place - static_cast<float>(low), 0.0f, 1.0f);
      const auto n = static_cast<size_t>(i);
      low_[n] = static_cast<int32_t>(low);
      high_[n] = static_cast<int32_t>(std::min(low + 1, size - 1));
      of_low_[n] = 1.0f - rest;
      of_high_[n] = rest;
    }
  }

  Between between() const { return {low_.data(), high_.data(), of_low_.data(), of_high_.data()}; }

 private:
  std::vector<int32_t> low_, high_;
  std::vector<float> of_low_, of_high_;
};

Tensor upsample_bilinear2d(const Tensor& x0, int64_t height, int64_t width, bool align_corners,
                           double scale_h, double scale_w) {
  const char* op = "upsample_bilinear2d";
  check_image(op, x0, height, width);
  const bool last = is_channels_last(x0);
  const Tensor x = last ? x0 : as_contiguous(x0);
  Tensor y = new_image(x.size(0), x.size(1), height, width, last, x.scalar_type());
  if (y.numel() == 0) return y;
  const Places down(x.size(2), height, align_corners, scale_h);
  const Places right(x.size(3), width, align_corners, scale_w);
  const UpsampleCall call{x.size(1), x.size(2),      x.size(3),      height,
                          width,     down.between(), right.between()};
  const int64_t count = x.size(0) * height * (last ? 1 : call.channels);
  const int64_t bytes =
      last ? 0 : (call.width + call.columns) * static_cast<int64_t>(sizeof(float));
  std::atomic<bool> failed{false};
  (last ? channels_kernels : planes_kernels).visit(x.scalar_type(), [&]<class T>(auto* kernel) {
    const T* from = static_cast<const T*>(x.const_data_ptr());
    T* to = static_cast<T*>(y.mutable_data_ptr());
    const int64_t columns = y.numel() / count;
    parallel_for(count, row_grain<T>(columns), [&](int64_t begin, int64_t end) {
      char* scratch = Scratch<Area::kUpsample>::get(bytes);
      if (scratch)
        kernel(&call, from, to, begin, end, reinterpret_cast<float*>(scratch));
      else
        failed = true;
    });
  });
  IPEX_CHECK(!failed, op, ": out of memory");
  return y;
}

// The element of x that each of the result is. `plain`: a result of the same or twice the size
// has each element once or twice, whatever the scale is.
std::vector<int64_t> nearest(int64_t size, int64_t count, double scale, bool plain) {
  std::vector<int64_t> places(static_cast<size_t>(count));
  const bool by_sizes = plain && (size == count || 2 * size == count);
  const float step = step_of(size, count, by_sizes ? 0.0 : scale);
  for (int64_t i = 0; i < count; ++i) {
    const float place = std::floor(static_cast<float>(i) * step);
    places[static_cast<size_t>(i)] = std::min(static_cast<int64_t>(place), size - 1);
  }
  return places;
}

struct NearestCall {
  int64_t height, width, rows, columns;
  int64_t bytes;  // of an element: with all its channels if they lie side by side
  const int64_t *down, *right;
};

template <class T>
void pick(const char* x, char* y, const int64_t* places, int64_t count) {
  const T* from = reinterpret_cast<const T*>(x);
  T* to = reinterpret_cast<T*>(y);
  for (int64_t i = 0; i < count; ++i) to[i] = from[places[i]];
}

void nearest_rows(const NearestCall& call, const char* x, char* y, int64_t begin, int64_t end) {
  const int64_t line = call.width * call.bytes, size = call.columns * call.bytes;
  const char* before = nullptr;
  for (int64_t number = begin; number < end; ++number) {
    const char* from =
        x + (number / call.rows * call.height + call.down[number % call.rows]) * line;
    char* to = y + number * size;
    if (from == before) {
      std::memcpy(to, to - size, static_cast<size_t>(size));
    } else if (call.bytes == 4) {
      pick<uint32_t>(from, to, call.right, call.columns);
    } else if (call.bytes == 2) {
      pick<uint16_t>(from, to, call.right, call.columns);
    } else {
      for (int64_t c = 0; c < call.columns; ++c)
        std::memcpy(to + c * call.bytes, from + call.right[c] * call.bytes,
                    static_cast<size_t>(call.bytes));
    }
    before = from;
  }
}

Tensor upsample_nearest2d(const Tensor& x0, int64_t height, int64_t width, double scale_h,
                          double scale_w) {
  check_image("upsample_nearest2d", x0, height, width);
  const bool last = is_channels_last(x0);
  const Tensor x = last ? x0 : as_contiguous(x0);
  Tensor y = new_image(x.size(0), x.size(1), height, width, last, x.scalar_type());
  if (y.numel() == 0) return y;
  // Where stock PyTorch leaves the scale aside.
  const bool plain = height + width <= 128 || (x.size(1) > 3 && channels_are_innermost(x));
  const std::vector<int64_t> down = nearest(x.size(2), height, scale_h, plain);
  const std::vector<int64_t> right = nearest(x.size(3), width, scale_w, plain);
  const int64_t bytes = x.element_size() * (last ? x.size(1) : 1);
  const NearestCall call{x.size(2), x.size(3), height, width, bytes, down.data(), right.data()};
  const auto* from = static_cast<const char*>(x.const_data_ptr());
  auto* to = static_cast<char*>(y.mutable_data_ptr());
  parallel_for(x.size(0) * height * (last ? 1 : x.size(1)), row_grain<char>(width * bytes),
               [&](int64_t begin, int64_t end) { nearest_rows(call, from, to, begin, end); });
  return y;
}

const bool registered = [] {
  add("upsample_bilinear2d", Adapter<&upsample_bilinear2d>::entry());
  add("upsample_nearest2d", Adapter<&upsample_nearest2d>::entry());
  return true;
}();

}  // namespace
}  // namespace ipex::program
