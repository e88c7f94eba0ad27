// SPDX-License-Identifier: Apache-2.0
// Reductions of [outer, length, inner] along the middle: one work-group for each row where inner is
// 1, one work-item for each column else. Long rows are cut into parts, whose results a second pass
// reduces; the cuts depend on shapes alone, so that results repeat.
#include "names.h"

#ifdef IPEX_GPU
constexpr int kAhead = 8;          // loads of an item that are on their way at the same time
constexpr int kColumnItems = 256;  // of a group that reduces columns
#endif

struct sum {
  template <typename C>
  static C first() {
    return 0;
  }
  template <typename C>
  static C join(C a, C b) {
    return a + b;
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
  static C join(C a, C b) {
    return step(a, b, b);
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

// Results of float may go to a tensor of another dtype: of kind 1 bfloat16, 2 float16, else 0.
template <typename C>
inline void put_result(C* y, unsigned long i, C value, int kind) {
  if constexpr (std::is_same_v<C, float>) {
    if (kind == 1) return store(reinterpret_cast<bf16*>(y), i, value);
    if (kind == 2) return store(reinterpret_cast<half*>(y), i, value);
  }
  y[i] = value;
}

// Group g reduces part g % parts of row g / parts; `centers` (or null) has a number for each row.
template <typename Op, typename T>
IPEX_KERNEL(1)
void reduce_rows(compute<T>* y, const T* x, const compute<T>* centers, unsigned long length,
                 unsigned long chunk, unsigned long parts, compute<T> factor, int kind) {
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
  using Numbers = ipex::Wide<T>;
  constexpr unsigned long kCount = Numbers::count;
  if (count % kCount == 0 && ipex::aligned(x)) {
    // kAhead loads are on their way at the same time.
    const unsigned long pace = part.lanes * kCount;
    unsigned long i = part.lane * kCount;
    for (; i + (kAhead - 1) * pace < count; i += kAhead * pace) {
      Numbers values[kAhead];
#pragma unroll
      for (int a = 0; a < kAhead; ++a) values[a] = ipex::load_wide(x + i + a * pace);
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
#pragma unroll
        for (int j = 0; j < Numbers::count; ++j) total = Op::step(total, values[a].get(j), center);
      }
    }
    for (; i < count; i += pace) {
      const Numbers values = ipex::load_wide(x + i);
#pragma unroll
      for (int j = 0; j < Numbers::count; ++j) total = Op::step(total, values.get(j), center);
    }
  } else {
    part.each_of(count, step);
  }
#else
  part.each_of(count, step);
#endif
  total = Op::across(part.group, total);
  if (part.leader()) put_result(y, part.index, C(total * factor), kind);
}

#ifdef IPEX_GPU
// What the items of a group that share columns found.
sycl::ext::oneapi::experimental::work_group_static<double[kColumnItems * 16]> found_in_columns;
#endif

// A group of a GPU has kDown items for each of its columns, and an item 16 bytes of a row, if they
// lie so that it can load them at once, or else one number.
template <typename Op, typename T>
IPEX_KERNEL(2)
void reduce_columns(compute<T>* y, const T* x, const compute<T>* centers, unsigned long length,
                    unsigned long inner, unsigned long chunk, unsigned long parts,
                    compute<T> factor, int kind) {
  using C = compute<T>;
  const auto item = sycl::ext::oneapi::this_work_item::get_nd_item<2>();
#ifdef IPEX_GPU
  const unsigned long index = item.get_group(0);
#else
  const unsigned long index = item.get_global_id(0);
#endif
  const unsigned long row = index / parts;
  const unsigned long begin = index % parts * chunk;
  const unsigned long end = begin + chunk < length ? begin + chunk : length;
#ifdef IPEX_GPU
  using Numbers = ipex::Wide<T>;
  constexpr int kCount = Numbers::count;
  const auto down = item.get_local_id(0);
  const auto downs = item.get_local_range(0);
  const unsigned long column = item.get_global_id(1) * kCount;
  const bool wide = inner % kCount == 0 && ipex::aligned(x);
  C totals[kCount];
  C center[kCount];
#pragma unroll
  for (int j = 0; j < kCount; ++j) {
    totals[j] = Op::template first<C>();
    center[j] = centers && column + j < inner ? centers[row * inner + column + j] : C(0);
  }
  const T* const own = x + row * length * inner + column;
  if (wide && column < inner) {
    unsigned long r = begin + down;
    for (; r + (kAhead - 1) * downs < end; r += kAhead * downs) {
      Numbers values[kAhead];
#pragma unroll
      for (int a = 0; a < kAhead; ++a) values[a] = ipex::load_wide(own + (r + a * downs) * inner);
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
#pragma unroll
        for (int j = 0; j < kCount; ++j)
          totals[j] = Op::step(totals[j], values[a].get(j), center[j]);
      }
    }
    for (; r < end; r += downs) {
      const Numbers values = ipex::load_wide(own + r * inner);
#pragma unroll
      for (int j = 0; j < kCount; ++j) totals[j] = Op::step(totals[j], values.get(j), center[j]);
    }
  } else {
    for (unsigned long r = begin + down; r < end; r += downs) {
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        if (column + j < inner)
          totals[j] = Op::step(totals[j], load(own, r * inner + j), center[j]);
      }
    }
  }
  // Joined in order, by the first of the items of a column.
  C* const found = reinterpret_cast<C*>(*&found_in_columns) + item.get_local_id(1) * kCount;
  const auto pace = item.get_local_range(1) * kCount;
#pragma unroll
  for (int j = 0; j < kCount; ++j) found[down * pace + j] = totals[j];
  sycl::group_barrier(item.get_group());
  for (unsigned long j = down; j < kCount; j += downs) {
    if (column + j >= inner) continue;
    C total = found[j];
    for (unsigned long d = 1; d < downs; ++d) total = Op::join(total, found[d * pace + j]);
    put_result(y, index * inner + column + j, C(total * factor), kind);
  }
#else
  const unsigned long column = item.get_global_id(1);
  if (column >= inner) return;
  const C center = centers ? centers[row * inner + column] : C(0);
  C total = Op::template first<C>();
  for (unsigned long r = begin; r < end; ++r)
    total = Op::step(total, load(x, (row * length + r) * inner + column), center);
  put_result(y, index * inner + column, C(total * factor), kind);
#endif
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
                                   unsigned long, unsigned long, compute<T>, int);             \
  template void reduce_columns<op, T>(compute<T>*, const T*, const compute<T>*, unsigned long, \
                                      unsigned long, unsigned long, unsigned long, compute<T>, \
                                      int);
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
