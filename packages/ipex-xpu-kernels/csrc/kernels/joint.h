// SPDX-License-Identifier: Apache-2.0
// For kernels that multiply by joint_matrix, which are compiled on the device.
#pragma once

#include <sycl/ext/oneapi/bfloat16.hpp>
#include <sycl/ext/oneapi/experimental/address_cast.hpp>
#include <sycl/ext/oneapi/matrix/matrix.hpp>

#include "names.h"

namespace here = sycl::ext::oneapi;
namespace joint = sycl::ext::oneapi::experimental::matrix;
using Vector = ipex::WideBits;  // of eight numbers of 16 bits

constexpr int kSide = 16;  // of what joint_matrix multiplies
constexpr auto kRowMajor = joint::layout::row_major;
constexpr auto kColumnMajor = joint::layout::col_major;

// What joint_matrix calls the numbers.
template <typename T>
struct Element {
  using type = T;
};
template <>
struct Element<bf16> {
  using type = here::bfloat16;
};

template <typename E, joint::layout layout = kRowMajor>
using Left = joint::joint_matrix<sycl::sub_group, E, joint::use::a, kSide, kSide, layout>;
template <typename E, joint::layout layout = kColumnMajor>
using Right = joint::joint_matrix<sycl::sub_group, E, joint::use::b, kSide, kSide, layout>;
using Sums = joint::joint_matrix<sycl::sub_group, float, joint::use::accumulator, kSide, kSide>;

// Memory of the group, as joint_matrix_load and joint_matrix_store want it.
template <typename T>
auto local(T* p) {
  return here::experimental::static_address_cast<sycl::access::address_space::local_space>(p);
}
