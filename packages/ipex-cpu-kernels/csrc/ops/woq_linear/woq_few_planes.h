// SPDX-License-Identifier: Apache-2.0
// Few rows of int4, int8 and fp4 weights where the processor multiplies bytes: activations are
// 16-bit fixed point, as in woq_few_int16.h, and each is two signed bytes, 256 * high + low. The
// codes meet both, as the bytes that they are: nothing is converted.
//
// The operand lies in steps of 64 along K: [plane][rows][64], plane 0 the high bytes. Bytes are in
// the order in which blocks have their codes: k0 k4 k1 k5 k2 k6 k3 k7 for nibbles (the low ones
// first), k0 k2 k1 k3 for bytes.
#pragma once

#include "ipex/kernel/gemm_int8.h"
#include "woq_linear/woq_few_float.h"

#if IPEX_HAVE_AVX512_VNNI || IPEX_HAVE_AVX_VNNI

namespace ipex {
namespace {

// The scaled sum of a chunk. `sum` has `implied` times the activations' sum too much.
IPEX_INLINE f32v scaled_planes(i32v high, i32v low, int32_t implied, float x_sum, bool has_zeros,
                               f32v zeros, f32v scale, f32v total) {
  const i32v sum = (high << 8) + low - iset1(implied * static_cast<int32_t>(x_sum));
  f32v value = to_float(sum);
  if (has_zeros) value = fnma(set1(x_sum), zeros, value);
  return fma(scale, value, total);
}

// Codes of fp4 as twice the number plus 12.
inline constexpr int8_t kFp4Bytes[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

// Bytes below 16 as codes of unsigned numbers.
template <uint32_t kFormat>
IPEX_INLINE i32v as_numbers(i32v bytes) {
  if constexpr (kFormat != kFormatFp4) {
    return bytes;
  } else {
    const __m128i table = _mm_loadu_si128(reinterpret_cast<const __m128i*>(kFp4Bytes));
#if IPEX_HAVE_AVX512
    const __m512i all = _mm512_broadcast_i32x4(table);
    return reinterpret_cast<i32v>(_mm512_shuffle_epi8(all, raw(bytes)));
#else
    const __m256i all = _mm256_broadcastsi128_si256(table);
    return reinterpret_cast<i32v>(_mm256_shuffle_epi8(all, raw(bytes)));
#endif
  }
}

template <uint32_t kFormat, int kRows, int kStrips>
void few_planes(const WoqLinearArgs& args, const char* const* strips, int64_t row,
                const FollowingStrips& following, float* c) {
  constexpr bool kNibbles = kFormat != kFormatInt8;
  constexpr int kBlockK = kNibbles ? 8 : 4;
  constexpr int kVectors = kStrips * kStripVectors;
  const PackedHeader& header = args.header;
  const char* x = static_cast<const char*>(args.operand) + row * kWoqPlaneStep;
  const int64_t plane = args.operand_step / 2;
  const bool has_zeros = header.zero_kind != kZeroNone;
  const int32_t implied = !kNibbles ? 128 : kFormat == kFormatFp4 ? 12 : has_zeros ? 0 : 8;
  const f32v unit = set1(kFormat == kFormatFp4 ? 0.5f : 1.0f);
  for (int r = 0; r < kRows; ++r)
    for (int64_t i = 0; i < kStrips * kStrip; i += kLanes) store(c + r * kFewColumns + i, zero());
  const char* weights[kStrips];
  for (int s = 0; s < kStrips; ++s) weights[s] = strips[s] + args.at.weights;
  const int64_t end = args.at.k_padded;
  for (int64_t chunk = 0, k = 0; chunk < args.chunks; ++chunk) {
    const int64_t group = k / header.group, next = (chunk + 1) * args.chunk;
    const int64_t chunk_end = chunk + 1 < args.chunks ? next : end;
    fetch_next_strips<kStrips>(args.at, strips, chunk, args.chunks);
    i32v acc[2][kRows][kVectors];
    for (auto& of_plane : acc)
      for (auto& of_row : of_plane)
        for (auto& sum : of_row) sum = iset1(0);
    for (; k < chunk_end; k += kBlockK) {
      if constexpr (kRows > 1)
#pragma GCC unroll 4
        for (int s = 0; s < kStrips; ++s) following.fetch(weights[s], k / kBlockK);
      i32v first[kVectors], second[kVectors];
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        const char* at = weights[v / kStripVectors] + k / kBlockK * kBlockBytes;
        if constexpr (IPEX_HAVE_AMX) __builtin_prefetch(at + 4096);
        const i32v word = load_words(at + v % kStripVectors * kLanes * 4);
        first[v] = kNibbles ? as_numbers<kFormat>(word & iset1(0x0f0f0f0f))
                            : word ^ iset1(static_cast<int32_t>(0x80808080));
        second[v] = as_numbers<kFormat>((word >> 4) & iset1(0x0f0f0f0f));
      }
      const char* at = x + k / kWoqPlaneStep * args.operand_step + k % kWoqPlaneStep;
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 2
        for (int p = 0; p < 2; ++p) {
          const char* bytes = at + p * plane + r * kWoqPlaneStep;
          int32_t four;
          __builtin_memcpy(&four, bytes, sizeof(four));
          const i32v factor = iset1(four);
#pragma GCC unroll 8
          for (int v = 0; v < kVectors; ++v) acc[p][r][v] = dot4(acc[p][r][v], first[v], factor);
          if constexpr (kNibbles) {
            __builtin_memcpy(&four, bytes + 4, sizeof(four));
            const i32v other = iset1(four);
#pragma GCC unroll 8
            for (int v = 0; v < kVectors; ++v) acc[p][r][v] = dot4(acc[p][r][v], second[v], other);
          }
        }
    }
    for (int s = 0; s < kStrips; ++s) {
#pragma GCC unroll 4
      for (int v = 0; v < kStripVectors; ++v) {
        const f32v scale = scale_vector(args.at, header, strips[s], group, v) * unit;
        const f32v zeros = zero_vector(args.at, header, strips[s], group, v, 0.0f);
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
          const int64_t place = (row + r) * args.chunks + chunk;
          const int at = s * kStripVectors + v;
          float* to = c + r * kFewColumns + s * kStrip + v * kLanes;
          store(to,
                scaled_planes(acc[0][r][at], acc[1][r][at], implied, args.chunk_sums[place],
                              has_zeros, zeros, scale * set1(args.chunk_scales[place]), load(to)));
        }
      }
    }
  }
}

}  // namespace
}  // namespace ipex

