// SPDX-License-Identifier: Apache-2.0
// For device code: types, conversions and positions. Rules that keep SPIR-V loadable everywhere:
// free functions of pointers and scalars; no local_accessor arguments (work_group_static instead);
// no bfloat16 of SYCL, whose conversions need a library, but where kernels come from their source.
#pragma once

#include <sycl/sycl.hpp>

#define IPEX_KERNEL(dimensions) \
  SYCL_EXT_ONEAPI_FUNCTION_PROPERTY((sycl::ext::oneapi::experimental::nd_range_kernel<dimensions>))

namespace ipex {

using half = sycl::half;

constexpr float kLog2e = 1.4426950408889634f;

// What would lie in memory, not in registers, as an argument.
#define IPEX_INLINE __attribute__((always_inline))

// A GPU that multiplies matrices of bfloat16 rounds two numbers by one instruction, and may be slow
// to round one alone. The compiler's own type says so; SPIR-V has none.
#if defined(IPEX_GPU) && IPEX_SUB_GROUP > 0 && !defined(__SPIR__) && !defined(__SPIRV__)
#define IPEX_ROUNDS_PAIRS
#endif
// The bits of two rounded numbers, the first one in the lower half.
template <typename Number>
IPEX_INLINE inline unsigned int rounded_pair(float a, float b) {
  using Floats = float __attribute__((ext_vector_type(2)));
  using Pair = Number __attribute__((ext_vector_type(2)));
  const Floats both = {a, b};
  return sycl::bit_cast<unsigned int>(__builtin_convertvector(both, Pair));
}

// Round to nearest even; NaN stays NaN.
struct bf16 {
  unsigned short bits;
  bf16() = default;
  explicit bf16(float value) {
#if defined(IPEX_ROUNDS_PAIRS)
    bits = static_cast<unsigned short>(rounded_pair<__bf16>(value, 0.f));
#elif defined(IPEX_GPU) && IPEX_SUB_GROUP > 0  // which has an instruction
    bits = sycl::bit_cast<unsigned short>(sycl::ext::oneapi::bfloat16(value));
#else
    const unsigned int x = sycl::bit_cast<unsigned int>(value);
    bits = value != value ? static_cast<unsigned short>((x >> 16) | 0x40)
                          : static_cast<unsigned short>((x + 0x7fff + ((x >> 16) & 1)) >> 16);
#endif
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

// Two numbers of 16 bits, the first one in the lower half.
template <typename T>
IPEX_INLINE inline unsigned int pair_of(float a, float b) {
#ifdef IPEX_ROUNDS_PAIRS
  if constexpr (std::is_same_v<T, bf16>) return rounded_pair<__bf16>(a, b);
  if constexpr (std::is_same_v<T, half>) return rounded_pair<_Float16>(a, b);
#endif
  return sycl::bit_cast<unsigned short>(T(a)) |
         static_cast<unsigned int>(sycl::bit_cast<unsigned short>(T(b))) << 16;
}

// Sixteen bytes of numbers, which an item of a GPU moves at once: words, since a compiler keeps
// arrays of small numbers in memory.
using WideBits = unsigned int __attribute__((ext_vector_type(4)));
template <typename T>
struct Wide {
  static constexpr int count = 16 / sizeof(T);
  WideBits bits;

  IPEX_INLINE compute<T> get(int i) const {
    if constexpr (sizeof(T) == 8) {
      return static_cast<compute<T>>(bits[2 * i] | static_cast<unsigned long>(bits[2 * i + 1])
                                                       << 32);
    } else if constexpr (sizeof(T) == 4) {
      return static_cast<compute<T>>(sycl::bit_cast<T>(static_cast<unsigned int>(bits[i])));
    } else if constexpr (sizeof(T) == 2) {
      return static_cast<compute<T>>(
          sycl::bit_cast<T>(static_cast<unsigned short>(bits[i / 2] >> (i % 2 * 16))));
    } else {
      return static_cast<T>(bits[i / 4] >> (i % 4 * 8));
    }
  }
  // Of the results f(0), f(1) ..., of numbers of 2 or 4 bytes.
  template <typename F>
  static IPEX_INLINE Wide of(F f) {
    Wide result;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (sizeof(T) == 4) {
        result.bits[i] = sycl::bit_cast<unsigned int>(T(f(i)));
      } else {
        result.bits[i] = pair_of<T>(f(2 * i), f(2 * i + 1));
      }
    }
    return result;
  }
};
template <typename T>
IPEX_INLINE inline Wide<T> load_wide(const T* p) {
  return {*reinterpret_cast<const WideBits*>(p)};
}
template <typename T>
IPEX_INLINE inline void store_wide(T* p, const Wide<T>& values) {
  *reinterpret_cast<WideBits*>(p) = values.bits;
}
template <typename... T>
inline bool aligned(const T*... p) {
  return ((reinterpret_cast<unsigned long>(p) | ...) & 15) == 0;
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

// y[i] = f(x[i]...) for the elements of an item: one of a CPU, 16 bytes of a GPU, for which the
// host defines IPEX_GPU and starts fewer items.
template <typename T, typename F, typename... Inputs>
IPEX_INLINE inline void map_elements(T* y, unsigned long n, F f, const Inputs*... x) {
#ifdef IPEX_GPU
  constexpr int kCount = Wide<T>::count;
  const unsigned long begin = global_id() * kCount;
  if (begin + kCount <= n && aligned(y, x...)) {
    const auto of = [&](const auto... wide) IPEX_INLINE {
      store_wide(y + begin, Wide<T>::of([&](int i) IPEX_INLINE { return f(wide.get(i)...); }));
    };
    of(load_wide(x + begin)...);
    return;
  }
  const unsigned long end = begin + kCount < n ? begin + kCount : n;
#pragma unroll 1
  for (unsigned long i = begin; i < end; ++i) store(y, i, f(load(x, i)...));
#else
  const unsigned long i = global_id();
  if (i < n) store(y, i, f(load(x, i)...));
#endif
}

#ifdef IPEX_GPU
constexpr int kMostSubGroups = 64;
sycl::ext::oneapi::experimental::work_group_static<unsigned int[2 * kMostSubGroups]> parts_of_group;
#endif

#ifdef IPEX_GPU
// The values of all items of a group of whole sub-groups, a power of 2 of them, joined with one
// barrier and without calls, which the reductions of SYCL may be: a sub-group by exchanges, then
// the results of sub-groups in the same way. `turn` is 0 and 1 alternately, since others may still
// read.
template <typename C, typename Op>
IPEX_INLINE inline C join_items(const sycl::group<1>& group, unsigned int lane, unsigned int lanes,
                                C value, Op op, int turn) {
  const auto sub_group = sycl::ext::oneapi::this_work_item::get_sub_group();
  const auto size = static_cast<unsigned int>(sub_group.get_max_local_range()[0]);
  const auto exchange = [&](unsigned int count) IPEX_INLINE {
    for (unsigned int step = 1; step < count; step *= 2)
      value = op(value, sycl::permute_group_by_xor(sub_group, value, step));
  };
  exchange(size);
  if (lanes <= size) return value;
  C* const parts = reinterpret_cast<C*>(*&parts_of_group) + turn * kMostSubGroups;
  const unsigned int own = lane % size;
  const unsigned int count = lanes / size;
  if (own == 0) parts[lane / size] = value;
  sycl::group_barrier(group);
  value = parts[own % count];
  for (unsigned int i = own + size; i < count; i += size) value = op(value, parts[i]);
  exchange(count < size ? count : size);
  return value;
}
#endif

// The values of all items of a group, joined.
template <typename C, typename Op>
IPEX_INLINE inline C reduce_group(const sycl::group<1>& group, C value, Op op, int turn = 0) {
#ifdef IPEX_GPU
  if constexpr (sizeof(C) == 4) {
    return join_items(group, static_cast<unsigned int>(group.get_local_linear_id()),
                      static_cast<unsigned int>(group.get_local_linear_range()), value, op, turn);
  }
#endif
  return sycl::reduce_over_group(group, value, op);
}

// The row of a work-group. Its work-items take neighboring elements, and each step of the loops
// but the last is whole, so that a compiler for CPUs makes plain vectors of them.
struct Row {
  sycl::group<1> group = sycl::ext::oneapi::this_work_item::get_work_group<1>();
  unsigned long index = group.get_group_linear_id();
  unsigned long columns;
  unsigned long begin;  // offset of the row's first element
  unsigned long lane = group.get_local_linear_id();
  unsigned long lanes = group.get_local_linear_range();
  mutable int turn = 0;  // of reduce_group

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
    return joined(total, sycl::plus<float>());
  }
  // The sum of f(i, value) over the values of the row (Plain below).
  template <typename Values, typename F>
  IPEX_INLINE float sum_of(const Values& values, F f) const {
    float total = 0.f;
    values.each([&](unsigned long i, float value) IPEX_INLINE { total += f(i, value); });
    return joined(total, sycl::plus<float>());
  }
  // Of numbers only: the powers of a NaN are NaN, too.
  template <typename Values>
  IPEX_INLINE float maximum_of(const Values& values) const {
    float top = -__builtin_inff();
    values.each([&](unsigned long, float value) IPEX_INLINE { top = value > top ? value : top; });
    return joined(top, sycl::maximum<float>());
  }
  template <typename C, typename Op>
  IPEX_INLINE C joined(C value, Op op) const {
    turn ^= 1;
#ifdef IPEX_GPU
    return join_items(group, static_cast<unsigned int>(lane), static_cast<unsigned int>(lanes),
                      value, op, turn);
#else
    return reduce_group(group, value, op, turn);
#endif
  }
};

// The values of a row: each(f) calls f(i, value), put(y, f) makes y[i] of f(i, value), and put(y,
// a, b, no_a, no_b, f) of f(value, a[i], b[i]), where a and b may be null.
template <typename T>
struct Plain {
  Row row;
  const T* x;

