// SPDX-License-Identifier: Apache-2.0
// New rows of a paged cache of keys or values. The slots in use are all different and lie in the
// cache; tokens with a negative slot are left out.
#include "float8.h"

using Index = unsigned long;

// Where the row of a token and head lies, and where it goes.
struct Target {
  long token, head, block, line;
  bool wanted;

  Target(Index row, Index heads, const long* slots, long block_size)
      : token(static_cast<long>(row / heads)), head(static_cast<long>(row % heads)) {
    const long slot = slots[token];
    wanted = slot >= 0;
    block = slot / block_size;
    line = slot % block_size;
  }
  long at(long of_block, long of_head, long of_line) const {
    return block * of_block + head * of_head + line * of_line;
  }
};

template <typename C>
inline void store_quantized(C* cache, Index i, float value, float inverse) {
  if constexpr (std::is_same_v<C, signed char>) {
    const float scaled = value * inverse;
    const float whole = sycl::fmin(sycl::fmax(sycl::rint(scaled), -127.f), 127.f);
    cache[i] = static_cast<signed char>(scaled != scaled ? 0.f : whole);
  } else {
    cache[i] = C(value * inverse);
  }
}

template <typename T, typename C>
IPEX_KERNEL(2)
void write_cache(C* cache, const T* rows, const long* slots, Index heads, Index size,
                 long block_size, long row_token, long row_head, long cache_block, long cache_head,
                 long cache_line, float inverse) {
  const auto item = sycl::ext::oneapi::this_work_item::get_nd_item<2>();
  const Index column = item.get_global_id(1);
  const Target to(item.get_global_id(0), heads, slots, block_size);
  if (column >= size || !to.wanted) return;
  rows += to.token * row_token + to.head * row_head;
  cache += to.at(cache_block, cache_head, cache_line);
  if constexpr (std::is_same_v<T, C>) {
    cache[column] = rows[column];
  } else {
    store_quantized(cache, column, load(rows, column), inverse);
  }
}

// With a scale for each row: its largest magnitude / 127. A group has a row.
template <typename T>
IPEX_KERNEL(1)
void write_cache_scaled(signed char* cache, float* scales, const T* rows, const long* slots,
                        Index heads, Index size, long block_size, long row_token, long row_head,
                        long cache_block, long cache_head, long cache_line, long scale_block,
                        long scale_head, long scale_line) {
  const Row row(size);
  const Target to(row.index, heads, slots, block_size);
  if (!to.wanted) return;  // all items of the group
  const T* x = rows + to.token * row_token + to.head * row_head;
  cache += to.at(cache_block, cache_head, cache_line);
  float top = 0.f;
  row.each([&](Index i) {
    const float value = sycl::fabs(load(x, i));
    top = value < __builtin_inff() ? sycl::fmax(top, value) : __builtin_inff();
  });
  const float whole = sycl::reduce_over_group(row.group, top, sycl::maximum<float>());
  const float largest = whole < __builtin_inff() ? whole : __builtin_nanf("");
  const float inverse = largest > 0.f ? 127.f / largest : 0.f;
  row.each([&](Index i) { store_quantized(cache, i, load(x, i), inverse); });
  if (row.leader()) scales[to.at(scale_block, scale_head, scale_line)] = largest / 127.f;
}

#define WRITE_OF(T, C)                                                                             \
  template void write_cache<T, C>(C*, const T*, const long*, Index, Index, long, long, long, long, \
                                  long, long, float);
#define WRITE(T)                                                                                 \
  WRITE_OF(T, T)                                                                                 \
  WRITE_OF(T, signed char)                                                                       \
  WRITE_OF(T, e5m2)                                                                              \
  WRITE_OF(T, e4m3)                                                                              \
  template void write_cache_scaled<T>(signed char*, float*, const T*, const long*, Index, Index, \
                                      long, long, long, long, long, long, long, long, long);
WRITE(float)
WRITE(half)
WRITE(bf16)
