// SPDX-License-Identifier: Apache-2.0
// AVX2 + FMA + F16C backend of vec.h; include vec.h instead.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace ipex {
namespace {

inline constexpr int64_t kLanes = 8;
typedef float f32v __attribute__((vector_size(32)));
typedef int32_t i32v __attribute__((vector_size(32)));
struct f32v2 {
  f32v a, b;
};
using u16v = __m128i;  // kLanes 16-bit patterns
using Mask = i32v;     // all bits of a lane set, or none

IPEX_INLINE f32v set1(float a) { return _mm256_set1_ps(a); }
IPEX_INLINE i32v iset1(int32_t a) { return reinterpret_cast<i32v>(_mm256_set1_epi32(a)); }
IPEX_INLINE i32v as_int(f32v a) { return reinterpret_cast<i32v>(a); }
IPEX_INLINE f32v as_float(i32v a) { return reinterpret_cast<f32v>(a); }
IPEX_INLINE __m256i raw(i32v a) { return reinterpret_cast<__m256i>(a); }

IPEX_INLINE f32v fma(f32v a, f32v b, f32v c) { return _mm256_fmadd_ps(a, b, c); }    // a * b + c
IPEX_INLINE f32v fnma(f32v a, f32v b, f32v c) { return _mm256_fnmadd_ps(a, b, c); }  // c - a * b
IPEX_INLINE f32v max(f32v a, f32v b) { return _mm256_max_ps(a, b); }
IPEX_INLINE f32v min(f32v a, f32v b) { return _mm256_min_ps(a, b); }
IPEX_INLINE f32v sqrt(f32v a) { return _mm256_sqrt_ps(a); }
IPEX_INLINE f32v round(f32v a) { return _mm256_round_ps(a, 8); }  // nearest even, quiet
IPEX_INLINE i32v to_int(f32v a) { return reinterpret_cast<i32v>(_mm256_cvtps_epi32(a)); }
IPEX_INLINE f32v clear_bits(f32v a, int32_t bits) { return as_float(as_int(a) & ~iset1(bits)); }
IPEX_INLINE f32v copysign(f32v magnitude, f32v sign) {
  const i32v s = iset1(INT32_MIN);
  return as_float((as_int(sign) & s) | (as_int(magnitude) & ~s));
}

IPEX_INLINE Mask lt(f32v a, f32v b) { return as_int(_mm256_cmp_ps(a, b, _CMP_LT_OQ)); }
IPEX_INLINE Mask is_nan(f32v a) { return as_int(_mm256_cmp_ps(a, a, _CMP_UNORD_Q)); }
IPEX_INLINE f32v select(Mask m, f32v a, f32v b) { return _mm256_blendv_ps(b, a, as_float(m)); }
IPEX_INLINE Mask first_n(int64_t n) {
  const i32v lane = {0, 1, 2, 3, 4, 5, 6, 7};
  return lane < iset1(static_cast<int32_t>(n));
}
IPEX_INLINE bool any(Mask m) { return _mm256_movemask_ps(as_float(m)) != 0; }

// 1 / a; 1 / inf = 0. The division is exact and not slower than an estimate plus a Newton step,
// which would also have to be repaired at 0 and infinity.
IPEX_INLINE f32v rcp_fast(f32v a) { return set1(1.0f) / a; }

IPEX_INLINE f32v loadu(const float* p) { return _mm256_loadu_ps(p); }
IPEX_INLINE void storeu(float* p, f32v a) { _mm256_storeu_ps(p, a); }
IPEX_INLINE f32v loadu_n(const float* p, int64_t n) {
  return _mm256_maskload_ps(p, raw(first_n(n)));
}
IPEX_INLINE void storeu_n(float* p, f32v a, int64_t n) {
  _mm256_maskstore_ps(p, raw(first_n(n)), a);
}
IPEX_INLINE u16v load_u16(const uint16_t* p) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
}
IPEX_INLINE void store_u16(uint16_t* p, u16v a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), a);
}
IPEX_INLINE u16v load_u16_n(const uint16_t* p, int64_t n) {
  alignas(16) uint16_t lanes[8] = {};
  for (int64_t i = 0; i < n; ++i) lanes[i] = p[i];
  return load_u16(lanes);
}
IPEX_INLINE void store_u16_n(uint16_t* p, u16v a, int64_t n) {
  alignas(16) uint16_t lanes[8];
  store_u16(lanes, a);
  for (int64_t i = 0; i < n; ++i) p[i] = lanes[i];
}

