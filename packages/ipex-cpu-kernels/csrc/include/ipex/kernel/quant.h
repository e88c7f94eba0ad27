// SPDX-License-Identifier: Apache-2.0
// Quantization of rows to 8 bits: the range of a row, scale and zero point, codes.
//
//   symmetric:   code = round(x / scale), int8 in [-127, 127], scale = max|x| / 127
//   asymmetric:  code = round(x / scale) + zero, uint8, scale = (max - min) / 255, min <= 0 <= max
//
// Rounding is to nearest even and `x / scale` is x times the rounded reciprocal of scale. A row
// with a NaN or an infinity has that scale and codes of zero: what is computed from it is NaN.
// ipex_core.ops.quantize is the same in Python, bit for bit.
#pragma once

#include <cstdint>
#include <cstring>

#include "ipex/kernel/vec.h"

namespace ipex {
namespace {

// Rows that are (almost) zero get this scale, whose reciprocal is finite.
inline constexpr float kLeastScale = 0x1p-120f;

struct Quantizer {
  float scale = 1.0f;
  float inverse = 1.0f;
  int32_t zero = 0;    // the code of 0
  bool finite = true;  // false: all codes are `zero`
};

// The bit patterns of T as integers of one register, and one such integer.
template <class T>
struct Bits {
  using Int = int16_t;
  typedef int16_t Vector __attribute__((vector_size(kLanes * 4)));
};
template <>
struct Bits<float> {
  using Int = int32_t;
  using Vector = i32v;
};

template <class V>
IPEX_INLINE V larger(V a, V b) {
  return a > b ? a : b;
}
template <class V>
IPEX_INLINE V smaller(V a, V b) {
  return a < b ? a : b;
}

template <class T>
IPEX_INLINE float from_bits(typename Bits<T>::Int bits) {
  T value;
  std::memcpy(&value, &bits, sizeof(value));
  return load_n(&value, 1)[0];
}

// Bit patterns without their sign have the order of the absolute values, with NaN last. Integers
// need no care for NaN and are twice as many in a register for the 16-bit types.
template <class T>
float absolute_maximum(const T* x, int64_t n) {
  using Int = typename Bits<T>::Int;
  using V = typename Bits<T>::Vector;
  constexpr int64_t kStep = sizeof(V) / sizeof(T);
  constexpr Int kSign = static_cast<Int>(Int{1} << (8 * sizeof(Int) - 1));
  constexpr Int kMagnitude = static_cast<Int>(~kSign);
  V part[2] = {};
  int64_t i = 0;
  for (; i + 2 * kStep <= n; i += 2 * kStep)
#pragma GCC unroll 2
    for (int k = 0; k < 2; ++k) {
      V v;
      std::memcpy(&v, x + i + k * kStep, sizeof(v));
      part[k] = larger(part[k], v & kMagnitude);
    }
  part[0] = larger(part[0], part[1]);
  Int most = 0;
  for (int64_t lane = 0; lane < kStep; ++lane) most = larger(most, Int{part[0][lane]});
  for (; i < n; ++i) {
    Int v;
    std::memcpy(&v, x + i, sizeof(v));
    most = larger(most, static_cast<Int>(v & kMagnitude));
  }
  return from_bits<T>(most);
}

struct Range {
  float low = 0.0f, high = 0.0f;
};

// Smallest and largest value of a row and 0. Flipping the magnitude of the negative patterns puts
// all patterns in the order of the values; a NaN becomes an end of the range.
template <class T>
Range range_of(const T* x, int64_t n) {
  using Int = typename Bits<T>::Int;
  using V = typename Bits<T>::Vector;
  constexpr int64_t kStep = sizeof(V) / sizeof(T);
  constexpr int kShift = 8 * sizeof(Int) - 1;
  constexpr Int kMagnitude = static_cast<Int>(~static_cast<Int>(Int{1} << kShift));
  V most = {}, least = {};
  int64_t i = 0;
  for (; i + kStep <= n; i += kStep) {
    V v;
    std::memcpy(&v, x + i, sizeof(v));
    v ^= (v >> kShift) & kMagnitude;
    most = larger(most, v);
    least = smaller(least, v);
  }
  Int high = 0, low = 0;
  for (int64_t lane = 0; lane < kStep; ++lane) {
    high = larger(high, Int{most[lane]});
    low = smaller(low, Int{least[lane]});
  }
  for (; i < n; ++i) {
    Int v;
    std::memcpy(&v, x + i, sizeof(v));
    v = static_cast<Int>(v ^ ((v >> kShift) & kMagnitude));
    high = larger(high, v);
    low = smaller(low, v);
  }
  low = static_cast<Int>(low ^ ((low >> kShift) & kMagnitude));
  return {from_bits<T>(low), from_bits<T>(high)};
}

IPEX_INLINE bool is_finite(float a) { return a - a == 0.0f; }

IPEX_INLINE Quantizer symmetric_quantizer(float absmax) {
  Quantizer q;
  q.finite = is_finite(absmax);
  q.scale = absmax / 127.0f;
  if (q.scale < kLeastScale) q.scale = kLeastScale;
  q.inverse = 1.0f / q.scale;
  return q;
}

IPEX_INLINE Quantizer asymmetric_quantizer(Range range) {
  Quantizer q;
  q.finite = is_finite(range.low) && is_finite(range.high);
  q.scale = range.high / 255.0f - range.low / 255.0f;
  if (q.scale < kLeastScale) q.scale = kLeastScale;
  q.inverse = 1.0f / q.scale;
  if (q.finite) q.zero = to_int(set1(-range.low * q.inverse))[0];
  return q;
}

template <class T>
IPEX_INLINE Quantizer row_quantizer(const T* x, int64_t n, bool symmetric) {
  return symmetric ? symmetric_quantizer(absolute_maximum(x, n))
                   : asymmetric_quantizer(range_of(x, n));
}

// 2 * kLanes 16-bit integers in one register, and their saturation to 8 bits.
typedef int16_t i16v __attribute__((vector_size(kLanes * 4)));

#if IPEX_HAVE_AVX512
IPEX_INLINE i16v narrow_pair(i32v a, i32v b) {
  const __m512i r = _mm512_packs_epi32(raw(a), raw(b));
  const __m512i order = _mm512_set_epi64(7, 5, 3, 1, 6, 4, 2, 0);
  return reinterpret_cast<i16v>(_mm512_permutexvar_epi64(order, r));
}
template <bool kUnsigned>
IPEX_INLINE void store_codes(uint8_t* p, i16v a, i16v b) {
  const __m512i x = reinterpret_cast<__m512i>(a), y = reinterpret_cast<__m512i>(b);
  const __m512i order = _mm512_set_epi64(7, 5, 3, 1, 6, 4, 2, 0);
  const __m512i r = kUnsigned ? _mm512_packus_epi16(x, y) : _mm512_packs_epi16(x, y);
  _mm512_storeu_si512(p, _mm512_permutexvar_epi64(order, r));
}
#elif IPEX_HAVE_AVX2
IPEX_INLINE i16v narrow_pair(i32v a, i32v b) {
  return reinterpret_cast<i16v>(_mm256_permute4x64_epi64(_mm256_packs_epi32(raw(a), raw(b)), 0xd8));
}
template <bool kUnsigned>
IPEX_INLINE void store_codes(uint8_t* p, i16v a, i16v b) {
  const __m256i x = reinterpret_cast<__m256i>(a), y = reinterpret_cast<__m256i>(b);
  const __m256i r = kUnsigned ? _mm256_packus_epi16(x, y) : _mm256_packs_epi16(x, y);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(r, 0xd8));
}
#else
IPEX_INLINE i16v narrow_pair(i32v a, i32v b) {
  return reinterpret_cast<i16v>(_mm_packs_epi32(raw(a), raw(b)));
}
template <bool kUnsigned>
IPEX_INLINE void store_codes(uint8_t* p, i16v a, i16v b) {
  const __m128i x = reinterpret_cast<__m128i>(a), y = reinterpret_cast<__m128i>(b);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                   kUnsigned ? _mm_packus_epi16(x, y) : _mm_packs_epi16(x, y));
}
#endif

