// SPDX-License-Identifier: Apache-2.0
// Elementary functions on f32v.
//
// The `_fast` functions are for results that are stored as bf16 or fp16: relative error below 2^-10
// (mostly below 2^-13). The others are for fp32: about 2 units in the last place. All of them give
// NaN for NaN and the limits for +-infinity. `fn<kFast>(x)` picks one of the two.
//
// Coefficients are minimax fits of our own (Lawson iteration in double precision); the error stated
// next to each is the error of the polynomial alone.
#pragma once

#include "ipex/kernel/vec.h"

namespace ipex {
namespace {

inline constexpr float kLog2E = 1.44269504f;

// c[0] + c[1] x + ... by Horner's rule.
template <int N>
IPEX_INLINE f32v polynomial(f32v x, const float (&c)[N]) {
  f32v r = set1(c[N - 1]);
#pragma GCC unroll 16
  for (int i = N - 2; i >= 0; --i) r = fma(r, x, set1(c[i]));
  return r;
}

// p * 2^n for p from 0.7 to 2 and integral n from -126, which gives 0, to 129, which gives
// infinity. No result is a denormal: they would cost some hundred cycles a vector on Intel's cores,
// and masked scores, of which there are many, would become some.
IPEX_INLINE f32v scale_by_pow2(f32v p, f32v n) {
#if IPEX_HAVE_AVX512
  // Of any n; its floor counts. Nothing is computed in lanes that the mask leaves out; NaN stays.
  const __mmask16 normal = _mm512_cmp_ps_mask(n, set1(-125.0f), _CMP_NLT_UQ);
  return _mm512_maskz_scalef_ps(normal, p, n);
#else
  // Twice the number and half the factor, whose exponent field is 0 (the number 0) and 255
  // (infinity) at the ends.
  return (p + p) * as_float((to_int(n) + iset1(126)) << 23);
#endif
}

// 2^x, relative error 2.6e-6.
IPEX_INLINE f32v exp2_fast(f32v x) {
#if IPEX_HAVE_AVX512
  // scalef takes the floor of its exponent, and reduce the matching fraction, 0 for +-infinity: no
  // clamping and no conversion is needed.
  constexpr float kPoly[] = {1.000002623e+00f, 6.930038333e-01f, 2.414427549e-01f, 5.201146007e-02f,
                             1.353416778e-02f};
  const f32v fraction = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  return scale_by_pow2(polynomial(fraction, kPoly), x);
#else
  constexpr float kPoly[] = {9.999992847e-01f, 6.931217909e-01f, 2.402474433e-01f, 5.591785908e-02f,
                             9.570102207e-03f};
  x = max(set1(-126.0f), min(set1(129.0f), x));
  const f32v n = round(x);
  return scale_by_pow2(polynomial(x - n, kPoly), n);
#endif
}

// 2^x for x <= 0 to about 1 ulp.
IPEX_INLINE f32v exp2_nonpositive(f32v x) {
  constexpr float kPoly[] = {1.0f,
                             6.931471825e-01f,
                             2.402264774e-01f,
                             5.550332367e-02f,
                             9.618436918e-03f,
                             1.339887385e-03f,
                             1.535336196e-04f};  // 2.0e-9
  x = max(set1(-126.0f), x);
  const f32v n = round(x);
  return scale_by_pow2(polynomial(x - n, kPoly), n);
}

IPEX_INLINE f32v exp_fast(f32v x) { return exp2_fast(x * set1(kLog2E)); }

IPEX_INLINE f32v exp(f32v x) {
  constexpr float kPoly[] = {4.999999404e-01f, 1.666652113e-01f, 4.166838899e-02f, 8.368745446e-03f,
                             1.381453942e-03f};
  x = max(set1(-87.4f), min(set1(89.0f), x));
  const f32v n = round(x * set1(kLog2E));
  // ln 2 in two parts; the first has 9 bits, so that n times it is exact also without FMA.
  f32v r = fnma(n, set1(0.693359375f), x);
  r = fnma(n, set1(-2.12194440e-4f), r);
  const f32v p = fma(polynomial(r, kPoly), r * r, r) + set1(1.0f);
  return scale_by_pow2(p, n);
}

// e^x for x <= 0, the case of a softmax: fewer steps than exp(), which costs precision (up to 4
// units in the last place) only where the result is below 1e-8.
IPEX_INLINE f32v exp_nonpositive(f32v x) {
#if IPEX_HAVE_AVX2
  constexpr float kPoly[] = {1.0f,
                             1.0f,
                             4.999999404e-01f,
                             1.666652113e-01f,
                             4.166838899e-02f,
                             8.368745446e-03f,
                             1.381453942e-03f};
  x = max(set1(-87.4f), x);
  const f32v n = round(x * set1(kLog2E));
  // One rounding only, thanks to FMA; the error of the constant is 2e-9.
  const f32v r = fnma(n, set1(0.693147182f), x);
  return scale_by_pow2(polynomial(r, kPoly), n);
#else
  return exp(x);
#endif
}

// 1 / (1 + 2^-t): the logistic function of t / log2(e). Exactly 0 for t = -infinity.
IPEX_INLINE f32v sigmoid2_fast(f32v t) { return rcp_fast(set1(1.0f) + exp2_fast(-t)); }

IPEX_INLINE f32v sigmoid_fast(f32v x) {
  return rcp_fast(set1(1.0f) + exp2_fast(x * set1(-kLog2E)));
}
// 0 below -88.7, where exp(-x) overflows and the result would be a denormal.
IPEX_INLINE f32v sigmoid(f32v x) { return set1(1.0f) / (set1(1.0f) + exp(-x)); }

IPEX_INLINE f32v tanh_fast(f32v x) {
  constexpr float kPoly[] = {9.999204278e-01f, -3.296180069e-01f, 1.066036150e-01f};  // 7.9e-5
  const f32v a = abs(x);
  const f32v small = x * polynomial(x * x, kPoly);
  const f32v e = exp2_fast(a * set1(2.0f * kLog2E));
  const f32v large = fnma(set1(2.0f), rcp_fast(e + set1(1.0f)), set1(1.0f));
  return select(lt(a, set1(0.625f)), small, copysign(large, x));
}
IPEX_INLINE f32v tanh(f32v x) {
  constexpr float kPoly[] = {-3.333328068e-01f, 1.333144158e-01f, -5.373971537e-02f,
                             2.063908800e-02f, -5.704987328e-03f};  // 4.4e-9
  const f32v a = abs(x);
  const f32v u = x * x;
  const f32v small = fma(x * u, polynomial(u, kPoly), x);
  const f32v large = set1(1.0f) - set1(2.0f) / (exp(a + a) + set1(1.0f));
  return copysign(select(lt(a, set1(0.625f)), small, large), x);  // also tanh(-0) = -0
}

IPEX_INLINE f32v erf_fast(f32v x) {
  constexpr float kPoly[] = {1.128078222e+00f,  -3.726828098e-01f, 1.057890952e-01f,
                             -2.102958038e-02f, 2.691384405e-03f,  -1.955119951e-04f,
                             6.052172921e-06f};  // 2.7e-4
  x = max(set1(-2.8f), min(set1(2.8f), x));
  return x * polynomial(x * x, kPoly);
}
IPEX_INLINE f32v erf(f32v x) {
  // x + x Q(x^2) below 0.9 (1.2e-8), 1 - exp(-g(x)) above (2.8e-8).
  constexpr float kSmall[] = {1.283791512e-01f,  -3.761252165e-01f, 1.128213927e-01f,
                              -2.677885629e-02f, 5.011898465e-03f,  -6.090074312e-04f};
  constexpr float kLarge[] = {1.815948635e-03f, 1.120420575e+00f,  6.504215598e-01f,
                              9.134495258e-02f, -1.565998979e-02f, 1.262352453e-03f};
  const f32v a = min(set1(4.0f), abs(x));
  const f32v small = fma(x, polynomial(x * x, kSmall), x);
  const f32v large = set1(1.0f) - exp(-polynomial(a, kLarge));
  return select(lt(a, set1(0.9f)), small, copysign(large, x));
}

// Standard normal distribution function Phi(x) = (1 + erf(x / sqrt(2))) / 2, the weight of GELU.
// log2 Phi(-a) is nearly a parabola: a polynomial in a = |x| and one exp2 give Phi with a small
// *relative* error on the negative side too, where 1 + erf cancels. Both polynomials have a
// negative leading coefficient and fall to -infinity, so no clamp is needed.
IPEX_INLINE f32v normal_cdf_fast(f32v x) {
  constexpr float kPoly[] = {-1.000202417e+00f, -1.148108840e+00f, -4.662921727e-01f,
                             -4.672383890e-02f, 5.403923336e-03f,  -2.796045155e-04f};  // 1.4e-4
  const f32v q = exp2_fast(polynomial(abs(x), kPoly));
  return select(lt(x, zero()), q, set1(1.0f) - q);
}
IPEX_INLINE f32v normal_cdf(f32v x) {
  constexpr float kPoly[] = {-9.999999404e-01f, -1.151105881e+00f, -4.592090249e-01f,
                             -5.247105286e-02f, 6.980645005e-03f,  -1.769899063e-05f,
                             -2.767479164e-04f, 7.750641817e-05f,  -1.152211735e-05f,
                             9.506127299e-07f,  -3.420136707e-08f};  // 2.3e-8
  const f32v q = exp2_nonpositive(polynomial(abs(x), kPoly));
  return select(lt(x, zero()), q, set1(1.0f) - q);
}

// The tanh form of GELU is x * sigmoid(2 s), s = sqrt(2 / pi) (x + 0.044715 x^3).
inline constexpr float kGeluTanh = 1.595769122f;  // 2 sqrt(2 / pi)
inline constexpr float kGeluTanhCubic = 1.595769122f * 0.044715f;

// e^x for x <= 0.
template <bool kFast>
IPEX_INLINE f32v exp_nonpositive_as(f32v x) {
  if constexpr (kFast) return exp_fast(x);
  return exp_nonpositive(x);
}

template <bool kFast>
IPEX_INLINE f32v silu(f32v x) {
  if constexpr (kFast) return x * sigmoid_fast(x);
  return x / (set1(1.0f) + exp(-x));
}

template <bool kFast>
IPEX_INLINE f32v gelu(f32v x) {
  if constexpr (kFast) return x * normal_cdf_fast(x);
  return x * normal_cdf(x);
}

template <bool kFast>
IPEX_INLINE f32v gelu_tanh(f32v x) {
  const f32v u = x * x;
  if constexpr (kFast) {
    const f32v t = x * fma(u, set1(kGeluTanhCubic * kLog2E), set1(kGeluTanh * kLog2E));
    return x * sigmoid2_fast(t);
  }
  return x / (set1(1.0f) + exp(-x * fma(u, set1(kGeluTanhCubic), set1(kGeluTanh))));
}

}  // namespace
}  // namespace ipex
