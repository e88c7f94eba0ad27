// SPDX-License-Identifier: Apache-2.0
// What turns convolutions into products of matrices: inputs spread to columns, and columns summed
// back to inputs. Both have three dimensions of space, of which the first ones may be 1. An item
// writes one number; items of a row of the range share all but the last two dimensions of space, so
// that most divisions are made once for all of them.
#include "names.h"

// Where an item's element of a contiguous tensor of so many channels and this size is.
struct Element {
  unsigned long index;  // in the tensor
  long n, c;
  int z, y, x;
  bool inside;

  Element(long channels, int size_z, int size_y, int size_x) {
    const auto item = sycl::ext::oneapi::this_work_item::get_nd_item<2>();
    const unsigned long row = item.get_global_id(0);
    const unsigned long position = item.get_global_id(1);
    const auto plane = static_cast<unsigned int>(size_y * size_x);
    inside = position < plane;
    index = row * plane + position;
    auto rest = static_cast<unsigned int>(row);
    z = static_cast<int>(rest % size_z);
    rest /= size_z;
    c = rest % static_cast<unsigned int>(channels);
    n = rest / static_cast<unsigned int>(channels);
    y = static_cast<int>(static_cast<unsigned int>(position) / size_x);
    x = static_cast<int>(position) - y * size_x;
  }
};

// columns[c, kernel position, n, output position] of x[n, c, z, y, x], whose strides are in
// elements.
template <typename T>
IPEX_KERNEL(2)
void spread_columns(const T* x, T* columns, long batch, long x_n, long x_c, long x_z, long x_y,
                    long x_x, int size_z, int size_y, int size_x, int out_z, int out_y, int out_x,
                    int kernel_z, int kernel_y, int kernel_x, int stride_z, int stride_y,
                    int stride_x, int pad_z, int pad_y, int pad_x, int step_z, int step_y,
                    int step_x) {
  const auto item = sycl::ext::oneapi::this_work_item::get_nd_item<2>();
  const unsigned long row = item.get_global_id(0);
  const unsigned long position = item.get_global_id(1);
  const auto plane = static_cast<unsigned int>(out_y * out_x);
  if (position >= plane) return;
  auto rest = static_cast<unsigned int>(row);
  const int oz = static_cast<int>(rest % out_z);
  rest /= out_z;
  const long n = rest % static_cast<unsigned int>(batch);
  rest /= static_cast<unsigned int>(batch);
  const int kx = static_cast<int>(rest % kernel_x);
  rest /= kernel_x;
  const int ky = static_cast<int>(rest % kernel_y);
  rest /= kernel_y;
  const int kz = static_cast<int>(rest % kernel_z);
  const long c = rest / kernel_z;
  const int oy = static_cast<int>(static_cast<unsigned int>(position) / out_x);
  const int ox = static_cast<int>(position) - oy * out_x;
  const int iz = oz * stride_z - pad_z + kz * step_z;
  const int iy = oy * stride_y - pad_y + ky * step_y;
  const int ix = ox * stride_x - pad_x + kx * step_x;
  const bool inside = iz >= 0 && iz < size_z && iy >= 0 && iy < size_y && ix >= 0 && ix < size_x;
  const T* from = x + n * x_n + c * x_c + iz * x_z;
  columns[row * plane + position] = inside ? from[iy * x_y + ix * x_x] : T(0.f);
}

// The output positions to which an input position `i` contributes by kernel position `k`: 1 or
// none.
inline bool output_of(int i, int k, int stride, int pad, int step, int out, int& o) {
  const int distance = i + pad - k * step;
  o = distance / stride;
  return distance >= 0 && o * stride == distance && o < out;
}

// x[n, c, z, y, x], contiguous, from columns of the same order as above.
template <typename T>
IPEX_KERNEL(2)
void sum_columns(const T* columns, T* x, long batch, long channels, int size_z, int size_y,
                 int size_x, int out_z, int out_y, int out_x, int kernel_z, int kernel_y,
                 int kernel_x, int stride_z, int stride_y, int stride_x, int pad_z, int pad_y,
                 int pad_x, int step_z, int step_y, int step_x) {
  const Element to(channels, size_z, size_y, size_x);
  if (!to.inside) return;
  float sum = 0.f;
  for (int kz = 0; kz < kernel_z; ++kz) {
    int oz;
    if (!output_of(to.z, kz, stride_z, pad_z, step_z, out_z, oz)) continue;
    for (int ky = 0; ky < kernel_y; ++ky) {
      int oy;
      if (!output_of(to.y, ky, stride_y, pad_y, step_y, out_y, oy)) continue;
      for (int kx = 0; kx < kernel_x; ++kx) {
        int ox;
        if (!output_of(to.x, kx, stride_x, pad_x, step_x, out_x, ox)) continue;
        const long row = ((to.c * kernel_z + kz) * kernel_y + ky) * kernel_x + kx;
        sum += load(columns, (((row * batch + to.n) * out_z + oz) * out_y + oy) * out_x + ox);
      }
    }
  }
  store(x, to.index, sum);
}

