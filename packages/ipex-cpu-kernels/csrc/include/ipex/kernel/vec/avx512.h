// SPDX-License-Identifier: Apache-2.0
// AVX-512 (F, BW, VL, DQ) backend of vec.h; include vec.h instead.
#pragma once

// The "undefined" operand of GCC's unmasked intrinsics is reported as used uninitialized (GCC PR
// 105593).
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop

#include <cstdint>

namespace ipex {
namespace {

inline constexpr int64_t kLanes = 16;
typedef float f32v __attribute__((vector_size(64)));
typedef int32_t i32v __attribute__((vector_size(64)));
struct f32v2 {
  f32v a, b;
};
using u16v = __m256i;  // kLanes 16-bit patterns
using Mask = __mmask16;

IPEX_INLINE f32v set1(float a) { return _mm512_set1_ps(a); }
IPEX_INLINE i32v iset1(int32_t a) { return reinterpret_cast<i32v>(_mm512_set1_epi32(a)); }
IPEX_INLINE i32v as_int(f32v a) { return reinterpret_cast<i32v>(a); }
IPEX_INLINE f32v as_float(i32v a) { return reinterpret_cast<f32v>(a); }
IPEX_INLINE __m512i raw(i32v a) { return reinterpret_cast<__m512i>(a); }

IPEX_INLINE f32v fma(f32v a, f32v b, f32v c) { return _mm512_fmadd_ps(a, b, c); }    // a * b + c
IPEX_INLINE f32v fnma(f32v a, f32v b, f32v c) { return _mm512_fnmadd_ps(a, b, c); }  // c - a * b
IPEX_INLINE f32v max(f32v a, f32v b) { return _mm512_max_ps(a, b); }
IPEX_INLINE f32v min(f32v a, f32v b) { return _mm512_min_ps(a, b); }
IPEX_INLINE f32v sqrt(f32v a) { return _mm512_sqrt_ps(a); }
IPEX_INLINE f32v round(f32v a) { return _mm512_roundscale_ps(a, 8); }  // nearest even, quiet
IPEX_INLINE i32v to_int(f32v a) { return reinterpret_cast<i32v>(_mm512_cvtps_epi32(a)); }
IPEX_INLINE f32v clear_bits(f32v a, int32_t bits) { return as_float(as_int(a) & ~iset1(bits)); }
IPEX_INLINE f32v copysign(f32v magnitude, f32v sign) {
  const __m512i s = raw(iset1(INT32_MIN));  // 0xCA: s ? sign : magnitude
  const __m512i r = _mm512_ternarylogic_epi32(s, raw(as_int(sign)), raw(as_int(magnitude)), 0xCA);
  return _mm512_castsi512_ps(r);
}

IPEX_INLINE Mask lt(f32v a, f32v b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
IPEX_INLINE Mask is_nan(f32v a) { return _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q); }
IPEX_INLINE f32v select(Mask m, f32v a, f32v b) { return _mm512_mask_blend_ps(m, b, a); }
IPEX_INLINE Mask first_n(int64_t n) { return static_cast<Mask>((1u << n) - 1u); }
IPEX_INLINE bool any(Mask m) { return m != 0; }

// 1 / a with 14 correct bits; 1 / inf = 0.
IPEX_INLINE f32v rcp_fast(f32v a) { return _mm512_rcp14_ps(a); }

IPEX_INLINE f32v loadu(const float* p) { return _mm512_loadu_ps(p); }
IPEX_INLINE void storeu(float* p, f32v a) { _mm512_storeu_ps(p, a); }
IPEX_INLINE f32v loadu_n(const float* p, int64_t n) { return _mm512_maskz_loadu_ps(first_n(n), p); }
IPEX_INLINE void storeu_n(float* p, f32v a, int64_t n) { _mm512_mask_storeu_ps(p, first_n(n), a); }
IPEX_INLINE u16v load_u16(const uint16_t* p) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}
IPEX_INLINE void store_u16(uint16_t* p, u16v a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), a);
}
IPEX_INLINE u16v load_u16_n(const uint16_t* p, int64_t n) {
  return _mm256_maskz_loadu_epi16(first_n(n), p);
}
IPEX_INLINE void store_u16_n(uint16_t* p, u16v a, int64_t n) {
  _mm256_mask_storeu_epi16(p, first_n(n), a);
}

IPEX_INLINE f32v bf16_to_f32(u16v a) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(a), 16));
}
IPEX_INLINE u16v f32_to_bf16(f32v a) {
#if IPEX_HAVE_AVX512_BF16
  return reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(a));
#else
  const __m512i bits = raw(as_int(a));
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i bias = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
  __m512i r = _mm512_srli_epi32(_mm512_add_epi32(bits, bias), 16);
  r = _mm512_mask_mov_epi32(r, is_nan(a), _mm512_set1_epi32(0x7fc0));
  return _mm512_cvtepi32_epi16(r);
#endif
}

// 2 * kLanes bf16 numbers as two vectors: those at even places and those at odd places. One cheap
// operation per vector where the natural order takes a widening and a shift.
IPEX_INLINE f32v2 load2_bf16(const uint16_t* p) {
  const __m512i v = _mm512_loadu_si512(p);
  const __m512i odd = _mm512_and_si512(v, _mm512_set1_epi32(-65536));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(v, 16)), _mm512_castsi512_ps(odd)};
}
// Adds what makes a truncation to the upper half round to nearest even; NaN becomes 0x7fc0....
IPEX_INLINE __m512i round_bf16_bits(f32v a) {
  const __m512i bits = raw(as_int(a));
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i r = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  return _mm512_mask_mov_epi32(r, is_nan(a), _mm512_set1_epi32(0x7fc00000));
}
// Returns the numbers as stored.
IPEX_INLINE f32v2 store2_bf16(uint16_t* p, f32v2 v) {
#if IPEX_HAVE_AVX512_BF16
  const __m512i places =
      _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                       21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  const __m512i halves = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(v.b, v.a));
  const __m512i r = _mm512_permutexvar_epi16(places, halves);
#else
  const __m512i even = _mm512_srli_epi32(round_bf16_bits(v.a), 16);
  const __m512i r = _mm512_mask_mov_epi16(even, 0xaaaaaaaa, round_bf16_bits(v.b));
#endif
  _mm512_storeu_si512(p, r);
  const __m512i odd = _mm512_and_si512(r, _mm512_set1_epi32(-65536));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(r, 16)), _mm512_castsi512_ps(odd)};
}
IPEX_INLINE f32v2 deinterleave(f32v2 v) {
  const __m512i even = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
  const __m512i odd = _mm512_or_si512(even, _mm512_set1_epi32(1));
  return {_mm512_permutex2var_ps(v.a, even, v.b), _mm512_permutex2var_ps(v.a, odd, v.b)};
}

IPEX_INLINE f32v2 interleave(f32v2 v) {
  const __m512i low = _mm512_set_epi32(23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
  return {_mm512_permutex2var_ps(v.a, low, v.b), _mm512_permutex2var_ps(v.a, high, v.b)};
}

IPEX_INLINE f32v f16_to_f32(u16v a) { return _mm512_cvtph_ps(a); }
IPEX_INLINE u16v f32_to_f16(f32v a) {
  return _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

IPEX_INLINE float reduce_add(f32v a) { return _mm512_reduce_add_ps(a); }
IPEX_INLINE float reduce_max(f32v a) { return _mm512_reduce_max_ps(a); }

}  // namespace
}  // namespace ipex
