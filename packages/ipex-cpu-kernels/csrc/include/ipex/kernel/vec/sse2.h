// SPDX-License-Identifier: Apache-2.0
// x86-64 baseline (SSE2) backend of vec.h; include vec.h instead. No FMA: fma() rounds twice.
#pragma once

#include <emmintrin.h>

#include <cstdint>

namespace ipex {
namespace {

inline constexpr int64_t kLanes = 4;
typedef float f32v __attribute__((vector_size(16)));
typedef int32_t i32v __attribute__((vector_size(16)));
struct f32v2 {
  f32v a, b;
};
using u16v = __m128i;  // kLanes 16-bit patterns in the low half
using Mask = i32v;     // all bits of a lane set, or none

IPEX_INLINE f32v set1(float a) { return _mm_set1_ps(a); }
IPEX_INLINE i32v iset1(int32_t a) { return reinterpret_cast<i32v>(_mm_set1_epi32(a)); }
IPEX_INLINE i32v as_int(f32v a) { return reinterpret_cast<i32v>(a); }
IPEX_INLINE f32v as_float(i32v a) { return reinterpret_cast<f32v>(a); }
IPEX_INLINE __m128i raw(i32v a) { return reinterpret_cast<__m128i>(a); }
IPEX_INLINE i32v ints(__m128i a) { return reinterpret_cast<i32v>(a); }

IPEX_INLINE f32v fma(f32v a, f32v b, f32v c) { return a * b + c; }
IPEX_INLINE f32v fnma(f32v a, f32v b, f32v c) { return c - a * b; }
IPEX_INLINE f32v max(f32v a, f32v b) { return _mm_max_ps(a, b); }
IPEX_INLINE f32v min(f32v a, f32v b) { return _mm_min_ps(a, b); }
IPEX_INLINE f32v sqrt(f32v a) { return _mm_sqrt_ps(a); }
// Nearest even, for |a| < 2^31 and the rounding mode that C++ assumes; NaN gives a large number.
IPEX_INLINE f32v round(f32v a) { return _mm_cvtepi32_ps(_mm_cvtps_epi32(a)); }
IPEX_INLINE i32v to_int(f32v a) { return ints(_mm_cvtps_epi32(a)); }
IPEX_INLINE f32v clear_bits(f32v a, int32_t bits) { return as_float(as_int(a) & ~iset1(bits)); }
IPEX_INLINE f32v copysign(f32v magnitude, f32v sign) {
  const i32v s = iset1(INT32_MIN);
  return as_float((as_int(sign) & s) | (as_int(magnitude) & ~s));
}

IPEX_INLINE Mask lt(f32v a, f32v b) { return as_int(_mm_cmplt_ps(a, b)); }
IPEX_INLINE Mask is_nan(f32v a) { return as_int(_mm_cmpunord_ps(a, a)); }
IPEX_INLINE i32v select(Mask m, i32v a, i32v b) { return (a & m) | (b & ~m); }
IPEX_INLINE f32v select(Mask m, f32v a, f32v b) {
  return as_float(select(m, as_int(a), as_int(b)));
}
IPEX_INLINE Mask first_n(int64_t n) {
  const i32v lane = {0, 1, 2, 3};
  return lane < iset1(static_cast<int32_t>(n));
}
IPEX_INLINE bool any(Mask m) { return _mm_movemask_ps(as_float(m)) != 0; }

IPEX_INLINE f32v rcp_fast(f32v a) { return set1(1.0f) / a; }  // 1 / inf = 0

IPEX_INLINE f32v loadu(const float* p) { return _mm_loadu_ps(p); }
IPEX_INLINE void storeu(float* p, f32v a) { _mm_storeu_ps(p, a); }
IPEX_INLINE f32v loadu_n(const float* p, int64_t n) {
  alignas(16) float lanes[4] = {};
  for (int64_t i = 0; i < n; ++i) lanes[i] = p[i];
  return loadu(lanes);
}
IPEX_INLINE void storeu_n(float* p, f32v a, int64_t n) {
  alignas(16) float lanes[4];
  storeu(lanes, a);
  for (int64_t i = 0; i < n; ++i) p[i] = lanes[i];
}
IPEX_INLINE u16v load_u16(const uint16_t* p) {
  return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
}
IPEX_INLINE void store_u16(uint16_t* p, u16v a) {
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), a);
}
IPEX_INLINE u16v load_u16_n(const uint16_t* p, int64_t n) {
  alignas(16) uint16_t lanes[4] = {};
  for (int64_t i = 0; i < n; ++i) lanes[i] = p[i];
  return load_u16(lanes);
}
IPEX_INLINE void store_u16_n(uint16_t* p, u16v a, int64_t n) {
  alignas(16) uint16_t lanes[4];
  store_u16(lanes, a);
  for (int64_t i = 0; i < n; ++i) p[i] = lanes[i];
}

// The low 16 bits of each lane; SSE2 packs only with signed saturation, so the sign is spread
// first.
IPEX_INLINE u16v narrow(i32v a) {
  const __m128i r = _mm_srai_epi32(_mm_slli_epi32(raw(a), 16), 16);
  return _mm_packs_epi32(r, r);
}

