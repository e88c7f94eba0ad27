// SPDX-License-Identifier: Apache-2.0
// One element per work-item: the shape that is fast on a CPU device and coalesced on a GPU.
#include "prelude.h"

using ipex::bf16;
using ipex::global_id;
using ipex::half;
using ipex::load;
using ipex::store;

// Unary
// ---------------------------------------------------------------------------------------------------------------

struct relu {
  static float f(float x, float, float) { return x != x ? x : sycl::fmax(x, 0.f); }
};
struct sigmoid {
  static float f(float x, float, float) { return 1.f / (1.f + sycl::exp(-x)); }
};
struct tanh_ {
  static float f(float x, float, float) { return sycl::tanh(x); }
};
struct silu {
  static float f(float x, float, float) { return x / (1.f + sycl::exp(-x)); }
};
struct gelu {
  static float f(float x, float, float) {
    return 0.5f * x * (1.f + sycl::erf(x * 0.70710678118654752f));
  }
};
struct gelu_tanh {
  static float f(float x, float, float) {
    return 0.5f * x * (1.f + sycl::tanh(0.79788456080286536f * (x + 0.044715f * x * x * x)));
  }
};
struct exp_ {
  static float f(float x, float, float) { return sycl::exp(x); }
};
struct log_ {
  static float f(float x, float, float) { return sycl::log(x); }
};
struct sqrt_ {
  static float f(float x, float, float) { return sycl::sqrt(x); }
};
struct rsqrt_ {
  static float f(float x, float, float) { return 1.f / sycl::sqrt(x); }
};
struct neg {
  static float f(float x, float, float) { return -x; }
};
struct abs_ {
  static float f(float x, float, float) { return sycl::fabs(x); }
};
struct reciprocal {
  static float f(float x, float, float) { return 1.f / x; }
};
struct sin_ {
  static float f(float x, float, float) { return sycl::sin(x); }
};
struct cos_ {
  static float f(float x, float, float) { return sycl::cos(x); }
};
struct erf_ {
  static float f(float x, float, float) { return sycl::erf(x); }
};
struct affine {
  static float f(float x, float scale, float shift) { return x * scale + shift; }
};
struct add_scalar {
  static float f(float x, float value, float) { return x + value; }
};
struct mul_scalar {
  static float f(float x, float value, float) { return x * value; }
};
struct div_scalar {
  static float f(float x, float value, float) { return x / value; }
};
struct scalar_div {
  static float f(float x, float value, float) { return value / x; }
};
struct pow_scalar {
  static float f(float x, float exponent, float) { return sycl::pow(x, exponent); }
};
struct leaky_relu {
  static float f(float x, float slope, float) { return x > 0.f ? x : x * slope; }
};

template <typename Op, typename T>
IPEX_KERNEL(1)
void unary(const T* x, T* y, unsigned long n, float p, float q) {
  const unsigned long i = global_id();
  if (i < n) store(y, i, Op::f(load(x, i), p, q));
}

// Binary: `alpha` is the factor of torch.add and torch.sub.
// --------------------------------------------------------------

struct add {
  static float f(float a, float b, float alpha) { return a + alpha * b; }
};
struct sub {
  static float f(float a, float b, float alpha) { return a - alpha * b; }
};
struct mul {
  static float f(float a, float b, float) { return a * b; }
};
struct div_ {
  static float f(float a, float b, float) { return a / b; }
};
struct maximum {
  static float f(float a, float b, float) { return a != a ? a : b != b ? b : sycl::fmax(a, b); }
};
struct minimum {
  static float f(float a, float b, float) { return a != a ? a : b != b ? b : sycl::fmin(a, b); }
};
// Gradients of activations, of the gradient a and the input (or result) b.
struct threshold_backward {
  static float f(float a, float b, float threshold) { return b <= threshold ? 0.f : a; }
};
struct sigmoid_backward {
  static float f(float a, float b, float) { return a * b * (1.f - b); }
};
struct tanh_backward {
  static float f(float a, float b, float) { return a * (1.f - b * b); }
};
struct silu_backward {
  static float f(float a, float b, float) {
    const float s = 1.f / (1.f + sycl::exp(-b));
    return a * s * (1.f + b * (1.f - s));
  }
};
struct gelu_backward {
  static float f(float a, float b, float) {
    const float cdf = 0.5f * (1.f + sycl::erf(b * 0.70710678118654752f));
    return a * (cdf + b * 0.39894228040143268f * sycl::exp(-0.5f * b * b));
  }
};
struct gelu_tanh_backward {
  static float f(float a, float b, float) {
    const float inner = 0.79788456080286536f * (b + 0.044715f * b * b * b);
    const float t = sycl::tanh(inner);
    return a * (0.5f * (1.f + t) +
                0.5f * b * (1.f - t * t) * 0.79788456080286536f * (1.f + 0.134145f * b * b));
  }
};
struct silu_mul {
  static float f(float a, float b, float) { return a / (1.f + sycl::exp(-a)) * b; }
};
struct gelu_mul {
  static float f(float a, float b, float) { return gelu::f(a, 0, 0) * b; }
};

template <typename Op, typename T>
IPEX_KERNEL(1)
void binary(const T* a, const T* b, T* y, unsigned long n, float alpha) {
  const unsigned long i = global_id();
  if (i < n) store(y, i, Op::f(load(a, i), load(b, i), alpha));
}

// The second operand repeats: a row that is added to each row, or a number that belongs to each
// row.
template <typename Op, typename T>
IPEX_KERNEL(1)
void binary_row(const T* a, const T* b, T* y, unsigned long n, float alpha, unsigned int columns) {
  const unsigned long i = global_id();
  if (i < n) store(y, i, Op::f(load(a, i), load(b, i % columns), alpha));
}

