// SPDX-License-Identifier: Apache-2.0
// Loads and conversions of quantized cache elements, for kernels: the counterpart of vec.h for
// Int8, E5m2 and E4m3.
//
// load, load_n, load2 give the stored numbers; the scale of the row (kv_scale) is the caller's.
#pragma once

#include <cstring>

#include "ipex/kernel/vec.h"
#include "ipex/kv_view.h"

namespace ipex {
namespace {

// The bits of a float16 that an e4m3 fills: sign, the lower four of the exponent, three of the
// mantissa. A byte widened with its sign and shifted by 7 has them there, and one more above.
inline constexpr int16_t kE4m3InF16 = static_cast<int16_t>(0xbf80);

#if IPEX_HAVE_AVX512
IPEX_INLINE f32v load(const Int8* p) {
  return _mm512_cvtepi32_ps(
      _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
// A float16 has the same exponent: e5m2 is its upper byte.
IPEX_INLINE f32v load(const E5m2* p) {
  const __m256i wide = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return f16_to_f32(_mm256_slli_epi16(wide, 8));
}
IPEX_INLINE u16v load_e4m3(const E4m3* p) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  const __m256i wide = _mm256_slli_epi16(_mm256_cvtepi8_epi16(bytes), 7);
  return _mm256_and_si256(wide, _mm256_set1_epi16(kE4m3InF16));
}
#elif IPEX_HAVE_AVX2
IPEX_INLINE f32v load(const Int8* p) {
  return _mm256_cvtepi32_ps(
      _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
IPEX_INLINE f32v load(const E5m2* p) {
  const __m128i wide = _mm_cvtepu8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  return f16_to_f32(_mm_slli_epi16(wide, 8));
}
IPEX_INLINE u16v load_e4m3(const E4m3* p) {
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
  const __m128i wide = _mm_slli_epi16(_mm_cvtepi8_epi16(bytes), 7);
  return _mm_and_si128(wide, _mm_set1_epi16(kE4m3InF16));
}
#else
IPEX_INLINE __m128i load_4_bytes_high(const void* p) {
  int32_t four;
  std::memcpy(&four, p, sizeof(four));
  return _mm_unpacklo_epi8(_mm_setzero_si128(), _mm_cvtsi32_si128(four));
}
IPEX_INLINE f32v load(const Int8* p) {
  const __m128i high = _mm_unpacklo_epi16(_mm_setzero_si128(), load_4_bytes_high(p));
  return _mm_cvtepi32_ps(_mm_srai_epi32(high, 24));
}
IPEX_INLINE f32v load(const E5m2* p) { return f16_to_f32(load_4_bytes_high(p)); }
IPEX_INLINE u16v load_e4m3(const E4m3* p) {
  return _mm_and_si128(_mm_srai_epi16(load_4_bytes_high(p), 1), _mm_set1_epi16(kE4m3InF16));
}
#endif

// The float16 is 2^-8 times the number, and 1.875, the largest pattern, stands for NaN.
IPEX_INLINE f32v load(const E4m3* p) {
  const f32v value = f16_to_f32(load_e4m3(p));
  const f32v nan = set1(__builtin_nanf(""));
  return select(lt(set1(1.75f), abs(value)), nan, value * set1(256.0f));
}

template <class E>
IPEX_INLINE f32v load_bytes_n(const E* p, int64_t n) {
  E lanes[kLanes] = {};
  for (int64_t i = 0; i < n; ++i) lanes[i] = p[i];
  return load(lanes);
}
IPEX_INLINE f32v load_n(const Int8* p, int64_t n) { return load_bytes_n(p, n); }
IPEX_INLINE f32v load_n(const E5m2* p, int64_t n) { return load_bytes_n(p, n); }
IPEX_INLINE f32v load_n(const E4m3* p, int64_t n) { return load_bytes_n(p, n); }
IPEX_INLINE f32v2 load2(const Int8* p) { return {load(p), load(p + kLanes)}; }
IPEX_INLINE f32v2 load2(const E5m2* p) { return {load(p), load(p + kLanes)}; }
#if IPEX_HAVE_AVX512_FP16
// As two loads, but 32 numbers are scaled and searched for NaN before they are widened.
IPEX_INLINE f32v2 load2(const E4m3* p) {
  const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  const __m512i wide = _mm512_slli_epi16(_mm512_cvtepi8_epi16(bytes), 7);
  const __m512i bits = _mm512_and_si512(wide, _mm512_set1_epi16(kE4m3InF16));
  const __m512i size = _mm512_and_si512(bits, _mm512_set1_epi16(0x7fff));
  const __mmask32 number = _mm512_cmpneq_epi16_mask(size, _mm512_set1_epi16(kE4m3InF16 & 0x7fff));
  const auto f16 = [](int16_t v) IPEX_LAMBDA { return _mm512_castsi512_ph(_mm512_set1_epi16(v)); };
  const __m512i value = _mm512_castph_si512(
      _mm512_mask_mul_ph(f16(0x7e00), number, _mm512_castsi512_ph(bits), f16(0x5c00)));  // NaN, 256
  return {f16_to_f32(_mm512_castsi512_si256(value)),
          f16_to_f32(_mm512_extracti64x4_epi64(value, 1))};
}
#else
IPEX_INLINE f32v2 load2(const E4m3* p) { return {load(p), load(p + kLanes)}; }
#endif

// Nearest even; too large becomes infinity, as torch's conversion does.
IPEX_INLINE E5m2 to_e5m2(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  const uint32_t sign = bits >> 31 << 7;
  bits &= 0x7fffffffu;
  uint32_t code;
  if (bits >= 143u << 23) {  // 2^16
    code = bits > 255u << 23 ? 0x7fu : 0x7cu;
  } else if (bits < 113u << 23) {
    // The sum with 128 is rounded to multiples of 2^-16, the smallest e5m2.
    float sum;
    std::memcpy(&sum, &bits, sizeof(sum));
    sum += 128.0f;
    std::memcpy(&code, &sum, sizeof(code));
    code -= 134u << 23;
  } else {
    code = (bits - (112u << 23) + 0xfffffu + (bits >> 21 & 1u)) >> 21;
  }
  return {static_cast<uint8_t>(code | sign)};
}

// Nearest even; too large becomes 448, the largest one, and infinity NaN.
IPEX_INLINE E4m3 to_e4m3(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  const uint32_t sign = bits >> 31 << 7;
  bits &= 0x7fffffffu;
  uint32_t code;
  if (bits >= 0x43e00000u) {  // 448
    code = bits >= 255u << 23 ? 0x7fu : 0x7eu;
  } else if (bits < 121u << 23) {
    // The sum with 2^14 is rounded to multiples of 2^-9, the smallest e4m3.
    float sum;
    std::memcpy(&sum, &bits, sizeof(sum));
    sum += 16384.0f;
    std::memcpy(&code, &sum, sizeof(code));
    code -= 141u << 23;
  } else {
    code = (bits - (120u << 23) + 0x7ffffu + (bits >> 20 & 1u)) >> 20;
  }
  return {static_cast<uint8_t>(code | sign)};
}

// Nearest even, between -127 and 127; NaN becomes 0.
IPEX_INLINE Int8 to_int8(float value) {
  const float limited = value < -127.0f ? -127.0f : value > 127.0f ? 127.0f : value;
  if (limited != limited) return {0};
  return {static_cast<int8_t>(_mm_cvtss_si32(_mm_set_ss(limited)))};
}

IPEX_INLINE void quantize(float value, Int8* to) { *to = to_int8(value); }
IPEX_INLINE void quantize(float value, E5m2* to) { *to = to_e5m2(value); }
IPEX_INLINE void quantize(float value, E4m3* to) { *to = to_e4m3(value); }

}  // namespace
}  // namespace ipex