// The pair of load2's order for T as 16-bit integers in the order of the elements.
template <class T>
IPEX_INLINE i16v ordered_pair(i32v a, i32v b) {
  if constexpr (kIsBFloat16<T>)
    return reinterpret_cast<i16v>((b << 16) | (a & iset1(0xffff)));  // |a|, |b| < 2^15
  else
    return narrow_pair(a, b);
}

// x / scale, rounded, plus zero. With kClamp for values far outside of the range of the codes and
// for NaN, which gets the code of 0; without it only for |x / scale| < 2^14.
template <bool kClamp>
IPEX_INLINE i32v to_code(f32v x, f32v inverse, i32v zero_code) {
  f32v v = x * inverse;
  if constexpr (kClamp) {
    v = select(is_nan(v), zero(), v);
    v = max(min(v, set1(16384.0f)), set1(-16384.0f));
  }
  return to_int(v) + zero_code;
}

// Codes of a row: uint8 or, not kUnsigned, int8.
template <bool kUnsigned, bool kClamp = false, class T>
void quantize_row(const T* x, int64_t n, const Quantizer& by, uint8_t* q) {
  if (!by.finite) {
    std::memset(q, by.zero, static_cast<size_t>(n));
    return;
  }
  const f32v inverse = set1(by.inverse);
  const i32v zero_code = iset1(by.zero);
  int64_t i = 0;
  for (; i + 4 * kLanes <= n; i += 4 * kLanes) {
    i16v half[2];
#pragma GCC unroll 2
    for (int k = 0; k < 2; ++k) {
      const f32v2 v = load2(x + i + 2 * k * kLanes);
      half[k] = ordered_pair<T>(to_code<kClamp>(v.a, inverse, zero_code),
                                to_code<kClamp>(v.b, inverse, zero_code));
    }
    store_codes<kUnsigned>(q + i, half[0], half[1]);
  }
  constexpr int32_t kLow = kUnsigned ? 0 : -128, kHigh = kUnsigned ? 255 : 127;
  for (; i < n; i += kLanes) {
    const int64_t count = n - i < kLanes ? n - i : kLanes;
    const i32v codes = to_code<kClamp>(load_n(x + i, count), inverse, zero_code);
    for (int64_t lane = 0; lane < count; ++lane)
      q[i + lane] = static_cast<uint8_t>(smaller(kHigh, larger(kLow, int32_t{codes[lane]})));
  }
}

// The same with the kind of the codes known at run time only.
template <class T>
IPEX_INLINE void quantize_row(const T* x, int64_t n, const Quantizer& by, bool symmetric,
                              uint8_t* q) {
  symmetric ? quantize_row<false>(x, n, by, q) : quantize_row<true>(x, n, by, q);
}

}  // namespace
}  // namespace ipex
