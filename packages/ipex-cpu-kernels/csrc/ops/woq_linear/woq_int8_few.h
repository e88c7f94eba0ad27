// SPDX-License-Identifier: Apache-2.0
// Few rows: codes are decoded to unsigned bytes as they are read and meet int8 activations. The
// zero points come off once for each chunk.
#pragma once

#include "woq_linear/woq_int8_decode.h"

namespace ipex {
namespace {

// Columns of C: four strips.
inline constexpr int64_t kInt8Columns = 4 * kStrip;

// Rows and strips at a time, so that the sums stay in registers.
template <int kRows>
inline constexpr int kInt8Strips = kLanes == 16                ? 4
                                   : kLanes == 8 && kRows == 1 ? 2
                                                               : 1;

// Where the activations of a row are from some k on.
IPEX_INLINE i32v four_codes(const uint8_t* p) {
  int32_t four;
  std::memcpy(&four, p, sizeof(four));
  return iset1(four);
}

#if !(IPEX_HAVE_AVX512_VNNI || IPEX_HAVE_AVX_VNNI)

typedef int16_t Words __attribute__((vector_size(kLanes * 4)));

// acc + the four products of unsigned and signed bytes in each lane.
IPEX_INLINE i32v dot4(i32v acc, i32v u, i32v a) {
  const Words words = reinterpret_cast<Words>(a);
  const i32v a_even = reinterpret_cast<i32v>((words << 8) >> 8);
  const i32v a_odd = reinterpret_cast<i32v>(words >> 8);
  const i32v u_even = u & iset1(0x00ff00ff);
  const i32v u_odd = (u >> 8) & iset1(0x00ff00ff);
  return acc + multiply_add16(u_even, a_even) + multiply_add16(u_odd, a_odd);
}

#endif

#if IPEX_HAVE_AVX2 && !(IPEX_HAVE_AVX512_VNNI || IPEX_HAVE_AVX_VNNI)

// 16-bit sums of two products of unsigned and signed bytes: saturate for bytes, not for nibbles.
IPEX_INLINE Words pairs16(i32v u, i32v a) {
#if IPEX_HAVE_AVX512
  return reinterpret_cast<Words>(_mm512_maddubs_epi16(raw(u), raw(a)));
#else
  return reinterpret_cast<Words>(_mm256_maddubs_epi16(raw(u), raw(a)));
#endif
}

// kBlocks blocks of nibbles, at most 4: eight 16-bit sums of two products of at most 15 * 128 fit
// 16 bits.
template <int kBlocks, int kRows, int kStrips>
IPEX_INLINE void add_nibbles(const char* const* weights, int64_t block, const uint8_t* x,
                             int64_t stride, i32v (&acc)[kRows][kStrips * kStripVectors]) {
#pragma GCC unroll 4
  for (int s = 0; s < kStrips; ++s)
#pragma GCC unroll 4
    for (int v = 0; v < kStripVectors; ++v) {
      i32v low[kBlocks], high[kBlocks];
#pragma GCC unroll 4
      for (int b = 0; b < kBlocks; ++b) {
        const i32v word = load_ints(weights[s] + (block + b) * kBlockBytes + v * kLanes * 4);
        low[b] = low_nibbles(word);
        high[b] = high_nibbles(word);
      }
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        const uint8_t* a = x + r * stride + block * 8;
        Words sum = {};
#pragma GCC unroll 4
        for (int b = 0; b < kBlocks; ++b)
          sum +=
              pairs16(low[b], four_codes(a + 8 * b)) + pairs16(high[b], four_codes(a + 8 * b + 4));
        i32v& to = acc[r][s * kStripVectors + v];
        to = to + multiply_add16(reinterpret_cast<i32v>(sum), iset1(0x00010001));
      }
    }
}

#endif

// One block of any kind.
template <Codes kCodes, int kRows, int kStrips>
IPEX_INLINE void add_block(const char* const* weights, int64_t block, const uint8_t* x,
                           int64_t stride, const ByteTable& table,
                           i32v (&acc)[kRows][kStrips * kStripVectors]) {
  constexpr int kVectors = kStrips * kStripVectors;
  constexpr int kBlockK = kCodes == Codes::kBytes ? 4 : 8;
  i32v low[kVectors], high[kVectors];
#pragma GCC unroll 8
  for (int v = 0; v < kVectors; ++v) {
    const char* at = weights[v / kStripVectors] + block * kBlockBytes;
    const i32v word = load_ints(at + v % kStripVectors * kLanes * 4);
    fetch_ahead<kRows>(at);
    low[v] = kCodes == Codes::kBytes ? word : low_nibbles(word);
    high[v] = kCodes == Codes::kBytes ? word : high_nibbles(word);
    if constexpr (kCodes == Codes::kTable) {
      low[v] = table[low[v]];
      high[v] = table[high[v]];
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
    const uint8_t* a = x + r * stride + block * kBlockK;
    const i32v first = four_codes(a);
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) acc[r][v] = dot4(acc[r][v], low[v], first);
    if constexpr (kCodes != Codes::kBytes) {
      const i32v second = four_codes(a + 4);
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) acc[r][v] = dot4(acc[r][v], high[v], second);
    }
  }
}

