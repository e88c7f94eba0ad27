// SPDX-License-Identifier: Apache-2.0
// Bags of rows of many tables. What differs between tables comes as a pointer to a number or an
// address for each.
#include "names.h"

using Index = unsigned long;

// Raises the flag where an index names no row, and where offsets do not begin with 0, decrease
// or pass the last index.
template <typename I>
IPEX_KERNEL(2)
void check_bags(const I* const* indices, const long* lookups, const long* table_rows,
                const I* const* offsets, Index offset_count, int* flag) {
  const auto item = sycl::ext::oneapi::this_work_item::get_nd_item<2>();
  const Index table = item.get_global_id(0);
  const Index i = item.get_global_id(1);
  const long count = lookups[table];
  if (i < static_cast<Index>(count)) {
    const long index = indices[table][i];
    if (index < 0 || index >= table_rows[table]) *flag = 1;
  }
  if (i < offset_count) {
    const long begin = offsets[table][i];
    const long before = i == 0 ? 0 : static_cast<long>(offsets[table][i - 1]);
    if (begin < before || begin > count || (i == 0 && begin != 0)) *flag = 1;
  }
}

// y[table, bag] = the sum of the bag's rows, or their mean. `factors` may be null. An item has one
// column. Bags and indices that do not exist count for nothing: the flag says so.
template <typename T, typename I>
IPEX_KERNEL(2)
void pool_bags(T* y, Index y_table, Index y_bag, const T* const* weights, const long* strides,
               const long* table_rows, const I* const* indices, const long* lookups,
               const I* const* offsets, Index offset_count, const T* const* factors, Index bags,
               Index dim, int mean) {
  const auto item = sycl::ext::oneapi::this_work_item::get_nd_item<2>();
  const Index table = item.get_global_id(0) / bags;
  const Index bag = item.get_global_id(0) % bags;
  const Index column = item.get_global_id(1);
  if (column >= dim) return;
  const long count = lookups[table];
  const long begin = offsets[table][bag];
  const long next = bag + 1 < offset_count ? static_cast<long>(offsets[table][bag + 1]) : count;
  const long end = begin < 0 ? begin : next < count ? next : count;
  const T* weight = weights[table];
  const I* index = indices[table];
  const T* factor = factors ? factors[table] : nullptr;
  float sum = 0.f;
  for (long k = begin; k < end; ++k) {
    const long row = index[k];
    if (row < 0 || row >= table_rows[table]) continue;
    const float value = load(weight, row * strides[table] + column);
    sum += factor ? value * load(factor, k) : value;
  }
  if (mean && end > begin) sum /= static_cast<float>(end - begin);
  store(y, table * y_table + bag * y_bag + column, sum);
}

#define POOL(T, I)                                                                           \
  template void pool_bags<T, I>(T*, Index, Index, const T* const*, const long*, const long*, \
                                const I* const*, const long*, const I* const*, Index,        \
                                const T* const*, Index, Index, int);
#define BAGS(I)                                                                                  \
  template void check_bags<I>(const I* const*, const long*, const long*, const I* const*, Index, \
                              int*);                                                             \
  POOL(float, I)                                                                                 \
  POOL(half, I)                                                                                  \
  POOL(bf16, I)
BAGS(int)
BAGS(long)
