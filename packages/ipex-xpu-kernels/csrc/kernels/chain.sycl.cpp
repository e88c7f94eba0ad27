// SPDX-License-Identifier: Apache-2.0
// Up to four element-wise ops in one pass, which a program names: what follows a layer. Numbers
// between them are float.
#include "names.h"

// In the order of the ops in chain_ops.cpp. Binary ones come last.
enum Code : unsigned int {
  kNothing,
  kRelu,
  kSigmoid,
  kTanh,
  kSilu,
  kGelu,
  kGeluTanh,
  kExp,
  kLog,
  kSqrt,
  kAbs,
  kSquare,
  kReciprocal,
  kLeakyRelu,
  kClamp,
  kElu,
  kHardsigmoid,
  kHardswish,
  kMish,
  kRound,
  kPow,
  kAffine,
  kAdd,
  kAddTo,
  kMul,
  kDiv,
};

IPEX_INLINE inline float sigmoid(float x) { return 1.f / (1.f + sycl::exp(-x)); }
// Of both bounds as torch does it: the upper one wins, and NaN stays.
IPEX_INLINE inline float clamp(float x, float low, float high) {
  const float above = x < low ? low : x;
  return above > high ? high : above;
}

IPEX_INLINE inline float apply(unsigned int code, float x, float other, float p, float q) {
  switch (code) {
    case kRelu:
      return x != x ? x : sycl::fmax(x, 0.f);
    case kSigmoid:
      return sigmoid(x);
    case kTanh:
      return sycl::tanh(x);
    case kSilu:
      return x / (1.f + sycl::exp(-x));
    case kGelu:
      return 0.5f * x * (1.f + sycl::erf(x * 0.70710678118654752f));
    case kGeluTanh:
      return 0.5f * x * (1.f + sycl::tanh(0.79788456080286536f * (x + 0.044715f * x * x * x)));
    case kExp:
      return sycl::exp(x);
    case kLog:
      return sycl::log(x);
    case kSqrt:
      return sycl::sqrt(x);
    case kAbs:
      return sycl::fabs(x);
    case kSquare:
      return x * x;
    case kReciprocal:
      return 1.f / x;
    case kLeakyRelu:
      return x > 0.f ? x : x * p;
    case kClamp:
      return clamp(x, p, q);
    case kElu:
      return x > 0.f ? x : p * sycl::expm1(x);
    case kHardsigmoid:
      return clamp(x + 3.f, 0.f, 6.f) / 6.f;
    case kHardswish:
      return x * clamp(x + 3.f, 0.f, 6.f) / 6.f;
    case kMish:
      return x * sycl::tanh(sycl::log1p(sycl::exp(x)));
    case kRound:
      return sycl::rint(x);
    case kPow:
      return sycl::pow(x, p);
    case kAffine:
      return x * p + q;
    case kAdd:
      return x + p * other;
    case kAddTo:
      return other + p * x;
    case kMul:
      return x * other;
    case kDiv:
      return x / other;
    default:
      return x;
  }
}

// A byte of `steps` for each step: 6 bits of its code and the number of its operand.
#define IPEX_STEPS \
  unsigned int steps, float p0, float q0, float p1, float q1, float p2, float q2, float p3, float q3
#define IPEX_STEPS_GIVEN steps, p0, q0, p1, q1, p2, q2, p3, q3

IPEX_INLINE inline float chained(float x, float a, float b, float c, IPEX_STEPS) {
  const auto step = [&](int place, float value, float p, float q) IPEX_INLINE {
    const unsigned int byte = steps >> (8 * place) & 255;
    const unsigned int operand = byte >> 6;
    return apply(byte & 63, value, operand == 0 ? a : operand == 1 ? b : c, p, q);
  };
  return step(3, step(2, step(1, step(0, x, p0, q0), p1, q1), p2, q2), p3, q3);
}

// Passes with so many operands beside the first one, of any steps. The interpreter of steps costs a
// CPU as much as another op, so that frequent passes have kernels for their steps alone
// (chain_ops.cpp has the same names).
template <int Operands, unsigned int Steps>
struct Pass {
  static constexpr int operands = Operands;
  static constexpr unsigned int steps = Steps;
};
struct none : Pass<0, 0> {};
struct one : Pass<1, 0> {};
struct two : Pass<2, 0> {};
struct three : Pass<3, 0> {};
struct any : Pass<3, 0> {};
struct add_relu : Pass<1, kAdd | kRelu << 8> {};
struct add_add_relu : Pass<2, kAdd | (kAdd | 1 << 6) << 8 | kRelu << 16> {};
struct add_silu : Pass<1, kAdd | kSilu << 8> {};
struct add_sigmoid : Pass<1, kAdd | kSigmoid << 8> {};
struct add_gelu : Pass<1, kAdd | kGelu << 8> {};
struct add_clamp : Pass<1, kAdd | kClamp << 8> {};
struct add_hardswish : Pass<1, kAdd | kHardswish << 8> {};
struct relu_add : Pass<1, kRelu | kAdd << 8> {};
struct gelu_add : Pass<1, kGelu | kAdd << 8> {};
struct clamp_ : Pass<0, kClamp> {};
struct hardswish : Pass<0, kHardswish> {};

