// SPDX-License-Identifier: Apache-2.0
// Comparisons of two tensors, and of a tensor and a number.
#include "names.h"

struct eq {
  template <typename C>
  static bool f(C a, C b) {
    return a == b;
  }
};
struct ne {
  template <typename C>
  static bool f(C a, C b) {
    return a != b;
  }
};
struct lt {
  template <typename C>
  static bool f(C a, C b) {
    return a < b;
  }
};
struct le {
  template <typename C>
  static bool f(C a, C b) {
    return a <= b;
  }
};
struct gt {
  template <typename C>
  static bool f(C a, C b) {
    return a > b;
  }
};
struct ge {
  template <typename C>
  static bool f(C a, C b) {
    return a >= b;
  }
};
template <typename Op, typename T>
IPEX_KERNEL(2)
void compare(unsigned char* y, const T* a, const T* b, IPEX_SIZES, IPEX_STRIDES(y), IPEX_STRIDES(a),
             IPEX_STRIDES(b)) {
  const Place p(rows, columns, size1, size2);
  if (!p.inside) return;
  y += p.row(y1, y2, y3);
  a += p.row(a1, a2, a3);
  b += p.row(b1, b2, b3);
  p.step(y0 == 1 && a0 == 1 && b0 == 1,
         [&](auto at) { y[at(y0)] = Op::f(load(a, at(a0)), load(b, at(b0))); });
}
template <typename Op, typename T>
IPEX_KERNEL(2)
void compare_number(unsigned char* y, const T* x, IPEX_SIZES, IPEX_STRIDES(y), IPEX_STRIDES(x),
                    compute<T> number) {
  const Place p(rows, columns, size1, size2);
  if (!p.inside) return;
  y += p.row(y1, y2, y3);
  x += p.row(x1, x2, x3);
  p.step(y0 == 1 && x0 == 1, [&](auto at) { y[at(y0)] = Op::f(load(x, at(x0)), number); });
}

#define COMPARE_OF(op, T)                                                                   \
  template void compare<op, T>(unsigned char*, const T*, const T*, IPEX_FOUR(unsigned int), \
                               IPEX_FOUR(int), IPEX_FOUR(int), IPEX_FOUR(int));             \
  template void compare_number<op, T>(unsigned char*, const T*, IPEX_FOUR(unsigned int),    \
                                      IPEX_FOUR(int), IPEX_FOUR(int), compute<T>);
#define COMPARE(op) \
  IPEX_FLOATS(COMPARE_OF, op) IPEX_WHOLE(COMPARE_OF, op) COMPARE_OF(op, unsigned char)
COMPARE(eq)
COMPARE(ne)
COMPARE(lt)
COMPARE(le)
COMPARE(gt)
COMPARE(ge)
