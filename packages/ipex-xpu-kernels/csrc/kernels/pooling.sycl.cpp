// SPDX-License-Identifier: Apache-2.0
// Pooling of images [n, c, height, width] of any strides, and its gradients. An item writes one
// number; a row of the range is a channel of an image. Gradients are sums in the order of the
// outputs, so that they repeat.
#include "names.h"

struct Position {
  int image, channel, y, x;
  bool inside;

  Position(int channels, int height, int width) {
    const auto item = sycl::ext::oneapi::this_work_item::get_nd_item<2>();
    const auto row = static_cast<unsigned int>(item.get_global_id(0));
    const auto column = static_cast<unsigned int>(item.get_global_id(1));
    image = static_cast<int>(row / channels);
    channel = static_cast<int>(row - static_cast<unsigned int>(image) * channels);
    y = static_cast<int>(column / width);
    x = static_cast<int>(column - static_cast<unsigned int>(y) * width);
    inside = y < height;
  }
  long plane(int by_image, int by_channel) const {
    return static_cast<long>(image) * by_image + static_cast<long>(channel) * by_channel;
  }
};

// What an output takes of an axis: [from, to), of `whole` elements with padding. A kernel of 0
// stands for as many windows of the whole axis as there are outputs.
struct Window {
  int from, to, whole;

  Window(int o, int size, int out, int kernel, int stride, int pad) {
    if (kernel == 0) {
      from = static_cast<int>(static_cast<long>(o) * size / out);
      to = static_cast<int>((static_cast<long>(o + 1) * size + out - 1) / out);
      whole = to - from;
      return;
    }
    const int first = o * stride - pad;
    const int last = sycl::min(first + kernel, size + pad);
    whole = last - first;
    from = sycl::max(first, 0);
    to = sycl::min(last, size);
  }
};

// The outputs [first, last] that may take element i.
struct Outputs {
  int first, last;

  Outputs(int i, int size, int out, int kernel, int stride, int pad, int step) {
    if (kernel == 0) {
      first = static_cast<int>(static_cast<long>(i) * out / size);
      last = static_cast<int>((static_cast<long>(i + 1) * out - 1) / size);
      return;
    }
    const int beyond = i + pad - (kernel - 1) * step;
    first = beyond <= 0 ? 0 : (beyond + stride - 1) / stride;
    last = sycl::min((i + pad) / stride, out - 1);
  }
};

#define SIZES int channels, int height, int width, int out_y, int out_x
#define GEOMETRY                                                                            \
  int kernel_y, int kernel_x, int stride_y, int stride_x, int pad_y, int pad_x, int step_y, \
      int step_x

// The first of the largest numbers, NaN being the largest, and where it is in its plane.
template <typename T>
IPEX_KERNEL(2)
void max_pool(const T* x, T* y, long* indices, IPEX_STRIDES(x_), IPEX_STRIDES(y_), SIZES,
              GEOMETRY) {
  const Position o(channels, out_y, out_x);
  if (!o.inside) return;
  const T* from = x + o.plane(x_0, x_1);
  int top, left, bottom, right;
  if (kernel_y == 0) {
    const Window rows(o.y, height, out_y, 0, 1, 0);
    const Window columns(o.x, width, out_x, 0, 1, 0);
    top = rows.from, bottom = rows.to;
    left = columns.from, right = columns.to;
  } else {
    top = o.y * stride_y - pad_y;
    left = o.x * stride_x - pad_x;
    bottom = sycl::min(top + (kernel_y - 1) * step_y + 1, height);
    right = sycl::min(left + (kernel_x - 1) * step_x + 1, width);
    while (top < 0) top += step_y;
    while (left < 0) left += step_x;
  }
  long index = static_cast<long>(top) * width + left;
  float largest = -__builtin_inff();
  for (int i = top; i < bottom; i += step_y) {
    for (int j = left; j < right; j += step_x) {
      const float value = load(from, static_cast<long>(i) * x_2 + static_cast<long>(j) * x_3);
      if (value > largest || value != value) {
        largest = value;
        index = static_cast<long>(i) * width + j;
      }
    }
  }
  const long to = o.plane(y_0, y_1) + static_cast<long>(o.y) * y_2 + static_cast<long>(o.x) * y_3;
  store(y, to, largest);
  indices[to] = index;
}