#endif  // IPEX_HAVE_AVX512_VNNI || IPEX_HAVE_AVX_VNNI

#if IPEX_HAVE_AMX

namespace ipex {
namespace {

// The same on AMX tiles, for up to 16 rows and two strips: int8 weights are tiles as they lie in
// memory, nibbles become two rows of a tile for each block.
template <bool kNibbles>
class FewByteTiles {
 public:
  FewByteTiles(const WoqLinearArgs& args, const char* const* strips, int64_t row, int64_t rows,
               int64_t ahead, float* c)
      : args_(args), strips_(strips), row_(row), rows_(rows), ahead_(ahead), c_(c) {}

  // c[row][strip][16].
  void run() {
    const int64_t steps = args_.at.k_padded / kWoqPlaneStep;
    const int64_t chunk_steps = args_.chunks > 1 ? args_.chunk / kWoqPlaneStep : steps;
    const char* x = static_cast<const char*>(args_.operand) + row_ * kWoqPlaneStep;
    int64_t chunk = 0, left = chunk_steps;
    clear();
    tile_fence(x);
    for (int64_t s = -kLag; s < steps; ++s) {
      if (s + kLag < steps) decode(s + kLag, steps);
      if (s < 0) continue;
      multiply(x + s * args_.operand_step, s);
      if (--left > 0 && s + 1 < steps) continue;
      take(sums_[chunk % 2]);
      left = chunk_steps;
      if (chunk > 0) scale(chunk - 1);
      ++chunk;
    }
    scale(chunk - 1);
  }

 private:
  // Steps that decoding is ahead; decoded steps that are kept.
  static constexpr int64_t kLag = 2, kRing = 4;
  static constexpr int64_t kStepBytes = kWoqPlaneStep * kStrip / (kNibbles ? 2 : 1);
  static constexpr int64_t kStride = 4 * kStrip;  // [row][strip][plane][16]