// Where groups have few channels, products of matrices would be mostly padding. Each item sums one
// output y[n, o, z, y, x], contiguous, over the channels of its group and the kernel. Weights are
// contiguous.
template <typename T>
IPEX_KERNEL(2)
void convolve_groups(const T* x, const T* weight, T* y, long outputs, long group_in, long group_out,
                     long x_n, long x_c, long x_z, long x_y, long x_x, int size_z, int size_y,
                     int size_x, int out_z, int out_y, int out_x, int kernel_z, int kernel_y,
                     int kernel_x, int stride_z, int stride_y, int stride_x, int pad_z, int pad_y,
                     int pad_x, int step_z, int step_y, int step_x) {
  const Element to(outputs, out_z, out_y, out_x);
  if (!to.inside) return;
  const T* from = x + to.n * x_n + to.c / group_out * group_in * x_c;
  const T* w = weight + to.c * group_in * kernel_z * kernel_y * kernel_x;
  float sum = 0.f;
  for (long c = 0; c < group_in; ++c, from += x_c) {
    for (int kz = 0; kz < kernel_z; ++kz) {
      const int iz = to.z * stride_z - pad_z + kz * step_z;
      for (int ky = 0; ky < kernel_y; ++ky) {
        const int iy = to.y * stride_y - pad_y + ky * step_y;
        for (int kx = 0; kx < kernel_x; ++kx, ++w) {
          const int ix = to.x * stride_x - pad_x + kx * step_x;
          const bool inside =
              iz >= 0 && iz < size_z && iy >= 0 && iy < size_y && ix >= 0 && ix < size_x;
          if (inside) sum += load(w, 0) * load(from + iz * x_z + iy * x_y + ix * x_x, 0);
        }
      }
    }
  }
  store(y, to.index, sum);
}

// The gradient of x from the gradient of y: x[n, c, z, y, x] is contiguous, strides are of y.
template <typename T>
IPEX_KERNEL(2)
void convolve_groups_back(const T* y, const T* weight, T* x, long channels, long group_in,
                          long group_out, long y_n, long y_o, long y_z, long y_y, long y_x,
                          int size_z, int size_y, int size_x, int out_z, int out_y, int out_x,
                          int kernel_z, int kernel_y, int kernel_x, int stride_z, int stride_y,
                          int stride_x, int pad_z, int pad_y, int pad_x, int step_z, int step_y,
                          int step_x) {
  const Element to(channels, size_z, size_y, size_x);
  if (!to.inside) return;
  const long first = to.c / group_in * group_out;  // output of the group
  const long taps = static_cast<long>(kernel_z) * kernel_y * kernel_x;
  float sum = 0.f;
  for (int kz = 0; kz < kernel_z; ++kz) {
    int oz;
    if (!output_of(to.z, kz, stride_z, pad_z, step_z, out_z, oz)) continue;
    for (int ky = 0; ky < kernel_y; ++ky) {
      int oy;
      if (!output_of(to.y, ky, stride_y, pad_y, step_y, out_y, oy)) continue;
      for (int kx = 0; kx < kernel_x; ++kx) {
        int ox;
        if (!output_of(to.x, kx, stride_x, pad_x, step_x, out_x, ox)) continue;
        const T* from = y + to.n * y_n + first * y_o + oz * y_z + oy * y_y + ox * y_x;
        const T* w = weight + (first * group_in + to.c % group_in) * taps +
                     (kz * kernel_y + ky) * kernel_x + kx;
        for (long o = 0; o < group_out; ++o)
          sum += load(w + o * group_in * taps, 0) * load(from + o * y_o, 0);
      }
    }
  }
  store(x, to.index, sum);
}

#define GEOMETRY \
  int, int, int, int, int, int, int, int, int, int, int, int, int, int, int, int, int, int
#define CONVOLUTION(T)                                                                         \
  template void spread_columns<T>(const T*, T*, long, long, long, long, long, long, GEOMETRY); \
  template void sum_columns<T>(const T*, T*, long, long, GEOMETRY);                            \
  template void convolve_groups<T>(const T*, const T*, T*, long, long, long, long, long, long, \
                                   long, long, GEOMETRY);                                      \
  template void convolve_groups_back<T>(const T*, const T*, T*, long, long, long, long, long,  \
                                        long, long, long, GEOMETRY);
CONVOLUTION(float)
CONVOLUTION(half)
CONVOLUTION(bf16)