// Of y and its indices, which have the same strides, to x.
template <typename T>
IPEX_KERNEL(2)
void max_pool_back(const T* y, const long* indices, T* x, IPEX_STRIDES(x_), IPEX_STRIDES(y_), SIZES,
                   GEOMETRY) {
  const Position i(channels, height, width);
  if (!i.inside) return;
  const Outputs rows(i.y, height, out_y, kernel_y, stride_y, pad_y, step_y);
  const Outputs columns(i.x, width, out_x, kernel_x, stride_x, pad_x, step_x);
  const long self = static_cast<long>(i.y) * width + i.x;
  const long plane = i.plane(y_0, y_1);
  float sum = 0.f;
  for (int oy = rows.first; oy <= rows.last; ++oy) {
    for (int ox = columns.first; ox <= columns.last; ++ox) {
      const long at = plane + static_cast<long>(oy) * y_2 + static_cast<long>(ox) * y_3;
      if (indices[at] == self) sum += load(y, at);
    }
  }
  store(x, i.plane(x_0, x_1) + static_cast<long>(i.y) * x_2 + static_cast<long>(i.x) * x_3, sum);
}

inline float share(const Window& rows, const Window& columns, int divisor, int include_pad) {
  if (divisor != 0) return static_cast<float>(divisor);
  if (include_pad != 0) return static_cast<float>(rows.whole) * static_cast<float>(columns.whole);
  return static_cast<float>(rows.to - rows.from) * static_cast<float>(columns.to - columns.from);
}

template <typename T>
IPEX_KERNEL(2)
void mean_pool(const T* x, T* y, IPEX_STRIDES(x_), IPEX_STRIDES(y_), SIZES, GEOMETRY, int divisor,
               int include_pad) {
  const Position o(channels, out_y, out_x);
  if (!o.inside) return;
  const T* from = x + o.plane(x_0, x_1);
  const Window rows(o.y, height, out_y, kernel_y, stride_y, pad_y);
  const Window columns(o.x, width, out_x, kernel_x, stride_x, pad_x);
  float sum = 0.f;
  for (int i = rows.from; i < rows.to; ++i) {
    for (int j = columns.from; j < columns.to; ++j)
      sum += load(from, static_cast<long>(i) * x_2 + static_cast<long>(j) * x_3);
  }
  const bool some = rows.from < rows.to && columns.from < columns.to;
  store(y, o.plane(y_0, y_1) + static_cast<long>(o.y) * y_2 + static_cast<long>(o.x) * y_3,
        some ? sum / share(rows, columns, divisor, include_pad) : 0.f);
}

template <typename T>
IPEX_KERNEL(2)
void mean_pool_back(const T* y, T* x, IPEX_STRIDES(x_), IPEX_STRIDES(y_), SIZES, GEOMETRY,
                    int divisor, int include_pad) {
  const Position i(channels, height, width);
  if (!i.inside) return;
  const Outputs outputs_y(i.y, height, out_y, kernel_y, stride_y, pad_y, step_y);
  const Outputs outputs_x(i.x, width, out_x, kernel_x, stride_x, pad_x, step_x);
  const long plane = i.plane(y_0, y_1);
  float sum = 0.f;
  for (int oy = outputs_y.first; oy <= outputs_y.last; ++oy) {
    const Window rows(oy, height, out_y, kernel_y, stride_y, pad_y);
    for (int ox = outputs_x.first; ox <= outputs_x.last; ++ox) {
      const Window columns(ox, width, out_x, kernel_x, stride_x, pad_x);
      sum += load(y, plane + static_cast<long>(oy) * y_2 + static_cast<long>(ox) * y_3) /
             share(rows, columns, divisor, include_pad);
    }
  }
  store(x, i.plane(x_0, x_1) + static_cast<long>(i.y) * x_2 + static_cast<long>(i.x) * x_3, sum);
}

#define FIVE int, int, int, int, int
#define EIGHT int, int, int, int, int, int, int, int
#define POOLING(T)                                                               \
  template void max_pool<T>(const T*, T*, long*, EIGHT, FIVE, EIGHT);            \
  template void max_pool_back<T>(const T*, const long*, T*, EIGHT, FIVE, EIGHT); \
  template void mean_pool<T>(const T*, T*, EIGHT, FIVE, EIGHT, int, int);        \
  template void mean_pool_back<T>(const T*, T*, EIGHT, FIVE, EIGHT, int, int);
POOLING(float)
POOLING(half)
POOLING(bf16)