IPEX_INLINE f32v bf16_to_f32(u16v a) {
  return _mm_castsi128_ps(_mm_unpacklo_epi16(_mm_setzero_si128(), a));
}
// Adds what makes a truncation to the upper half round to nearest even; NaN becomes 0x7fc0....
IPEX_INLINE i32v round_bf16_bits(f32v a) {
  const __m128i bits = raw(as_int(a));
  const __m128i odd = _mm_and_si128(_mm_srli_epi32(bits, 16), _mm_set1_epi32(1));
  const __m128i r = _mm_add_epi32(bits, _mm_add_epi32(odd, _mm_set1_epi32(0x7fff)));
  return select(is_nan(a), iset1(0x7fc00000), ints(r));
}
IPEX_INLINE u16v f32_to_bf16(f32v a) {
  const __m128i r = _mm_srai_epi32(raw(round_bf16_bits(a)), 16);
  return _mm_packs_epi32(r, r);
}

// 2 * kLanes bf16 numbers as two vectors: those at even places and those at odd places. One cheap
// operation per vector where the natural order takes a widening and a shift.
IPEX_INLINE f32v2 load2_bf16(const uint16_t* p) {
  const __m128i v = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  const __m128i odd = _mm_and_si128(v, _mm_set1_epi32(-65536));
  return {_mm_castsi128_ps(_mm_slli_epi32(v, 16)), _mm_castsi128_ps(odd)};
}
// Returns the numbers as stored.
IPEX_INLINE f32v2 store2_bf16(uint16_t* p, f32v2 v) {
  const __m128i even = _mm_srli_epi32(raw(round_bf16_bits(v.a)), 16);
  const __m128i odd = _mm_and_si128(raw(round_bf16_bits(v.b)), _mm_set1_epi32(-65536));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm_or_si128(even, odd));
  return {_mm_castsi128_ps(_mm_slli_epi32(even, 16)), _mm_castsi128_ps(odd)};
}
IPEX_INLINE f32v2 deinterleave(f32v2 v) {
  return {_mm_shuffle_ps(v.a, v.b, 0x88), _mm_shuffle_ps(v.a, v.b, 0xdd)};
}

IPEX_INLINE f32v2 interleave(f32v2 v) {
  return {_mm_unpacklo_ps(v.a, v.b), _mm_unpackhi_ps(v.a, v.b)};
}

// The exponent is moved from bias 15 to bias 127. A half denormal becomes 1.m * 2^-14 and loses the
// 1 by a subtraction of normal numbers, so the result does not depend on the denormal mode.
IPEX_INLINE f32v f16_to_f32(u16v a) {
  const i32v h = ints(_mm_unpacklo_epi16(a, _mm_setzero_si128()));
  const i32v sign = (h & iset1(0x8000)) << 16;
  const i32v magnitude = (h & iset1(0x7fff)) << 13;
  const i32v exponent = magnitude & iset1(0x1f << 23);
  const i32v normal = magnitude + iset1((127 - 15) << 23);
  const i32v special = normal + iset1((128 - 16) << 23);
  const f32v denormal = as_float(normal + iset1(1 << 23)) - as_float(iset1(113 << 23));
  i32v r = select(exponent == iset1(0x1f << 23), special, normal);
  r = select(exponent == iset1(0), as_int(denormal), r);
  return as_float(r | sign);
}
// Rounds to nearest even: for normal results by an integer addition (a carry into the exponent
// gives infinity where it should), for denormal results by the float addition of 0.5, whose last
// bit is 2^-24.
IPEX_INLINE u16v f32_to_f16(f32v a) {
  const i32v bits = as_int(a);
  const i32v sign = bits & iset1(INT32_MIN);
  const i32v magnitude = bits ^ sign;
  const i32v half = iset1(126 << 23);  // 0.5f
  const i32v denormal = as_int(as_float(magnitude) + as_float(half)) - half;
  const i32v odd = (magnitude >> 13) & iset1(1);
  const i32v normal = (magnitude - iset1((112 << 23) - 0xfff) + odd) >> 13;
  i32v r = select(magnitude < iset1(113 << 23), denormal, normal);
  r = select(magnitude >= iset1(143 << 23), iset1(0x7c00), r);
  r = select(magnitude > iset1(255 << 23), iset1(0x7e00), r);
  return narrow(r | ((sign >> 16) & iset1(0x8000)));
}

IPEX_INLINE float reduce_add(f32v a) {
  const __m128 r = _mm_add_ps(a, _mm_movehl_ps(a, a));
  return _mm_cvtss_f32(_mm_add_ss(r, _mm_shuffle_ps(r, r, 1)));
}
IPEX_INLINE float reduce_max(f32v a) {
  const __m128 r = _mm_max_ps(a, _mm_movehl_ps(a, a));
  return _mm_cvtss_f32(_mm_max_ss(r, _mm_shuffle_ps(r, r, 1)));
}

}  // namespace
}  // namespace ipex