// Of a pass with its own steps those, which the compiler then knows.
template <typename P>
IPEX_INLINE inline float passed(float x, float a, float b, float c, IPEX_STEPS) {
  if constexpr (P::steps != 0) return chained(x, a, b, c, P::steps, p0, q0, p1, q1, p2, q2, p3, q3);
  return chained(x, a, b, c, IPEX_STEPS_GIVEN);
}

template <typename P, typename T>
IPEX_KERNEL(1)
void chain(T* y, const T* x, const T* a, const T* b, const T* c, unsigned long n, IPEX_STEPS) {
  const auto f = [=](float v, float s, float t, float u)
                     IPEX_INLINE { return passed<P>(v, s, t, u, IPEX_STEPS_GIVEN); };
  if constexpr (P::operands == 0) {
    map_elements(y, n, [=](float v) IPEX_INLINE { return f(v, 0.f, 0.f, 0.f); }, x);
  } else if constexpr (P::operands == 1) {
    map_elements(y, n, [=](float v, float s) IPEX_INLINE { return f(v, s, 0.f, 0.f); }, x, a);
  } else if constexpr (P::operands == 2) {
    map_elements(
        y, n, [=](float v, float s, float t) IPEX_INLINE { return f(v, s, t, 0.f); }, x, a, b);
  } else {
    map_elements(y, n, f, x, a, b, c);
  }
}

// Any strides; operands that there are not are `x` again. Strides of layers, whose bias is the
// first operand, are told to the compiler.
template <typename P, typename T>
IPEX_KERNEL(2)
void chain_strided(T* y, const T* x, const T* a, const T* b, const T* c, IPEX_SIZES,
                   IPEX_STRIDES(y), IPEX_STRIDES(x), IPEX_STRIDES(a), IPEX_STRIDES(b),
                   IPEX_STRIDES(c), IPEX_STEPS) {
  const Place place(rows, columns, size1, size2);
  if (!place.inside) return;
  y += place.row(y1, y2, y3);
  x += place.row(x1, x2, x3);
  a += place.row(a1, a2, a3);
  b += place.row(b1, b2, b3);
  c += place.row(c1, c2, c3);
  const long i = static_cast<long>(place.column);
  const auto put = [&](long to, long from, long at, long bt, long ct) IPEX_INLINE {
    const float s = P::operands > 0 ? load(a, at) : 0.f;
    const float t = P::operands > 1 ? load(b, bt) : 0.f;
    const float u = P::operands > 2 ? load(c, ct) : 0.f;
    store(y, to, passed<P>(load(x, from), s, t, u, IPEX_STEPS_GIVEN));
  };
  const bool plain = y0 == 1 && x0 == 1 && b0 == 1 && c0 == 1;
  if (plain && a0 == 1) {
    put(i, i, i, i, i);
  } else if (plain && a0 == 0) {
    put(i, i, 0, i, i);
  } else {
    put(i * y0, i * x0, i * a0, i * b0, i * c0);
  }
}

#define IPEX_STEP_TYPES unsigned int, IPEX_FOUR(float), IPEX_FOUR(float)
#define CHAIN(pass, T)                                                                    \
  template void chain<pass, T>(T*, const T*, const T*, const T*, const T*, unsigned long, \
                               IPEX_STEP_TYPES);
#define CHAIN_STRIDED(pass, T)                                                             \
  template void chain_strided<pass, T>(                                                    \
      T*, const T*, const T*, const T*, const T*, IPEX_FOUR(unsigned int), IPEX_FOUR(int), \
      IPEX_FOUR(int), IPEX_FOUR(int), IPEX_FOUR(int), IPEX_FOUR(int), IPEX_STEP_TYPES);
IPEX_FLOATS(CHAIN, none)
IPEX_FLOATS(CHAIN, one)
IPEX_FLOATS(CHAIN, two)
IPEX_FLOATS(CHAIN, three)
IPEX_FLOATS(CHAIN, add_relu)
IPEX_FLOATS(CHAIN, relu_add)
IPEX_FLOATS(CHAIN, gelu_add)
IPEX_FLOATS(CHAIN, clamp_)
IPEX_FLOATS(CHAIN, hardswish)
IPEX_FLOATS(CHAIN_STRIDED, any)
IPEX_FLOATS(CHAIN_STRIDED, add_relu)
IPEX_FLOATS(CHAIN_STRIDED, add_add_relu)
IPEX_FLOATS(CHAIN_STRIDED, add_silu)
IPEX_FLOATS(CHAIN_STRIDED, add_sigmoid)
IPEX_FLOATS(CHAIN_STRIDED, add_gelu)
IPEX_FLOATS(CHAIN_STRIDED, add_clamp)
IPEX_FLOATS(CHAIN_STRIDED, add_hardswish)
