// SPDX-License-Identifier: Apache-2.0
// The functions that the recurrences of state space models are made of.
#pragma once

#include "ipex/kernel/vec_math.h"

namespace ipex {
namespace {

// 2^x, relative error 1.1e-7, and far less near x = 0: a state is multiplied by it again and again,
// so that an error in a factor close to 1 adds up over as many steps as the state lasts. Hence
// neither the polynomials for 16-bit results nor a fraction in [0, 1) will do.
IPEX_INLINE f32v decay2(f32v x) {
  constexpr float kPoly[] = {1.000000000e+00f, 6.931470037e-01f, 2.402224243e-01f,
                             5.550733581e-02f, 9.671512991e-03f, 1.326472731e-03f};
#if IPEX_HAVE_AVX512
  // The fraction of an infinity is 0, so no clamping is needed.
  const f32v fraction = _mm512_reduce_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  return scale_by_pow2(polynomial(fraction, kPoly), x - fraction);
#else
  x = max(set1(-126.0f), min(set1(129.0f), x));
  const f32v n = round(x);
  return scale_by_pow2(polynomial(x - n, kPoly), n);
#endif
}

// log(1 + e^x) = max(x, 0) + log(1 + e^-|x|), to about 2 units in the last place.
IPEX_INLINE f32v softplus(f32v x) {
  constexpr float kPoly[] = {1.000000000e+00f,  -4.999964833e-01f, 3.332132399e-01f,
                             -2.485716343e-01f, 1.915365309e-01f,  -1.375379860e-01f,
                             7.920449227e-02f,  -3.006576374e-02f, 5.364816636e-03f};  // 4.6e-8
  const f32v t = exp(-abs(x));
  return fma(t, polynomial(t, kPoly), max(zero(), x));
}

}  // namespace
}  // namespace ipex
