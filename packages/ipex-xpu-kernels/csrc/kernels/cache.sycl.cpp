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
inline void keep(C* cache, Index i, T value, float inverse) {
  if constexpr (std::is_same_v<T, C>) {
    cache[i] = value;
  } else {
    store_quantized(cache, i, load(&value, 0), inverse);
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
  keep(cache, column, rows[column], inverse);
}

// Rotates the queries of tokens in place by tables of float32 with a row for each token, and writes
// their rotated keys and their values to caches. A row of items has a head of queries, keys or
// values: an item for each pair that turns, and for each number that does not.
template <typename T, typename C>
IPEX_KERNEL(2)
void rope_and_cache(T* query, const T* key, const T* value, C* key_cache, C* value_cache,
                    const float* sines, const float* cosines, const long* slots, Index query_heads,
                    Index heads, Index size, Index pairs, Index columns, int half_split,
                    long block_size, long query_token, long query_head, long key_token,
                    long key_head, long value_token, long value_head, long key_block,
                    long key_cache_head, long key_line, long value_block, long value_cache_head,
                    long value_line, float key_inverse, float value_inverse) {
  const auto item = sycl::ext::oneapi::this_work_item::get_nd_item<2>();
  const Index all = query_heads + 2 * heads;
  const Index token = item.get_global_id(0) / all, head = item.get_global_id(0) % all;
  const Index i = item.get_global_id(1);
  const bool of_query = head < query_heads, of_value = head >= query_heads + heads;
  if (i >= (of_query ? pairs : of_value ? size : size - pairs)) return;
  const Index own = of_query ? head : (head - query_heads) % heads;
  const Target to(token * heads + (of_query ? 0 : own), heads, slots, block_size);
  if (of_value) {
    if (!to.wanted) return;
    value += to.token * value_token + to.head * value_head;
    value_cache += to.at(value_block, value_cache_head, value_line);
    keep(value_cache, i, value[i], value_inverse);
    return;
  }
  query += to.token * query_token + static_cast<long>(own) * query_head;
  key += to.token * key_token + to.head * key_head;
  key_cache += to.at(key_block, key_cache_head, key_line);
  if (i >= pairs) {
    if (to.wanted) keep(key_cache, i + pairs, key[i + pairs], key_inverse);
    return;
  }
  const Index first = half_split ? i : 2 * i;
  const Index second = half_split ? i + pairs : 2 * i + 1;
  const bool whole = columns == 2 * pairs;
  sines += to.token * static_cast<long>(columns);
  cosines += to.token * static_cast<long>(columns);
  const T* x = of_query ? query : key;
  const float a = load(x, first), b = load(x, second);
  const T one(a * cosines[whole ? first : i] - b * sines[whole ? first : i]);
  const T other(b * cosines[whole ? second : i] + a * sines[whole ? second : i]);
  if (of_query) {
    query[first] = one;
    query[second] = other;
  } else if (to.wanted) {
    keep(key_cache, first, one, key_inverse);
    keep(key_cache, second, other, key_inverse);
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
                                  long, long, float);                                              \
  template void rope_and_cache<T, C>(T*, const T*, const T*, C*, C*, const float*, const float*,   \
                                     const long*, Index, Index, Index, Index, Index, int, long,    \
                                     long, long, long, long, long, long, long, long, long, long,   \
                                     long, long, float, float);
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