// Any strides of up to four dimensions, the innermost first; sizes of 1 fill up.
template <typename Op, typename T>
IPEX_KERNEL(1)
void binary_strided(const T* a, const T* b, T* y, unsigned long n, float alpha, unsigned int s0,
                    unsigned int s1, unsigned int s2, int a0, int a1, int a2, int a3, int b0,
                    int b1, int b2, int b3, int y0, int y1, int y2, int y3) {
  const unsigned long index = global_id();
  if (index >= n) return;
  unsigned int i = static_cast<unsigned int>(index);
  const int i0 = static_cast<int>(i % s0);
  i /= s0;
  const int i1 = static_cast<int>(i % s1);
  i /= s1;
  const int i2 = static_cast<int>(i % s2);
  const int i3 = static_cast<int>(i / s2);
  const float left = load(a, i0 * a0 + i1 * a1 + i2 * a2 + i3 * a3);
  const float right = load(b, i0 * b0 + i1 * b1 + i2 * b2 + i3 * b3);
  store(y, i0 * y0 + i1 * y1 + i2 * y2 + i3 * y3, Op::f(left, right, alpha));
}

// Copies between dtypes and strides.
template <typename From, typename To>
IPEX_KERNEL(1)
void copy_strided(const From* x, To* y, unsigned long n, unsigned int s0, unsigned int s1,
                  unsigned int s2, int x0, int x1, int x2, int x3, int y0, int y1, int y2, int y3) {
  const unsigned long index = global_id();
  if (index >= n) return;
  unsigned int i = static_cast<unsigned int>(index);
  const int i0 = static_cast<int>(i % s0);
  i /= s0;
  const int i1 = static_cast<int>(i % s1);
  i /= s1;
  const int i2 = static_cast<int>(i % s2);
  const int i3 = static_cast<int>(i / s2);
  const From value = x[i0 * x0 + i1 * x1 + i2 * x2 + i3 * x3];
  To& target = y[i0 * y0 + i1 * y1 + i2 * y2 + i3 * y3];
  if constexpr (std::is_same_v<From, To>) {
    target = value;
  } else {
    target = To(static_cast<float>(value));
  }
}

template <typename T>
IPEX_KERNEL(1)
void fill(T* y, unsigned long n, float value) {
  const unsigned long i = global_id();
  if (i < n) store(y, i, value);
}

#define UNARY(op)                                                                    \
  template void unary<op, float>(const float*, float*, unsigned long, float, float); \
  template void unary<op, half>(const half*, half*, unsigned long, float, float);    \
  template void unary<op, bf16>(const bf16*, bf16*, unsigned long, float, float);
UNARY(relu)
UNARY(sigmoid)
UNARY(tanh_)
UNARY(silu)
UNARY(gelu)
UNARY(gelu_tanh)
UNARY(exp_)
UNARY(log_)
UNARY(sqrt_)
UNARY(rsqrt_)
UNARY(neg)
UNARY(abs_)
UNARY(reciprocal)
UNARY(sin_)
UNARY(cos_)
UNARY(erf_)
UNARY(affine)
UNARY(add_scalar)
UNARY(mul_scalar)
UNARY(div_scalar)
UNARY(scalar_div)
UNARY(pow_scalar)
UNARY(leaky_relu)

#define BINARY_OF(kind, op, extra)                                                               \
  template void kind<op, float>(const float*, const float*, float*, unsigned long, float extra); \
  template void kind<op, half>(const half*, const half*, half*, unsigned long, float extra);     \
  template void kind<op, bf16>(const bf16*, const bf16*, bf16*, unsigned long, float extra);
#define COMMA ,
#define STRIDES                                                                                    \
  COMMA unsigned int COMMA unsigned int COMMA unsigned int COMMA int COMMA int COMMA int COMMA int \
      COMMA int COMMA int COMMA int COMMA int COMMA int COMMA int COMMA int COMMA int
#define BROADCAST(op)                           \
  BINARY_OF(binary, op, )                       \
  BINARY_OF(binary_row, op, COMMA unsigned int) \
  BINARY_OF(binary_strided, op, STRIDES)
BROADCAST(add)
BROADCAST(sub)
BROADCAST(mul)
BROADCAST(div_)
BROADCAST(maximum)
BROADCAST(minimum)
BINARY_OF(binary, threshold_backward, )
BINARY_OF(binary, sigmoid_backward, )
BINARY_OF(binary, tanh_backward, )
BINARY_OF(binary, silu_backward, )
BINARY_OF(binary, gelu_backward, )
BINARY_OF(binary, gelu_tanh_backward, )
BINARY_OF(binary, silu_mul, )
BINARY_OF(binary, gelu_mul, )

#define COPY(from, to)                                                                           \
  template void copy_strided<from, to>(const from*, to*, unsigned long, unsigned int,            \
                                       unsigned int, unsigned int, int, int, int, int, int, int, \
                                       int, int);
COPY(float, half)
COPY(float, bf16)
COPY(half, float)
COPY(half, bf16)
COPY(bf16, float)
COPY(bf16, half)
// By the size of an element alone.
COPY(unsigned char, unsigned char)
COPY(unsigned short, unsigned short)
COPY(unsigned int, unsigned int)
COPY(unsigned long, unsigned long)

template void fill<float>(float*, unsigned long, float);
template void fill<half>(half*, unsigned long, float);
template void fill<bf16>(bf16*, unsigned long, float);
