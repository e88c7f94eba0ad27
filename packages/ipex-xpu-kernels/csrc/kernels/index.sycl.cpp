// SPDX-License-Identifier: Apache-2.0
// Indexing in two steps: indices become offsets, which checks their bounds, and elements then move
// by these offsets. An index out of bounds raises a flag, and its elements stay where they are.
#include "names.h"

constexpr long kNowhere = -0x7fffffffffffffffl - 1;

// offsets (+)= index * stride. Negative indices count from the end where `wrap` says so; those that
// equal `skipped` lead nowhere, which is no error. The flag becomes an index that is out of bounds,
// or kNowhere in the place of 0.
template <typename T>
IPEX_KERNEL(1)
void offsets(long* y, const T* indices, unsigned long n, long size, long stride, long skipped,
             int first, int wrap, long* flag) {
  const unsigned long i = global_id();
  if (i >= n) return;
  const long before = first ? 0 : y[i];
  const long given = indices[i];
  const bool skip = given == skipped;
  long index = given;
  if (wrap && index < 0) index += size;
  const bool outside = index < 0 || index >= size;
  if (outside && !skip) *flag = given == 0 ? kNowhere : given;
  y[i] = outside || skip || before == kNowhere ? kNowhere : before + index * stride;
}

// y[...] = x[... + offset]
template <typename U>
IPEX_KERNEL(2)
void take(U* y, const U* x, const long* index, IPEX_SIZES, IPEX_STRIDES(y), IPEX_STRIDES(x),
          IPEX_STRIDES(i)) {
  const Place p(rows, columns, size1, size2);
  if (!p.inside) return;
  if (i0 == 0 && x0 == 1 && y0 == 1) {  // whole rows
    const long offset = index[p.row(i1, i2, i3)];
    y += p.row(y1, y2, y3);
    x += p.row(x1, x2, x3) + offset;
    if (offset != kNowhere) y[p.column] = x[p.column];
    return;
  }
  const long offset = index[p.at(i0, i1, i2, i3)];
  if (offset != kNowhere) y[p.at(y0, y1, y2, y3)] = x[p.at(x0, x1, x2, x3) + offset];
}

// y[... + offset] = x[...]
template <typename U>
IPEX_KERNEL(2)
void put(U* y, const U* x, const long* index, IPEX_SIZES, IPEX_STRIDES(y), IPEX_STRIDES(x),
         IPEX_STRIDES(i)) {
  const Place p(rows, columns, size1, size2);
  if (!p.inside) return;
  const long offset = index[p.at(i0, i1, i2, i3)];
  if (offset != kNowhere) y[p.at(y0, y1, y2, y3) + offset] = x[p.at(x0, x1, x2, x3)];
}

// y[... + offset[k]] += x[..., k] for all k in turn: one work-item for each line, so that sums of
// repeated indices have one order.
template <typename T>
IPEX_KERNEL(2)
void add(T* y, const T* x, const long* index, IPEX_SIZES, IPEX_STRIDES(y), IPEX_STRIDES(x),
         IPEX_STRIDES(i), unsigned long count, long x_step, long index_step) {
  const Place p(rows, columns, size1, size2);
  if (!p.inside) return;
  y += p.at(y0, y1, y2, y3);
  x += p.at(x0, x1, x2, x3);
  index += p.at(i0, i1, i2, i3);
  for (unsigned long k = 0; k < count; ++k) {
    const long offset = index[k * index_step];
    if (offset != kNowhere) store(y, offset, load(y, offset) + load(x, k * x_step));
  }
}

template void offsets<long>(long*, const long*, unsigned long, long, long, long, int, int, long*);
template void offsets<int>(long*, const int*, unsigned long, long, long, long, int, int, long*);

#define OPERANDS(T) \
  T*, const T*, const long*, IPEX_FOUR(unsigned int), IPEX_FOUR(int), IPEX_FOUR(int), IPEX_FOUR(int)
#define MOVES(U)                      \
  template void take<U>(OPERANDS(U)); \
  template void put<U>(OPERANDS(U));
MOVES(unsigned char)
MOVES(unsigned short)
MOVES(unsigned int)
MOVES(unsigned long)

#define ADD(T) template void add<T>(OPERANDS(T), unsigned long, long, long);
ADD(float)
ADD(half)
ADD(bf16)
ADD(long)
ADD(int)
