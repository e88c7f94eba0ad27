// SPDX-License-Identifier: Apache-2.0
// What moves and makes elements: one for each work-item.
#include "float8.h"
#include "names.h"

// Copies between dtypes and strides.
template <typename To, typename From>
inline To converted(From value) {
  if constexpr (std::is_same_v<From, To>) {
    return value;
  } else if constexpr (std::is_same_v<From, bool>) {
    return To(value ? 1.f : 0.f);
  } else {
    const auto number = static_cast<compute<From>>(value);
    if constexpr (std::is_same_v<To, bool>) {
      return number != 0;
    } else if constexpr (std::is_same_v<compute<To>, float>) {
      return To(static_cast<float>(number));
    } else {
      return static_cast<To>(static_cast<long>(number));
    }
  }
}
template <typename From, typename To>
IPEX_KERNEL(2)
void copy_strided(To* y, const From* x, IPEX_SIZES, IPEX_STRIDES(y), IPEX_STRIDES(x)) {
  const Place p(rows, columns, size1, size2);
  if (!p.inside) return;
  y += p.row(y1, y2, y3);
  x += p.row(x1, x2, x3);
  p.step(y0 == 1 && x0 == 1, [&](auto at) { y[at(y0)] = converted<To>(x[at(x0)]); });
}

// Elements by their size alone, since they are only moved; a number comes as its bits.
// -----------------------------------------------------------------------------------

template <typename U>
IPEX_KERNEL(2)
void where(U* y, const unsigned char* condition, const U* a, const U* b, IPEX_SIZES,
           IPEX_STRIDES(y), IPEX_STRIDES(c), IPEX_STRIDES(a), IPEX_STRIDES(b)) {
  const Place p(rows, columns, size1, size2);
  if (!p.inside) return;
  y += p.row(y1, y2, y3);
  condition += p.row(c1, c2, c3);
  a += p.row(a1, a2, a3);
  b += p.row(b1, b2, b3);
  p.step(y0 == 1 && c0 == 1 && a0 == 1 && b0 == 1, [&](auto at) {
    const U left = a[at(a0)];
    const U right = b[at(b0)];
    y[at(y0)] = condition[at(c0)] ? left : right;
  });
}

template <typename U>
IPEX_KERNEL(2)
void masked_fill(U* y, const unsigned char* mask, IPEX_SIZES, IPEX_STRIDES(y), IPEX_STRIDES(m),
                 unsigned long bits) {
  const Place p(rows, columns, size1, size2);
  if (!p.inside) return;
  y += p.row(y1, y2, y3);
  mask += p.row(m1, m2, m3);
  // Elements that stay are written as well: a store for each that goes is slow on CPUs.
  p.step(y0 == 1 && m0 == 1, [&](auto at) {
    const U kept = y[at(y0)];
    y[at(y0)] = mask[at(m0)] ? static_cast<U>(bits) : kept;
  });
}

template <typename U>
IPEX_KERNEL(2)
void fill(U* y, IPEX_SIZES, IPEX_STRIDES(y), unsigned long bits) {
  const Place p(rows, columns, size1, size2);
  if (p.inside) y[p.at(y0, y1, y2, y3)] = static_cast<U>(bits);
}

// Keeps the elements with column - row <= diagonal (lower) or >= diagonal; others become 0.
template <typename U>
IPEX_KERNEL(2)
void triangle(U* y, const U* x, unsigned int rows, unsigned int columns, unsigned int size1,
              int diagonal, int lower) {
  const Place p(rows, columns, size1, 1);
  if (!p.inside) return;
  const long distance = static_cast<long>(p.column) - p.i1;
  const unsigned long i = (p.i3 * size1 + p.i1) * columns + p.column;
  y[i] = (lower ? distance <= diagonal : distance >= diagonal) ? x[i] : U(0);
}

template <typename T>
IPEX_KERNEL(1)
void arange(T* y, unsigned long n, compute<T> start, compute<T> step) {
  const unsigned long i = global_id();
  if (i < n) store(y, i, start + step * static_cast<compute<T>>(i));
}

#define COPY(from, to)                                                                            \
  template void copy_strided<from, to>(to*, const from*, IPEX_FOUR(unsigned int), IPEX_FOUR(int), \
                                       IPEX_FOUR(int));
#define COPIES(a, b) COPY(a, b) COPY(b, a)
COPIES(float, half)
COPIES(float, bf16)
COPIES(half, bf16)
#define COPIES_OF_WHOLE(a) COPIES(a, float) COPIES(a, half) COPIES(a, bf16)
COPIES_OF_WHOLE(long)
COPIES_OF_WHOLE(int)
COPIES_OF_WHOLE(bool)
COPIES_OF_WHOLE(unsigned char)
COPIES(long, int)
COPIES(long, bool)
COPIES(int, bool)
COPIES(long, unsigned char)
COPIES(int, unsigned char)
// Numbers of 8 bits that caches and weights hold; other kernels make them.
#define COPIES_FROM(a) COPY(a, float) COPY(a, half) COPY(a, bf16)
COPIES_FROM(signed char)
COPIES_FROM(e5m2)
COPIES_FROM(e4m3)

#define MOVES(U)                                                                                  \
  COPY(U, U)                                                                                      \
  template void where<U>(U*, const unsigned char*, const U*, const U*, IPEX_FOUR(unsigned int),   \
                         IPEX_FOUR(int), IPEX_FOUR(int), IPEX_FOUR(int), IPEX_FOUR(int));         \
  template void masked_fill<U>(U*, const unsigned char*, IPEX_FOUR(unsigned int), IPEX_FOUR(int), \
                               IPEX_FOUR(int), unsigned long);                                    \
  template void fill<U>(U*, IPEX_FOUR(unsigned int), IPEX_FOUR(int), unsigned long);              \
  template void triangle<U>(U*, const U*, unsigned int, unsigned int, unsigned int, int, int);
MOVES(unsigned char)
MOVES(unsigned short)
MOVES(unsigned int)
MOVES(unsigned long)

template void arange<float>(float*, unsigned long, float, float);
template void arange<long>(long*, unsigned long, long, long);
