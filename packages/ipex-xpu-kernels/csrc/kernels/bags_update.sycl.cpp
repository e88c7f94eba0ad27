// SPDX-License-Identifier: Apache-2.0
// Steps of optimizers on the rows of many tables that bags have looked up. Lookups are sorted by
// row: row r has those from begins[r] on, so each row is read and written once and its sum has one
// order.
#include "names.h"

using Index = unsigned long;

// A weight, in float32. `trail` (or null) has the lower halves of numbers whose upper halves the
// table has.
template <typename T>
inline float weight_at(const T* weight, const unsigned short* trail, Index i) {
  if constexpr (std::is_same_v<T, bf16>) {
    if (trail)
      return sycl::bit_cast<float>(static_cast<unsigned int>(weight[i].bits) << 16 | trail[i]);
  }
  return load(weight, i);
}
template <typename T>
inline void set_weight(T* weight, unsigned short* trail, Index i, float value) {
  if constexpr (std::is_same_v<T, bf16>) {
    if (trail) {
      const auto bits = sycl::bit_cast<unsigned int>(value);
      weight[i].bits = static_cast<unsigned short>(bits >> 16);
      trail[i] = static_cast<unsigned short>(bits);
      return;
    }
  }
  store(weight, i, value);
}

// An item has one column of a row. `places` has for each row its table and its place in it, `bags`
// and `scales` for each lookup the row of the gradient and a factor. Adagrad, whose sums of squares
// `squares` has, adds `extra` to roots; SGD (null) multiplies weights with it.
template <typename T>
IPEX_KERNEL(2)
void update_rows(T* const* weights, unsigned short* const* trails, float* const* squares,
                 const T* const* grads, const long* grad_rows, const long* places,
                 const long* begins, const int* bags, const float* scales, Index dim, float rate,
                 float extra) {
  const auto item = sycl::ext::oneapi::this_work_item::get_nd_item<2>();
  const Index row = item.get_global_id(0);
  const Index column = item.get_global_id(1);
  if (column >= dim) return;
  const Index table = places[2 * row];
  const Index at = places[2 * row + 1] * dim + column;
  float grad = 0.f;
  for (long k = begins[row]; k < begins[row + 1]; ++k)
    grad += load(grads[table] + bags[k] * grad_rows[table], column) * scales[k];
  const float old = weight_at(weights[table], trails[table], at);
  if (squares) {
    const float square = squares[table][at] + grad * grad;
    squares[table][at] = square;
    grad /= sycl::sqrt(square) + extra;
  } else {
    grad += extra * old;
  }
  set_weight(weights[table], trails[table], at, old - rate * grad);
}

#define UPDATE(T)                                                                                 \
  template void update_rows<T>(T* const*, unsigned short* const*, float* const*, const T* const*, \
                               const long*, const long*, const long*, const int*, const float*,   \
                               Index, float, float);
UPDATE(float)
UPDATE(half)
UPDATE(bf16)