IPEX_INLINE f32v bf16_to_f32(u16v a) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(a), 16));
}
// Adds what makes a truncation to the upper half round to nearest even; NaN becomes 0x7fc0....
IPEX_INLINE __m256i round_bf16_bits(f32v a) {
  const __m256i bits = raw(as_int(a));
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i r = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  return _mm256_blendv_epi8(r, _mm256_set1_epi32(0x7fc00000), raw(is_nan(a)));
}
IPEX_INLINE u16v f32_to_bf16(f32v a) {
  const __m256i r = _mm256_srli_epi32(round_bf16_bits(a), 16);
  return _mm_packus_epi32(_mm256_castsi256_si128(r), _mm256_extracti128_si256(r, 1));
}

// 2 * kLanes bf16 numbers as two vectors: those at even places and those at odd places. One cheap
// operation per vector where the natural order takes a widening and a shift.
IPEX_INLINE f32v2 load2_bf16(const uint16_t* p) {
  const __m256i v = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  const __m256i odd = _mm256_and_si256(v, _mm256_set1_epi32(-65536));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(v, 16)), _mm256_castsi256_ps(odd)};
}
// Returns the numbers as stored.
IPEX_INLINE f32v2 store2_bf16(uint16_t* p, f32v2 v) {
  const __m256i even = _mm256_srli_epi32(round_bf16_bits(v.a), 16);
  const __m256i r = _mm256_blend_epi16(even, round_bf16_bits(v.b), 0xaa);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), r);
  const __m256i odd = _mm256_and_si256(r, _mm256_set1_epi32(-65536));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(r, 16)), _mm256_castsi256_ps(odd)};
}
IPEX_INLINE f32v2 deinterleave(f32v2 v) {
  const __m256d even = _mm256_castps_pd(_mm256_shuffle_ps(v.a, v.b, 0x88));
  const __m256d odd = _mm256_castps_pd(_mm256_shuffle_ps(v.a, v.b, 0xdd));
  return {_mm256_castpd_ps(_mm256_permute4x64_pd(even, 0xd8)),
          _mm256_castpd_ps(_mm256_permute4x64_pd(odd, 0xd8))};
}

IPEX_INLINE f32v2 interleave(f32v2 v) {
  const __m256 low = _mm256_unpacklo_ps(v.a, v.b);
  const __m256 high = _mm256_unpackhi_ps(v.a, v.b);
  return {_mm256_permute2f128_ps(low, high, 0x20), _mm256_permute2f128_ps(low, high, 0x31)};
}

IPEX_INLINE f32v f16_to_f32(u16v a) { return _mm256_cvtph_ps(a); }
IPEX_INLINE u16v f32_to_f16(f32v a) {
  return _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

IPEX_INLINE float reduce_add(f32v a) {
  __m128 r = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  r = _mm_add_ps(r, _mm_movehl_ps(r, r));
  return _mm_cvtss_f32(_mm_add_ss(r, _mm_movehdup_ps(r)));
}
IPEX_INLINE float reduce_max(f32v a) {
  __m128 r = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  r = _mm_max_ps(r, _mm_movehl_ps(r, r));
  return _mm_cvtss_f32(_mm_max_ss(r, _mm_movehdup_ps(r)));
}

}  // namespace
}  // namespace ipex
