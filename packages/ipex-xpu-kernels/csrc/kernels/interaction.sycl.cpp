// SPDX-License-Identifier: Apache-2.0
// Products of all pairs of vectors of a sample, and their derivative. `x` holds the address of each
// input and `rows` the distance of its samples; numbers within a sample are neighbors.
#include "names.h"

namespace here = sycl::ext::oneapi;

// As wide as positions are (see matmul.sycl.cpp).
using Index = unsigned long;

constexpr Index kLanes = 16;    // second vectors of the pairs of a work-group
constexpr Index kItemRows = 8;  // first vectors that an item multiplies at once
constexpr Index kDepth = 128;   // numbers of its vector that an item keeps

here::experimental::work_group_static<float[kDepth * kLanes]> kept;

template <typename T>
inline const T* vector_of(const T* const* x, const long* rows, Index i, Index count, Index sample) {
  const Index inside = i < count ? i : count - 1;  // what is computed beyond is not stored
  return x[inside] + sample * rows[inside];
}

// Where the product of two vectors lies, behind the first vector.
inline Index pair(Index a, Index b) { return a > b ? a * (a - 1) / 2 + b : b * (b - 1) / 2 + a; }

// A work-group multiplies 16 vectors, one for each item, with those that follow. An item keeps its
// numbers where its neighbors' lie next to them: it reads them often.
template <typename T>
IPEX_KERNEL(2)
void interaction(T* y, const T* const* x, const long* rows, Index count, Index dim) {
  const auto position = here::this_work_item::get_nd_item<2>();
  const Index sample = position.get_group(0);
  const Index begin = position.get_group(1) * kLanes;
  const Index lane = position.get_local_id(1);
  y += sample * (dim + count * (count - 1) / 2);
  if (begin == 0) {
    const T* first = vector_of(x, rows, 0, count, sample);
    for (Index d = lane; d < dim; d += kLanes) y[d] = first[d];
  }
  y += dim;
  const Index j = begin + lane;
  const T* own = vector_of(x, rows, j, count, sample);
  float* numbers = *&kept;
  for (Index i = begin; i < count; i += kItemRows) {
    const T* left[kItemRows];
#pragma unroll
    for (Index r = 0; r < kItemRows; ++r) left[r] = vector_of(x, rows, i + r, count, sample);
    float sums[kItemRows] = {};
    for (Index start = 0; start < dim; start += kDepth) {
      const Index depth = dim - start < kDepth ? dim - start : kDepth;
      if (i == begin || dim > kDepth) {
        for (Index d = 0; d < depth; ++d) numbers[d * kLanes + lane] = load(own, start + d);
      }
      for (Index d = 0; d < depth; ++d) {
        const float value = numbers[d * kLanes + lane];
#pragma unroll
        for (Index r = 0; r < kItemRows; ++r) sums[r] += value * load(left[r], start + d);
      }
    }
#pragma unroll
    for (Index r = 0; r < kItemRows; ++r) {
      if (j < i + r && i + r < count) store(y, pair(i + r, j), sums[r]);
    }
  }
}

// y[i] = sum over k of grad[pair(i, k)] * x[k], and for the first vector its own gradient. An item
// has one number of 8 vectors.
template <typename T>
IPEX_KERNEL(2)
void interaction_backward(T* y, const T* grad, Index grad_row, const T* const* x, const long* rows,
                          Index batch, Index count, Index dim, Index blocks) {
  const auto position = here::this_work_item::get_nd_item<2>();
  const Index sample = position.get_global_id(0) / blocks;
  const Index begin = position.get_global_id(0) % blocks * kItemRows;
  const Index d = position.get_global_id(1);
  if (d >= dim) return;
  grad += sample * grad_row;
  float sums[kItemRows] = {};
  if (begin == 0) sums[0] = load(grad, d);
  for (Index k = 0; k < count; ++k) {
    const float value = load(vector_of(x, rows, k, count, sample), d);
#pragma unroll
    for (Index r = 0; r < kItemRows; ++r) {
      const Index i = begin + r;
      sums[r] += value * (i == k || i >= count ? 0.f : load(grad, dim + pair(i, k)));
    }
  }
#pragma unroll
  for (Index r = 0; r < kItemRows; ++r) {
    if (begin + r < count) store(y, ((begin + r) * batch + sample) * dim + d, sums[r]);
  }
}

#define INTERACTION(T)                                                                            \
  template void interaction<T>(T*, const T* const*, const long*, Index, Index);                   \
  template void interaction_backward<T>(T*, const T*, Index, const T* const*, const long*, Index, \
                                        Index, Index, Index);
INTERACTION(float)
INTERACTION(half)
INTERACTION(bf16)