  template <typename F>
  void each(F f) const {
    row.each([&](unsigned long i) { f(i, load(x, i)); });
  }
  template <typename F>
  void put(T* y, F f) const {
    row.each([&](unsigned long i) { store(y, i, f(i, load(x, i))); });
  }
  template <typename W, typename F>
  void put(T* y, const W* a, const W* b, float no_a, float no_b, F f) const {
    row.each([&](unsigned long i) {
      store(y, i, f(load(x, i), a ? load(a, i) : no_a, b ? load(b, i) : no_b));
    });
  }
};

#ifdef IPEX_GPU
// In registers, read once: up to 32 values for each item, of rows that consist of 16 bytes each.
template <typename T>
struct InRegisters {
  static constexpr int kCount = Wide<T>::count;
  static constexpr int kParts = 32 / kCount;
  Row row;
  Wide<T> parts[kParts];

  IPEX_INLINE InRegisters(const Row& row_, const T* x) : row(row_) {
    each_part([&](int part, unsigned int i) IPEX_INLINE { parts[part] = load_wide(x + i); });
  }
  template <typename F>
  IPEX_INLINE void each_part(F f) const {
    const auto columns = static_cast<unsigned int>(row.columns);  // 32 for each item
    const auto pace = static_cast<unsigned int>(row.lanes) * kCount;
    auto i = static_cast<unsigned int>(row.lane) * kCount;
#pragma unroll
    for (int part = 0; part < kParts; ++part, i += pace) {
      if (i < columns) f(part, i);
    }
  }
  template <typename F>
  IPEX_INLINE void each(F f) const {
    each_part([&](int part, unsigned int i) IPEX_INLINE {
#pragma unroll
      for (int j = 0; j < kCount; ++j) f(i + j, parts[part].get(j));
    });
  }
  template <typename F>
  IPEX_INLINE void put(T* y, F f) const {
    each_part([&](int part, unsigned int i) IPEX_INLINE {
      store_wide(y + i,
                 Wide<T>::of([&](int j) IPEX_INLINE { return f(i + j, parts[part].get(j)); }));
    });
  }
  template <typename W, typename F>
  IPEX_INLINE void put(T* y, const W* a, const W* b, float no_a, float no_b, F f) const {
    each_part([&](int part, unsigned int i) IPEX_INLINE {
      float factors[kCount];
      float addends[kCount];
      load_some(factors, a, i, no_a);
      load_some(addends, b, i, no_b);
      store_wide(y + i, Wide<T>::of([&](int j) IPEX_INLINE {
                   return f(parts[part].get(j), factors[j], addends[j]);
                 }));
    });
  }
  // Numbers that all rows share, 16 bytes at a time.
  template <typename W>
  static IPEX_INLINE void load_some(float (&numbers)[kCount], const W* x, unsigned int i,
                                    float none) {
    if (x != nullptr && aligned(x)) {
      constexpr int kEach = Wide<W>::count < kCount ? Wide<W>::count : kCount;
#pragma unroll
      for (int first = 0; first < kCount; first += kEach) {
        const Wide<W> wide = load_wide(x + i + first);
#pragma unroll
        for (int j = 0; j < kEach; ++j) numbers[first + j] = wide.get(j);
      }
    } else {
#pragma unroll
      for (int j = 0; j < kCount; ++j) numbers[j] = x != nullptr ? load(x, i + j) : none;
    }
  }
};
#endif

// Calls f with the values of the row x, whose results go to y.
template <typename T, typename F>
IPEX_INLINE inline void with_values(const Row& row, const T* x, const T* y, F f) {
#ifdef IPEX_GPU
  if (row.columns % Wide<T>::count == 0 && row.columns <= row.lanes * 32 && aligned(x, y)) {
    f(InRegisters<T>(row, x));
    return;
  }
#endif
  f(Plain<T>{row, x});
}

}  // namespace ipex
