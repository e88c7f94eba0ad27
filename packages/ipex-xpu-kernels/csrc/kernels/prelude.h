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

template <typename T>
inline float load(const T* p, unsigned long i) {
  return static_cast<float>(p[i]);
}
template <typename T>
inline void store(T* p, unsigned long i, float value) {
  p[i] = T(value);
}

inline unsigned long global_id() {
  return sycl::ext::oneapi::this_work_item::get_nd_item<1>().get_global_id(0);
}

}  // namespace ipex