  IPEX_INLINE void decode(int64_t step, int64_t steps) {
    if (!ahead_) fetch_next_strips<2>(args_.at, strips_, step, steps);
#pragma GCC unroll 2
    for (int s = 0; s < 2; ++s) {
      const char* from = strips_[s] + args_.at.weights + step * kStepBytes;
#pragma GCC unroll 16
      for (int64_t b = 0; b < kStepBytes / kBlockBytes; ++b) {
        __builtin_prefetch(from + b * kBlockBytes + 4096);
        if (ahead_) __builtin_prefetch(from + b * kBlockBytes + ahead_, 0, 2);
        if constexpr (kNibbles) {
          const __m512i word = _mm512_loadu_si512(from + b * kBlockBytes);
          const __m512i low = _mm512_set1_epi8(15);
          char* to = ring_[step % kRing][s] + 2 * b * 64;
          _mm512_store_si512(to, _mm512_and_si512(word, low));
          _mm512_store_si512(to + 64, _mm512_and_si512(_mm512_srli_epi16(word, 4), low));
        }
      }
    }
    tile_fence(ring_);
  }

  static IPEX_INLINE void clear() {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }

  IPEX_INLINE void multiply(const char* x, int64_t step) const {
    _tile_loadd(4, x, kWoqPlaneStep);
    _tile_loadd(5, x + args_.operand_step / 2, kWoqPlaneStep);
    if constexpr (kNibbles) {
      _tile_loadd(6, ring_[step % kRing][0], 64);
      _tile_dpbsud(0, 4, 6);
      _tile_dpbsud(1, 5, 6);
      _tile_loadd(7, ring_[step % kRing][1], 64);
      _tile_dpbsud(2, 4, 7);
      _tile_dpbsud(3, 5, 7);
    } else {
      const int64_t at = args_.at.weights + step * kStepBytes;
      _tile_loadd(6, strips_[0] + at, 64);
      _tile_dpbssd(0, 4, 6);
      _tile_dpbssd(1, 5, 6);
      _tile_loadd(7, strips_[1] + at, 64);
      _tile_dpbssd(2, 4, 7);
      _tile_dpbssd(3, 5, 7);
    }
  }

  // Sums of a chunk out of the tiles.
  static IPEX_INLINE void take(int32_t* to) {
    _tile_stored(0, to, kStride * 4);
    _tile_stored(1, to + kStrip, kStride * 4);
    _tile_stored(2, to + 2 * kStrip, kStride * 4);
    _tile_stored(3, to + 3 * kStrip, kStride * 4);
    tile_fence(to);
    clear();
  }

  IPEX_INLINE void scale(int64_t chunk) {
    const PackedHeader& header = args_.header;
    const bool has_zeros = header.zero_kind != kZeroNone;
    const int32_t implied = kNibbles && !has_zeros ? 8 : 0;
    const int64_t group = args_.at.groups > 1 ? chunk : 0;
    const int32_t* sums = sums_[chunk % 2];
#pragma GCC unroll 2
    for (int s = 0; s < 2; ++s) {
      const f32v scales = scale_vector(args_.at, header, strips_[s], group, 0);
      const f32v zeros = zero_vector(args_.at, header, strips_[s], group, 0, 0.0f);
      for (int64_t r = 0; r < rows_; ++r) {
        const int64_t place = (row_ + r) * args_.chunks + chunk;
        const int32_t* of_row = sums + r * kStride + s * 2 * kStrip;
        float* to = c_ + r * kFewColumns + s * kStrip;
        store(to, scaled_planes(load_ints(of_row), load_ints(of_row + kStrip), implied,
                                args_.chunk_sums[place], has_zeros, zeros,
                                scales * set1(args_.chunk_scales[place]),
                                chunk == 0 ? zero() : load(to)));
      }
    }
  }

  const WoqLinearArgs& args_;
  const char* const* strips_;
  const int64_t row_, rows_, ahead_;
  float* const c_;
  alignas(64) char ring_[kNibbles ? kRing : 1][2][16 * 64];
  alignas(64) int32_t sums_[2][16 * kStride];
};

}  // namespace
}  // namespace ipex

#endif  // IPEX_HAVE_AMX
