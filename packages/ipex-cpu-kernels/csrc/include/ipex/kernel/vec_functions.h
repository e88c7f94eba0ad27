// SPDX-License-Identifier: Apache-2.0
// Elementary functions on f32v beyond vec_math.h, for float32 results: about 2 units in the last
// place. Coefficients are minimax fits of our own, as there.
#pragma once

#include <cmath>

#include "ipex/kernel/vec_math.h"

namespace ipex {
namespace {

// 1 in the lanes of a comparison that hold, else 0.
IPEX_INLINE f32v one_where(i32v condition) { return as_float(condition & as_int(set1(1.0f))); }

// NaN if either operand is NaN.
IPEX_INLINE f32v maximum(f32v a, f32v b) { return select(is_nan(a), a, max(a, b)); }
IPEX_INLINE f32v minimum(f32v a, f32v b) { return select(is_nan(a), a, min(a, b)); }

// Rounding to integers, of any number. All keep the sign of zero.
#if IPEX_HAVE_AVX512
IPEX_INLINE f32v floor(f32v a) { return _mm512_roundscale_ps(a, 9); }
IPEX_INLINE f32v ceil(f32v a) { return _mm512_roundscale_ps(a, 10); }
IPEX_INLINE f32v trunc(f32v a) { return _mm512_roundscale_ps(a, 11); }
IPEX_INLINE f32v round_any(f32v a) { return round(a); }
#elif IPEX_HAVE_AVX2
IPEX_INLINE f32v floor(f32v a) { return _mm256_round_ps(a, 9); }
IPEX_INLINE f32v ceil(f32v a) { return _mm256_round_ps(a, 10); }
IPEX_INLINE f32v trunc(f32v a) { return _mm256_round_ps(a, 11); }
IPEX_INLINE f32v round_any(f32v a) { return round(a); }
#else
// From 2^23 on, every number is an integer. Infinity and NaN are not below it either.
IPEX_INLINE f32v round_any(f32v a) {
  return select(lt(abs(a), set1(8388608.0f)), copysign(round(a), a), a);
}
IPEX_INLINE f32v floor(f32v a) {
  const f32v r = round_any(a);
  return select(lt(a, r), copysign(r - set1(1.0f), a), r);
}
IPEX_INLINE f32v ceil(f32v a) {
  const f32v r = round_any(a);
  return select(lt(r, a), copysign(r + set1(1.0f), a), r);
}
IPEX_INLINE f32v trunc(f32v a) { return copysign(floor(abs(a)), a); }
#endif

// log(1 + f) for 1 + f from sqrt(1/2) to sqrt(2), plus n log 2.
IPEX_INLINE f32v log_parts(f32v f, f32v n) {
  constexpr float kPoly[] = {3.333331347e-01f,  -2.500000894e-01f, 2.000211924e-01f,
                             -1.666799635e-01f, 1.421955228e-01f,  -1.240558848e-01f,
                             1.188816503e-01f,  -1.167565733e-01f, 6.746641546e-02f};  // 7.5e-10
  const f32v u = f * f;
  f32v r = f * u * polynomial(f, kPoly);
  r = fma(n, set1(-2.12194440e-4f), r);
  r = fnma(set1(0.5f), u, r);
  return fma(n, set1(0.693359375f), f + r);  // log 2 in two parts, as in exp()
}

IPEX_INLINE f32v log(f32v x) {
  // Denormals are made normal first.
  const f32v tiny = set1(1.17549435e-38f);
  const f32v normal = select(lt(x, tiny), x * set1(8388608.0f), x);
  const i32v bits = as_int(normal);
  // The exponent that leaves a fraction from sqrt(1/2) on.
  const i32v n = (bits - iset1(0x3f3504f3)) >> 23;
  const f32v fraction = as_float(bits - (n << 23));
  const f32v exponent = to_float(n) - select(lt(x, tiny), set1(23.0f), zero());
  f32v r = log_parts(fraction - set1(1.0f), exponent);
  r = select(lt(x, set1(__builtin_inff())), r, x);  // infinity and NaN
  const f32v below = select(lt(x, zero()), set1(__builtin_nanf("")), r);
  return x == zero() ? set1(-__builtin_inff()) : below;
}

IPEX_INLINE f32v log1p(f32v x) {
  // The rounding error of 1 + x is made good by the quotient of x and what was added.
  const f32v u = set1(1.0f) + x;
  const f32v d = u - set1(1.0f);
  const f32v r = log(u) * (x / d);
  // Where nothing was added, x is the result, and of infinity and NaN too.
  return (d == zero()) | ~(x < set1(__builtin_inff())) ? x : r;
}

IPEX_INLINE f32v expm1(f32v x) {
  constexpr float kPoly[] = {4.999999404e-01f, 1.666652113e-01f, 4.166838899e-02f, 8.368745446e-03f,
                             1.381453942e-03f};  // as in exp()
  const f32v limited = max(set1(-87.0f), min(set1(60.0f), x));
  const f32v n = round(limited * set1(kLog2E));
  f32v r = fnma(n, set1(0.693359375f), limited);
  r = fnma(n, set1(-2.12194440e-4f), r);
  const f32v p = fma(polynomial(r, kPoly), r * r, r);
  const f32v s = as_float((to_int(n) + iset1(127)) << 23);
  const f32v near = fma(s, p, s - set1(1.0f));
  return select(lt(set1(60.0f), x), exp(x), x == zero() ? x : near);
}

// x - n pi/2 for the nearest integer n; |x| below kTrigonometricLimit.
inline constexpr float kTrigonometricLimit = 4096.0f;

struct Angle {
  f32v rest;
  i32v quarter;
};

IPEX_INLINE Angle reduce_angle(f32v x) {
  const f32v n = round(x * set1(0.636619772f));
  // pi/2 in parts of 11 bits, so that their products with n are exact also without FMA.
  f32v r = fnma(n, set1(1.5703125f), x);
  r = fnma(n, set1(4.837512969970703e-04f), r);
  r = fnma(n, set1(7.549533620476723e-08f), r);
  r = fnma(n, set1(2.563344068e-12f), r);
  return {r, to_int(n)};
}

// The sine of an angle that is `quarter` quarters of a turn further.
IPEX_INLINE f32v sine(f32v r, i32v quarter) {
  constexpr float kSine[] = {-1.666666716e-01f, 8.333329111e-03f, -1.983933034e-04f,
                             2.718274345e-06f};  // 4.9e-12
  constexpr float kCosine[] = {4.166666791e-02f, -1.388888340e-03f, 2.479951581e-05f,
                               -2.720989301e-07f};  // 1.0e-13
  const f32v u = r * r;
  const f32v s = fma(r * u, polynomial(u, kSine), r);
  const f32v c = fma(u * u, polynomial(u, kCosine), fnma(set1(0.5f), u, set1(1.0f)));
  const f32v v = (quarter & iset1(1)) == iset1(0) ? s : c;
  return as_float(as_int(v) ^ ((quarter & iset1(2)) << 30));
}

// The C library's function where an angle is too large for this reduction.
template <float (*kFunction)(float)>
__attribute__((noinline)) void for_large_angles(const f32v& x, f32v& y) {
  for (int i = 0; i < static_cast<int>(kLanes); ++i)
    if (!(std::fabs(x[i]) < kTrigonometricLimit)) y[i] = kFunction(x[i]);
}

IPEX_INLINE bool all_small(f32v x) {
  const f32v a = abs(x);  // NaN is not small
  return !(any(lt(set1(kTrigonometricLimit), a)) || any(is_nan(a)));
}

inline float sine_of(float x) { return __builtin_sinf(x); }
inline float cosine_of(float x) { return __builtin_cosf(x); }

IPEX_INLINE f32v sin(f32v x) {
  const Angle angle = reduce_angle(x);
  f32v y = x == zero() ? x : sine(angle.rest, angle.quarter);
  if (!all_small(x)) for_large_angles<sine_of>(x, y);
  return y;
}

IPEX_INLINE f32v cos(f32v x) {
  const Angle angle = reduce_angle(x);
  f32v y = sine(angle.rest, angle.quarter + iset1(1));
  if (!all_small(x)) for_large_angles<cosine_of>(x, y);
  return y;
}

}  // namespace
}  // namespace ipex
