// SPDX-License-Identifier: Apache-2.0
// Codes to floats, at every level: a word of a block holds the codes of one column.
#pragma once

#include <cstdint>

#include "ipex/kernel/vec.h"
#include "woq_linear/woq_format.h"

namespace ipex {
namespace {

// Element j of a word in order dot is this k of its block.
inline constexpr int kNibbleK[8] = {0, 2, 4, 6, 1, 3, 5, 7};
inline constexpr int kByteK[4] = {0, 2, 1, 3};

// Vectors that the 16 columns of a strip take.
inline constexpr int kStripVectors = static_cast<int>(kStrip / kLanes);

IPEX_INLINE i32v load_words(const char* p) {
  return as_int(loadu(reinterpret_cast<const float*>(p)));
}

// table[code] for 16 floats; the bits of the index above the fourth may be anything.
class Table16 {
 public:
  explicit IPEX_INLINE Table16(const float* values) {
#if IPEX_HAVE_AVX512
    all_ = loadu(values);
#elif IPEX_HAVE_AVX2
    low_ = loadu(values);
    high_ = loadu(values + 8);
#else
    values_ = values;
#endif
  }
  IPEX_INLINE f32v operator[](i32v code) const {
#if IPEX_HAVE_AVX512
    return _mm512_permutexvar_ps(raw(code), all_);
#elif IPEX_HAVE_AVX2
    const f32v low = _mm256_permutevar8x32_ps(low_, raw(code));
    const f32v high = _mm256_permutevar8x32_ps(high_, raw(code));
    return _mm256_blendv_ps(low, high, as_float(code << 28));
#else
    f32v r;
    for (int i = 0; i < kLanes; ++i) r[i] = values_[code[i] & 15];
    return r;
#endif
  }