// Adds what a chunk gives for kStrips strips to c[kRows][kInt8Columns].
template <Codes kCodes, int kRows, int kStrips>
IPEX_INLINE void finish_chunk(const WoqInt8Args& args, const char* const* strips, int64_t row,
                              int64_t chunk, const i32v (&acc)[kRows][kStrips * kStripVectors],
                              float* c) {
  // Zero points of the unsigned codes: int8 is stored with 128 added, and so are tables here.
  const int32_t implied = kCodes != Codes::kNibbles            ? 128
                          : args.header.zero_kind == kZeroNone ? 8
                                                               : 0;
  const int64_t group = group_of(args, chunk);
  alignas(64) float scales[kStrip];
  alignas(64) int32_t zeros[kStrip];
  const bool has_zeros = args.header.zero_kind != kZeroNone;
  for (int s = 0; s < kStrips; ++s) {
    chunk_scales(args, strips[s], group, scales);
    if (has_zeros) chunk_zeros(args, strips[s], group, implied, zeros);
    for (int r = 0; r < kRows; ++r) {
      const int64_t place = (row + r) * args.chunks + chunk;
      const i32v x_sum = iset1(args.sums[place]);
      const i32v same = iset1(implied * args.sums[place]);  // for all columns
      const f32v x_scale = set1(args.scales[place]);
      const int32_t x_zero = args.zeros[place];
#pragma GCC unroll 4
      for (int v = 0; v < kStripVectors; ++v) {
        i32v sum = acc[r][s * kStripVectors + v];
        sum = sum - (has_zeros ? x_sum * load_ints(zeros + v * kLanes) : same);
        if (x_zero)
          sum = sum - iset1(x_zero) * load_ints(stored_sums(args, strips[s], group) + v * kLanes);
        float* to = c + r * kInt8Columns + s * kStrip + v * kLanes;
        store(to, fma(x_scale * load(scales + v * kLanes), to_float(sum), load(to)));
      }
    }
  }
}

template <Codes kCodes, int kRows, int kStrips>
void few_int8(const WoqInt8Args& args, const ByteTable& table, const char* const* strips,
              int64_t row, const FollowingStrips& following, float* c) {
  constexpr int kBlockK = kCodes == Codes::kBytes ? 4 : 8;
  const uint8_t* x = args.codes + row * args.codes_stride;
  for (int r = 0; r < kRows; ++r)
    for (int64_t i = 0; i < kStrips * kStrip; i += kLanes) store(c + r * kInt8Columns + i, zero());
  const char* weights[kStrips];
  for (int s = 0; s < kStrips; ++s) weights[s] = strips[s] + args.at.weights;
  int64_t block = 0;
  for (int64_t chunk = 0; chunk < args.chunks; ++chunk) {
    const int64_t next = (chunk + 1) * args.chunk / kBlockK;
    const int64_t end = chunk + 1 < args.chunks ? next : args.at.blocks;
    i32v acc[kRows][kStrips * kStripVectors];
    for (auto& of_row : acc)
      for (auto& sum : of_row) sum = iset1(0);
    fetch_next_strips<kStrips>(args.at, strips, chunk, args.chunks);
#if IPEX_HAVE_AVX2 && !(IPEX_HAVE_AVX512_VNNI || IPEX_HAVE_AVX_VNNI)
    if constexpr (kCodes == Codes::kNibbles) {
      for (; block + 4 <= end; block += 4)
        add_nibbles<4, kRows, kStrips>(weights, block, x, args.codes_stride, acc);
      for (; block < end; ++block)
        add_nibbles<1, kRows, kStrips>(weights, block, x, args.codes_stride, acc);
    }
#endif
    for (; block < end; ++block) {
      if constexpr (kRows > 1)
#pragma GCC unroll 4
        for (int s = 0; s < kStrips; ++s) following.fetch(weights[s], block);
      add_block<kCodes, kRows, kStrips>(weights, block, x, args.codes_stride, table, acc);
    }
    finish_chunk<kCodes, kRows, kStrips>(args, strips, row, chunk, acc, c);
  }
}

// All columns of two panels (four strips) for up to 4 rows.
inline void few_rows_int8(const WoqInt8Args& args, const ByteTable& table,
                          const char* const* strips, int64_t row, int64_t rows,
                          const FollowingStrips& following, float* c) {
  with_codes(args.header.format, [&]<Codes kCodes>() {
    with_rows<4>(rows, [&]<int kRows>() IPEX_LAMBDA {
      constexpr int kStrips = kInt8Strips<kRows>;
      for (int s = 0; s < 4; s += kStrips)
        few_int8<kCodes, kRows, kStrips>(args, table, strips + s, row, following, c + s * kStrip);
    });
  });
}

}  // namespace
}  // namespace ipex
