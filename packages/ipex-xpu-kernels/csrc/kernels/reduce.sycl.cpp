// SPDX-License-Identifier: Apache-2.0
// Reductions of [outer, length, inner] along the middle: one work-group for each row where inner is
// 1, one work-item for each column else. Long rows are cut into parts, whose results a second pass
// reduces; the cuts depend on shapes alone, so that results repeat.
#include "names.h"

struct sum {
  template <typename C>
  static C first() {
    return 0;
  }
  template <typename C>
  static C step(C total, C x, C) {
    return total + x;
  }
  template <typename C>
  static C across(const sycl::group<1>& group, C total) {
    return reduce_group(group, total, sycl::plus<C>());
  }
};
// Of the distances from a center.
struct sum_squares : sum {
  static float step(float total, float x, float center) {
    return total + (x - center) * (x - center);
  }
};
template <bool greater>
struct extreme {
  template <typename C>
  static C first() {
    if constexpr (std::is_same_v<C, float>) {
      return greater ? -__builtin_inff() : __builtin_inff();
    } else {
      return greater ? -0x7fffffffffffffffl - 1 : 0x7fffffffffffffffl;
    }
  }
  template <typename C>
  static bool better(C x, C top) {
    return greater ? x > top : x < top;
  }
  template <typename C>
  static C step(C top, C x, C) {
    return better(x, top) || x != x ? x : top;
  }
  template <typename C>
  static C across(const sycl::group<1>& group, C top) {
    if constexpr (std::is_same_v<C, float>) {
      if (sycl::any_of_group(group, top != top)) return __builtin_nanf("");
    }
    if constexpr (greater) return sycl::reduce_over_group(group, top, sycl::maximum<C>());
    return sycl::reduce_over_group(group, top, sycl::minimum<C>());
  }
};
using amax = extreme<true>;
using amin = extreme<false>;

// Group g reduces part g % parts of row g / parts; `centers` (or null) has a number for each row.
template <typename Op, typename T>
IPEX_KERNEL(1)
void reduce_rows(compute<T>* y, const T* x, const compute<T>* centers, unsigned long length,
                 unsigned long chunk, unsigned long parts, compute<T> factor) {
  using C = compute<T>;
  const Row part(chunk);
  const unsigned long row = part.index / parts;
  const unsigned long begin = part.index % parts * chunk;
  const unsigned long count = length - begin < chunk ? length - begin : chunk;
  x += row * length + begin;
  const C center = centers ? centers[row] : C(0);
  C total = Op::template first<C>();
  const auto step = [&](unsigned long i) { total = Op::step(total, load(x, i), center); };
#ifdef IPEX_GPU
  constexpr unsigned long kCount = ipex::Wide<T>::count;
  if (count % kCount == 0 && ipex::aligned(x)) {
#pragma unroll 4
    for (unsigned long i = part.lane * kCount; i < count; i += part.lanes * kCount) {
      const auto values = ipex::load_wide(x + i);
#pragma unroll
      for (int j = 0; j < static_cast<int>(kCount); ++j)
        total = Op::step(total, values.get(j), center);
    }
  } else {
    part.each_of(count, step);
  }
#else
  part.each_of(count, step);
#endif
  total = Op::across(part.group, total);
  if (part.leader()) y[part.index] = total * factor;
}

template <typename Op, typename T>
IPEX_KERNEL(2)
void reduce_columns(compute<T>* y, const T* x, const compute<T>* centers, unsigned long length,
                    unsigned long inner, unsigned long chunk, unsigned long parts,
                    compute<T> factor) {
  using C = compute<T>;
  const auto item = sycl::ext::oneapi::this_work_item::get_nd_item<2>();
  const unsigned long index = item.get_global_id(0);
  const unsigned long column = item.get_global_id(1);
  if (column >= inner) return;
  const unsigned long row = index / parts;
  const unsigned long begin = index % parts * chunk;
  const unsigned long end = begin + chunk < length ? begin + chunk : length;
  const C center = centers ? centers[row * inner + column] : C(0);
  C total = Op::template first<C>();
#ifdef IPEX_GPU
#pragma unroll 8  // loads that are on their way at the same time
#endif
  for (unsigned long r = begin; r < end; ++r)
    total = Op::step(total, load(x, (row * length + r) * inner + column), center);
  y[index * inner + column] = total * factor;
}

// The first position of the extreme value of a row (the first NaN if there is one) and the value.
template <typename Op, typename T>
IPEX_KERNEL(1)
void find_rows(T* values, long* indices, const T* x, unsigned long length) {
  using C = compute<T>;
  const Row row(length);
  x += row.begin;
  C top = Op::template first<C>();
  unsigned long index = ~0ul;
  row.each([&](unsigned long i) {
    const C value = load(x, i);
    if (index == ~0ul || (top == top && (value != value || Op::better(value, top)))) {
      top = value;
      index = i;
    }
  });
  const C whole = Op::across(row.group, top);
  const bool found = index != ~0ul && (top == whole || (top != top && whole != whole));
  const unsigned long first =
      sycl::reduce_over_group(row.group, found ? index : ~0ul, sycl::minimum<unsigned long>());
  if (!row.leader()) return;
  indices[row.index] = static_cast<long>(first);
  if (values) values[row.index] = x[first];
}

// Running sums.
template <typename T>
IPEX_KERNEL(1)
void scan_rows(T* y, const T* x, unsigned long length) {
  using C = compute<T>;
  const Row row(length);
  x += row.begin;
  y += row.begin;
  C before = 0;
  for (unsigned long i = 0; i < length; i += row.lanes) {
    const bool inside = i + row.lane < length;
    const C value = inside ? load(x, i + row.lane) : C(0);
    const C total = sycl::inclusive_scan_over_group(row.group, value, sycl::plus<C>());
    if (inside) store(y, i + row.lane, before + total);
    before += sycl::group_broadcast(row.group, total, row.lanes - 1);
  }
}
template <typename T>
IPEX_KERNEL(2)
void scan_columns(T* y, const T* x, unsigned long length, unsigned long inner) {
  const auto item = sycl::ext::oneapi::this_work_item::get_nd_item<2>();
  const unsigned long column = item.get_global_id(1);
  if (column >= inner) return;
  compute<T> total = 0;
  for (unsigned long r = 0; r < length; ++r) {
    const unsigned long i = (item.get_global_id(0) * length + r) * inner + column;
    total += load(x, i);
    store(y, i, total);
  }
}

#define REDUCE(op, T)                                                                          \
  template void reduce_rows<op, T>(compute<T>*, const T*, const compute<T>*, unsigned long,    \
                                   unsigned long, unsigned long, compute<T>);                  \
  template void reduce_columns<op, T>(compute<T>*, const T*, const compute<T>*, unsigned long, \
                                      unsigned long, unsigned long, unsigned long, compute<T>);
#define ALL(macro, op) \
  IPEX_FLOATS(macro, op) macro(op, long) macro(op, int) macro(op, unsigned char)
IPEX_FLOATS(REDUCE, sum_squares)
ALL(REDUCE, sum)
ALL(REDUCE, amax)
ALL(REDUCE, amin)

#define FIND(op, T) template void find_rows<op, T>(T*, long*, const T*, unsigned long);
IPEX_FLOATS(FIND, amax)
FIND(amax, long)
IPEX_FLOATS(FIND, amin)
FIND(amin, long)

#define SCAN(T)                                            \
  template void scan_rows<T>(T*, const T*, unsigned long); \
  template void scan_columns<T>(T*, const T*, unsigned long, unsigned long);
SCAN(float)
SCAN(half)
SCAN(bf16)
SCAN(long)
