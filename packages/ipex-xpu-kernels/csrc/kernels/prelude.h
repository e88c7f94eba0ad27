// SPDX-License-Identifier: Apache-2.0
// For device code: types, conversions and positions. Rules that keep SPIR-V loadable everywhere:
// free functions of pointers and scalars; no local_accessor arguments (work_group_static instead);
// no bfloat16 of SYCL, whose conversions need a library.
#pragma once

#include <sycl/sycl.hpp>

#define IPEX_KERNEL(dimensions) \
  SYCL_EXT_ONEAPI_FUNCTION_PROPERTY((sycl::ext::oneapi::experimental::nd_range_kernel<dimensions>))

namespace ipex {

using half = sycl::half;

// Round to nearest even; NaN stays NaN.
struct bf16 {
  unsigned short bits;
  bf16() = default;
  explicit bf16(float value) {
    const unsigned int x = sycl::bit_cast<unsigned int>(value);
    bits = value != value ? static_cast<unsigned short>((x >> 16) | 0x40)
                          : static_cast<unsigned short>((x + 0x7fff + ((x >> 16) & 1)) >> 16);
  }
  explicit operator float() const {
    return sycl::bit_cast<float>(static_cast<unsigned int>(bits) << 16);
  }
};

// Numbers with a fraction are computed with in float, whole ones (unsigned char: bool, too) as
// long.
template <typename T>
struct Compute {
  using type = float;
};
template <>
struct Compute<long> {
  using type = long;
};
template <>
struct Compute<int> {
  using type = long;
};
template <>
struct Compute<unsigned char> {
  using type = long;
};
template <typename T>
using compute = typename Compute<T>::type;

template <typename T>
inline compute<T> load(const T* p, unsigned long i) {
  return static_cast<compute<T>>(p[i]);
}
template <typename T>
inline void store(T* p, unsigned long i, compute<T> value) {
  p[i] = T(value);
}

inline unsigned long global_id() {
  return sycl::ext::oneapi::this_work_item::get_nd_item<1>().get_global_id(0);
}

// Operands of up to four dimensions, the innermost first, sizes of 1 fill up: the last dimension of
// the range is the innermost, the other one counts through the rest.
#define IPEX_SIZES unsigned int rows, unsigned int columns, unsigned int size1, unsigned int size2
#define IPEX_STRIDES(x) int x##0, int x##1, int x##2, int x##3
struct Place {
  unsigned long column;
  long i1;
  long i2;
  long i3;
  bool inside;

  Place(unsigned int rows, unsigned int columns, unsigned int size1, unsigned int size2) {
    const auto item = sycl::ext::oneapi::this_work_item::get_nd_item<2>();
    const auto row = static_cast<unsigned int>(item.get_global_id(0));
    column = item.get_global_id(1);
    inside = row < rows && column < columns;
    i1 = row % size1;
    i2 = row / size1 % size2;
    i3 = row / size1 / size2;
  }
  // Offset of the element's row; the element itself is column * stride0 further on.
  long row(int stride1, int stride2, int stride3) const {
    return i1 * stride1 + i2 * stride2 + i3 * stride3;
  }
  // Calls f with a function from a stride within the row to the element's offset in the row. Told
  // that all these strides are 1, a compiler for CPUs makes plain vectors.
  template <typename F>
  void step(bool plain, F f) const {
    if (plain) {
      f([i = static_cast<long>(column)](int) { return i; });
    } else {
      f([i = static_cast<long>(column)](int stride) { return i * stride; });
    }
  }
  long at(int stride0, int stride1, int stride2, int stride3) const {
    return row(stride1, stride2, stride3) + static_cast<long>(column) * stride0;
  }
};

// The row of a work-group. Its work-items take neighboring elements, and each step of the loops
// but the last is whole, so that a compiler for CPUs makes plain vectors of them.
struct Row {
  sycl::group<1> group = sycl::ext::oneapi::this_work_item::get_work_group<1>();
  unsigned long index = group.get_group_linear_id();
  unsigned long columns;
  unsigned long begin;  // offset of the row's first element
  unsigned long lane = group.get_local_linear_id();
  unsigned long lanes = group.get_local_linear_range();

  explicit Row(unsigned long columns_) : columns(columns_), begin(index * columns_) {}
  bool leader() const { return lane == 0; }

  template <typename F>
  void each(F f) const {
    each_of(columns, f);
  }
  template <typename F>
  void each_of(unsigned long count, F f) const {
    unsigned long i = 0;
    for (; i + lanes <= count; i += lanes) f(i + lane);
    if (i + lane < count) f(i + lane);
  }
  template <typename F>
  float sum(F f) const {
    float total = 0.f;
    each([&](unsigned long i) { total += f(i); });
    return sycl::reduce_over_group(group, total, sycl::plus<float>());
  }
  // NaN if there is one.
  template <typename F>
  float maximum(F f) const {
    float top = -__builtin_inff();
    each([&](unsigned long i) {
      const float value = f(i);
      top = value > top || value != value ? value : top;
    });
    const bool nan = sycl::any_of_group(group, top != top);
    const float whole = sycl::reduce_over_group(group, top, sycl::maximum<float>());
    return nan ? __builtin_nanf("") : whole;
  }
};

}  // namespace ipex