 private:
#if IPEX_HAVE_AVX512
  f32v all_;
#elif IPEX_HAVE_AVX2
  f32v low_, high_;
#else
  const float* values_;
#endif
};

// Values of int4 codes with the zero 8 taken off, and without.
inline constexpr float kInt4Values[16] = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
inline constexpr float kInt4Codes[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

// The table of a 4-bit format; for int4 with zero points the table of the bare codes.
inline const float* nibble_values(const PackedHeader& header) {
  if (header.format == kFormatNf4) return kNf4Values;
  if (header.format == kFormatFp4) return kFp4Values;
  return header.zero_kind == kZeroNone ? kInt4Values : kInt4Codes;
}

IPEX_INLINE f32v select_bits(i32v mask, i32v a, i32v b) {
  return as_float((a & mask) | (b & ~mask));
}

// The 8-bit float in byte j of each lane. Its bits with the exponent raised are t for a normal
// number and 2^-7 (1 + m / 8) for a subnormal one; 2 t - 2^-6 is what that should be, and less than
// t for subnormal numbers only. (e4m3; the same with other constants for e5m2.) kSpecial: with NaN
// and infinity.
template <uint32_t kFormat, bool kSpecial>
IPEX_INLINE f32v fp8_value(i32v word, int j) {
  constexpr bool kE4 = kFormat == kFormatFp8E4M3;
  constexpr int kPlace = kE4 ? 20 : 21;  // of the lowest bit in a float
  constexpr int kBias = kE4 ? 120 : 112;
  const int shift = kPlace - 8 * j;
  const i32v bits = (shift >= 0 ? word << shift : word >> -shift) & iset1(0x7f << kPlace);
  const f32v t = as_float(bits + iset1(kBias << 23));
  const f32v v = min(t, fma(t, set1(2.0f), set1(kE4 ? -0x1p-6f : -0x1p-14f)));
  const i32v sign = (word << (24 - 8 * j)) & iset1(INT32_MIN);
  if constexpr (!kSpecial) {
    return as_float(as_int(v) | sign);
  } else if constexpr (kE4) {
    const i32v nan = bits == iset1(0x7f << kPlace);
    return as_float(as_int(v) | sign | (nan & iset1(0x7fc00000)));
  } else {
    const i32v special = bits > iset1(0x7b << kPlace);
    return as_float(as_int(select_bits(special, bits | iset1(0x7f800000), as_int(v))) | sign);
  }
}

// The same for numbers that are not subnormal, divided by kRaised: the bits are moved to their
// place in a float, with 64 added to the exponent. Two to four instructions instead of eight.
template <uint32_t kFormat>
inline constexpr float kRaised = kFormat == kFormatFp8E4M3   ? 0x1p56f
                                 : kFormat == kFormatFp8E5M2 ? 0x1p48f
                                                             : 1.0f;
template <uint32_t kFormat>
IPEX_INLINE f32v raised_fp8(i32v word, int j) {
  constexpr bool kE4 = kFormat == kFormatFp8E4M3;
  const i32v top = j == 3 ? word : word << (24 - 8 * j);
  const i32v kept = iset1(static_cast<int32_t>(kE4 ? 0x87f00000 : 0x8fe00000));
  return as_float(((top >> (kE4 ? 4 : 3)) & kept) | iset1(0x20000000));
}

// Whether one of the codes is zero or subnormal.
template <uint32_t kFormat>
IPEX_INLINE bool has_tiny_fp8(i32v word) {
  constexpr int8_t kExponent = kFormat == kFormatFp8E4M3 ? 0x78 : 0x7c;
#if IPEX_HAVE_AVX512
  return _mm512_testn_epi8_mask(raw(word), _mm512_set1_epi8(kExponent)) != 0;
#elif IPEX_HAVE_AVX2
  const __m256i exponents = _mm256_and_si256(raw(word), _mm256_set1_epi8(kExponent));
  return _mm256_movemask_epi8(_mm256_cmpeq_epi8(exponents, _mm256_setzero_si256())) != 0;
#else
  return _mm_movemask_epi8(_mm_cmpeq_epi8(_mm_and_si128(raw(word), _mm_set1_epi8(kExponent)),
                                          _mm_setzero_si128())) != 0;
#endif
}

// A word of order vnni in order dot.
IPEX_INLINE i32v from_vnni(i32v word, uint32_t format) {
  if (format == kFormatInt8) word = word ^ iset1(static_cast<int32_t>(0x80808080));
  if (!woq_is_nibble(format)) {  // swap the bytes in the middle
    return (word & iset1(static_cast<int32_t>(0xff0000ff))) | ((word >> 8) & iset1(0xff00)) |
           ((word & iset1(0xff00)) << 8);
  }
  constexpr int kVnniPlace[8] = {0, 2, 4, 6, 1, 3, 5, 7};  // of k
  i32v r = iset1(0);
  for (int j = 0; j < 8; ++j)
    r = r | (((word >> (4 * kVnniPlace[kNibbleK[j]])) & iset1(15)) << (4 * j));
  return r;
}

// Element j of each word as float, without the zero point.
template <uint32_t kFormat, bool kSpecial = true>
IPEX_INLINE f32v element(i32v word, int j, [[maybe_unused]] const Table16& table) {
  if constexpr (kFormat == kFormatInt8) {
    return to_float((word << (24 - 8 * j)) >> 24);
  } else if constexpr (kFormat >= kFormatFp8E4M3) {
    return fp8_value<kFormat, kSpecial>(word, j);
  } else if constexpr (kFormat == kFormatInt4 && !IPEX_HAVE_AVX512) {
    return to_float((word >> (4 * j)) & iset1(15));  // the zero 8 is taken off by the caller
  } else {
    return table[word >> (4 * j)];
  }
}

// What must be subtracted from `element` where there are no zero points.
template <uint32_t kFormat>
inline constexpr float kImpliedZero = kFormat == kFormatInt4 && !IPEX_HAVE_AVX512 ? 8.0f : 0.0f;

typedef int8_t i8v __attribute__((vector_size(kLanes)));

// kLanes signed bytes.
IPEX_INLINE i32v load_bytes(const void* p) {
#if IPEX_HAVE_AVX2 && !IPEX_HAVE_AVX512  // GCC 12 widens them one by one
  return reinterpret_cast<i32v>(
      _mm256_cvtepi8_epi32(_mm_loadl_epi64(static_cast<const __m128i*>(p))));
#endif
  i8v bytes;
  __builtin_memcpy(&bytes, p, sizeof(bytes));
  return __builtin_convertvector(bytes, i32v);
}

// Powers of two from their exponents: 0 is the subnormal 2^-127, 255 is NaN.
IPEX_INLINE f32v e8m0(i32v bytes) {
  const i32v exponent = bytes & iset1(255);
  const i32v least = (exponent == iset1(0)) & iset1(0x400000);
  const i32v nan = (exponent == iset1(255)) & iset1(0x400000);
  return as_float((exponent << 23) | least | nan);
}

// The same from bytes in memory; 0 and 255 are rare.
IPEX_INLINE f32v load_e8m0(const char* p) {
#if IPEX_HAVE_AVX2 && !IPEX_HAVE_AVX512
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
  const __m128i next = _mm_add_epi8(bytes, _mm_set1_epi8(1));
  const __m128i rare = _mm_cmpeq_epi8(_mm_min_epu8(next, _mm_set1_epi8(1)), next);
  if (__builtin_expect((_mm_movemask_epi8(rare) & 0xff) == 0, 1))
    return as_float(reinterpret_cast<i32v>(_mm256_cvtepu8_epi32(bytes)) << 23);
#endif
#if IPEX_HAVE_AVX512
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  const __m128i one = _mm_set1_epi8(1);
  if (__builtin_expect(_mm_cmple_epu8_mask(_mm_add_epi8(bytes, one), one) == 0, 1))
    return reinterpret_cast<f32v>(_mm512_slli_epi32(_mm512_cvtepu8_epi32(bytes), 23));
#endif
  return e8m0(load_bytes(p));
}

// Scales of the columns of vector v of a strip.
IPEX_INLINE f32v scale_vector(const WoqLayout& at, const PackedHeader& header, const char* strip,
                              int64_t group, int v) {
  const char* base = strip + at.scales;
  if (header.scale_columns == 1) {
    if (header.scale_type == kScaleFloat) return set1(reinterpret_cast<const float*>(base)[group]);
    if (header.scale_type == kScaleE8M0)
      return e8m0(iset1(reinterpret_cast<const uint8_t*>(base)[group]));
    if (header.scale_type == kScaleBFloat16)
      return set1(load_n(reinterpret_cast<const BFloat16*>(base) + group, 1)[0]);
    return set1(load_n(reinterpret_cast<const Half*>(base) + group, 1)[0]);
  }
  const int64_t i = group * kStrip + v * kLanes;
  if (header.scale_type == kScaleBFloat16) return load(reinterpret_cast<const BFloat16*>(base) + i);
  if (header.scale_type == kScaleFloat) return load(reinterpret_cast<const float*>(base) + i);
  if (header.scale_type == kScaleHalf) return load(reinterpret_cast<const Half*>(base) + i);
  return load_e8m0(base + i);
}

// The scales of all 16 columns.
inline void load_scales(const WoqLayout& at, const PackedHeader& header, const char* strip,
                        int64_t group, float* to) {
  for (int v = 0; v < kStripVectors; ++v)
    store(to + v * kLanes, scale_vector(at, header, strip, group, v));
}

// Zero points of the columns of vector v of a strip; `implied` where there are none.
IPEX_INLINE f32v zero_vector(const WoqLayout& at, const PackedHeader& header, const char* strip,
                             int64_t group, int v, float implied) {
  const char* base = strip + at.zeros;
  const int64_t i = group * kStrip + v * kLanes;
  if (header.zero_kind == kZeroInt8) return to_float(load_bytes(base + i));
  if (header.zero_kind == kZeroFloat) return load(reinterpret_cast<const float*>(base) + i);
  return set1(implied);
}

// Calls f.operator()<format>() for the format of a header.
template <class F>
IPEX_INLINE void with_format(uint32_t format, const F& f) {
  switch (format) {
    case kFormatInt8:
      return f.template operator()<kFormatInt8>();
    case kFormatInt4:
      return f.template operator()<kFormatInt4>();
    case kFormatFp8E4M3:
      return f.template operator()<kFormatFp8E4M3>();
    case kFormatFp8E5M2:
      return f.template operator()<kFormatFp8E5M2>();
    default:  // nf4 and fp4 differ by their table alone
      return f.template operator()<kFormatNf4>();
  }
}

// Asks for what the four strips behind these begin with; called with each of `steps` steps through
// them. All strips end at once, and where the next ones begin is nothing that hardware foresees: it
// would wait for the memory a dozen times.
template <int kStrips>
IPEX_INLINE void fetch_next_strips(const WoqLayout& at, const char* const* strips, int64_t step,
                                   int64_t steps) {
  constexpr int64_t kFirst = 16;  // lines of weights, until the hardware has seen the pattern
  const int64_t lines = at.weights / 64 + kFirst;
  const int64_t begin = step * lines / steps, end = (step + 1) * lines / steps;
  for (int s = 0; s < kStrips; ++s) {
    const char* next = strips[s] + 4 * at.strip_bytes;
    for (int64_t line = begin; line < end; ++line) __builtin_prefetch(next + line * 64, 0, 2);
  }
}

// Bytes from a block to one that is asked for ahead of its use, in the same strip.
inline constexpr int64_t kWeightsAhead = 2048;

// The same without a division for each step, which short steps would wait for: as many lines at
// each of the first steps.
class NextStrips {
 public:
  NextStrips(const WoqLayout& at, int64_t steps)
      : lines_(at.weights / 64 + 16),
        per_((lines_ + steps - 1) / steps),
        bytes_(4 * at.strip_bytes) {}

  template <int kStrips>
  IPEX_INLINE void fetch(const char* const* strips, int64_t step) const {
    const int64_t begin = step * per_;
    const int64_t end = begin + per_ < lines_ ? begin + per_ : lines_;
    for (int64_t line = begin; line < end; ++line)
#pragma GCC unroll 4
      for (int s = 0; s < kStrips; ++s) __builtin_prefetch(strips[s] + bytes_ + line * 64, 0, 2);
  }

 private:
  const int64_t lines_, per_, bytes_;
};

// Bytes from `count` strips to those that come after them; 0 if both are too much for L2.
inline int64_t fetch_distance(const WoqLayout& at, int64_t count) {
  const int64_t bytes = count * at.strip_bytes;
  return bytes <= 512 * 1024 ? bytes : 0;
}

// The strips after the ones that tiles of rows multiply. The first tile reads its weights from
// memory, the others from L2; these fetch what follows bit by bit, or the memory would rest.
struct FollowingStrips {
  // Bytes from a strip's weights to what is fetched with its first block, and from there to what is
  // fetched with the next one. With 0 the first line is fetched, which is there already.
  int64_t begin = 0, step = 0;

  // For the tile `tile` of `tiles`.
  static FollowingStrips of(const WoqLayout& at, int64_t tile, int64_t tiles) {
    if (tile == 0) return {};
    const int64_t distance = fetch_distance(at, 4), weights = at.strip_bytes - at.weights;
    if (distance == 0) return {};
    return {distance + (tile - 1) * weights / (tiles - 1), kBlockBytes / (tiles - 1)};
  }
  IPEX_INLINE void fetch(const char* weights, int64_t block) const {
    __builtin_prefetch(weights + begin + block * step, 0, 2);
  }
};

// Calls f(first row, rows, tile, tiles) for tiles of at most `most` rows: as many rows each, in
// multiples of `unit`, of which `most` is one.
template <class F>
IPEX_INLINE void by_tiles(int64_t rows, int64_t most, int64_t unit, const F& f) {
  const int64_t tiles = (rows + most - 1) / most;
  for (int64_t tile = 0, r = 0, n; tile < tiles; ++tile, r += n) {
    const int64_t left = rows - r;
    n = woq_round_up((left + tiles - tile - 1) / (tiles - tile), unit);
    if (n > left) n = left;
    f(r, n, tile, tiles);
  }
}

}  // namespace
}  // namespace ipex
