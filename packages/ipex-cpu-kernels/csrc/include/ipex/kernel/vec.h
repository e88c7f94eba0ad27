// SPDX-License-Identifier: Apache-2.0
// A small vector layer: one `f32v` of kLanes floats per ISA level, with loads and stores that
// convert.
//
// A kernel is written once against this header and compiled once per level. Everything sits in an
// anonymous namespace: every level is a shared module of its own and must not export or merge
// inline code. `+ - * /` are the compiler's own vector operators; the rest are the functions below.
//
// Lanes:    kLanes = 16 (AVX-512), 8 (AVX2) or 4 (x86-64 baseline, SSE2).
// Elements: float, BFloat16, Half. Arithmetic is always in float; storing rounds to nearest even.
// NaN:      max(a, b) and min(a, b) give b if either operand is NaN (that is what the instruction
//           does). Put the value whose NaN must survive last: max(limit, x). Conversions keep NaN.
// Denormals: kept by fp32 and fp16 code. The bf16 conversion instruction (IPEX_HAVE_AVX512_BF16)
//           flushes them to zero.
#pragma once

#include <cstdint>

#include "ipex/kernel.h"
#include "ipex/kernel/isa.h"

// GCC keeps large lambdas and templates out of line otherwise, and a vector then passes through
// memory.
#define IPEX_INLINE inline __attribute__((always_inline))
#define IPEX_LAMBDA __attribute__((always_inline))
// Large, and called from templates with more parameters than it depends on.
#define IPEX_NOINLINE __attribute__((noinline))

#if IPEX_HAVE_AVX512
#include "ipex/kernel/vec/avx512.h"
#elif IPEX_HAVE_AVX2
#include "ipex/kernel/vec/avx2.h"
#else
#include "ipex/kernel/vec/sse2.h"
#endif

namespace ipex {
namespace {

// True if results are rounded to a 16-bit type, so that the short polynomials of vec_math.h are
// enough.
template <typename T>
inline constexpr bool kReducedPrecision = true;
template <>
inline constexpr bool kReducedPrecision<float> = false;

template <typename T>
inline constexpr bool kIsBFloat16 = false;
template <>
inline constexpr bool kIsBFloat16<BFloat16> = true;

IPEX_INLINE f32v zero() { return set1(0.0f); }
IPEX_INLINE f32v to_float(i32v a) { return __builtin_convertvector(a, f32v); }
IPEX_INLINE f32v abs(f32v a) { return clear_bits(a, INT32_MIN); }

// Loads kLanes elements as float.
IPEX_INLINE f32v load(const float* p) { return loadu(p); }
IPEX_INLINE f32v load(const BFloat16* p) { return bf16_to_f32(load_u16(&p->bits)); }
IPEX_INLINE f32v load(const Half* p) { return f16_to_f32(load_u16(&p->bits)); }

// Loads n elements, 0 < n <= kLanes; nothing behind them is touched and the other lanes are 0.
IPEX_INLINE f32v load_n(const float* p, int64_t n) { return loadu_n(p, n); }
IPEX_INLINE f32v load_n(const BFloat16* p, int64_t n) {
  return bf16_to_f32(load_u16_n(&p->bits, n));
}
IPEX_INLINE f32v load_n(const Half* p, int64_t n) { return f16_to_f32(load_u16_n(&p->bits, n)); }

// Stores kLanes elements, rounded to nearest even.
IPEX_INLINE void store(float* p, f32v a) { storeu(p, a); }
IPEX_INLINE void store(BFloat16* p, f32v a) { store_u16(&p->bits, f32_to_bf16(a)); }
IPEX_INLINE void store(Half* p, f32v a) { store_u16(&p->bits, f32_to_f16(a)); }

// Stores the first n lanes, 0 < n <= kLanes; nothing behind them is touched.
IPEX_INLINE void store_n(float* p, f32v a, int64_t n) { storeu_n(p, a, n); }
IPEX_INLINE void store_n(BFloat16* p, f32v a, int64_t n) {
  store_u16_n(&p->bits, f32_to_bf16(a), n);
}
IPEX_INLINE void store_n(Half* p, f32v a, int64_t n) { store_u16_n(&p->bits, f32_to_f16(a), n); }

// The value that a store followed by a load would give.
IPEX_INLINE f32v round_to(const float*, f32v a) { return a; }
IPEX_INLINE f32v round_to(const BFloat16*, f32v a) { return bf16_to_f32(f32_to_bf16(a)); }
IPEX_INLINE f32v round_to(const Half*, f32v a) { return f16_to_f32(f32_to_f16(a)); }

// Two vectors at once, 2 * kLanes elements in an order of lanes that depends on T (bf16: even
// places, then odd places), which is the cheapest one. store2 undoes it and returns the values as
// stored. load2_as<T> reads p in the order of T, so that it can meet elements of T lane by lane.
IPEX_INLINE f32v2 load2(const float* p) { return {load(p), load(p + kLanes)}; }
IPEX_INLINE f32v2 load2(const BFloat16* p) { return load2_bf16(&p->bits); }
IPEX_INLINE f32v2 load2(const Half* p) { return {load(p), load(p + kLanes)}; }

IPEX_INLINE f32v2 store2(float* p, f32v2 v) {
  storeu(p, v.a);
  storeu(p + kLanes, v.b);
  return v;
}
IPEX_INLINE f32v2 store2(BFloat16* p, f32v2 v) { return store2_bf16(&p->bits, v); }
IPEX_INLINE f32v2 store2(Half* p, f32v2 v) {
  const u16v a = f32_to_f16(v.a);
  const u16v b = f32_to_f16(v.b);
  store_u16(&p->bits, a);
  store_u16(&p[kLanes].bits, b);
  return {f16_to_f32(a), f16_to_f32(b)};
}

template <typename T, typename P>
IPEX_INLINE f32v2 load2_as(const P* p) {
  if constexpr (kIsBFloat16<T> && !kIsBFloat16<P>) return deinterleave(load2(p));
  return load2(p);
}

// 2 * kLanes elements as those at even places and those at odd places, for every T.
template <typename T>
IPEX_INLINE f32v2 load_pairs(const T* p) {
  if constexpr (kIsBFloat16<T>) return load2(p);
  return deinterleave(load2(p));
}
template <typename T>
IPEX_INLINE void store_pairs(T* p, f32v2 v) {
  if constexpr (kIsBFloat16<T>) {
    store2(p, v);
  } else {
    store2(p, interleave(v));
  }
}

// Keeps the first n lanes and sets the others to `fill`, 0 < n <= kLanes.
IPEX_INLINE f32v keep_n(f32v a, int64_t n, f32v fill) { return select(first_n(n), a, fill); }

}  // namespace
}  // namespace ipex
