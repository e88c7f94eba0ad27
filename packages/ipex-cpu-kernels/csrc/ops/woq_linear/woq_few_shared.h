// SPDX-License-Identifier: Apache-2.0
// More rows than registers have sums for: the codes of a piece of a strip are decoded once, to
// where L1 has them, and multiplied by all rows, a few at a time. For levels with 16 registers;
// with 32 there are sums for eight rows, and decoding takes less of the time.
#pragma once

#include "ipex/kernel/gemm_int8.h"
#include "woq_linear/woq_few_int16.h"

namespace ipex {
namespace {

inline constexpr bool kHaveShared = kLanes <= 8;

// Rows of a call, whose sums and activations stay in L1 beside the codes.
inline constexpr int64_t kSharedRows = 32;

// Rows of a register tile.
inline constexpr int kPairRows = kLanes == 8 ? 4 : 2;
inline constexpr int kFloatRows = kLanes == 8 ? 6 : 3;

// Calls f.operator()<n>(r) for all rows, n of them from r on, at most kMost. The last two tiles are
// of one size: a tile of one row has too few sums.
template <int kMost, class F>
IPEX_INLINE void by_rows(int64_t rows, const F& f) {
  for (int64_t r = 0, n; r < rows; r += n) {
    const int64_t left = rows - r;
    n = left <= kMost ? left : left < 2 * kMost ? (left + 1) / 2 : kMost;
    with_rows<kMost>(n, [&]<int kRows>() IPEX_LAMBDA { f.template operator()<kRows>(r); });
  }
}

inline void clear_rows(int64_t rows, float* c) {
  for (int64_t i = 0; i < rows * kFewColumns; i += kLanes) store(c + i, zero());
}

// The sums of kRows rows and one strip over `count` pairs of K.
template <int kRows>
IPEX_INLINE void multiply_pairs(const int32_t* pairs, int64_t count, const int16_t* x,
                                int64_t stride, i32v (&acc)[kRows][kStripVectors]) {
  for (auto& of_row : acc)
    for (auto& sum : of_row) sum = iset1(0);
#pragma GCC unroll 2
  for (int64_t i = 0; i < count; ++i) {
    i32v codes[kStripVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kStripVectors; ++v) codes[v] = load_ints(pairs + i * kStrip + v * kLanes);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      int32_t pair;
      __builtin_memcpy(&pair, x + r * stride + 2 * i, sizeof(pair));
      const i32v factor = iset1(pair);
#pragma GCC unroll 4
      for (int v = 0; v < kStripVectors; ++v) acc[r][v] = add_pairs(acc[r][v], codes[v], factor);
    }
  }
}

// c[row][strip][16] of up to kSharedRows rows and four strips.
template <uint32_t kFormat>
void shared_int16(const WoqLinearArgs& args, const StripList& strips, int64_t row, int64_t rows,
                  float* c) {
  constexpr int kBlockK = PairCodes<kFormat>::kBlockK;
  constexpr int kPairs = PairCodes<kFormat>::kPairs;
  alignas(64) int32_t decoded[kWoqChunk / 2 * kStrip];
  const PairCodes<kFormat> codes{};
  const auto* x = static_cast<const int16_t*>(args.operand) + row * args.operand_stride;
  const int64_t end = args.at.k_padded;
  const int64_t stride = args.operand_stride;
  const bool one_group = args.at.groups == 1;
  const NextStrips following(args.at, args.chunks);
  clear_rows(rows, c);
  for (int64_t chunk = 0, k = 0; chunk < args.chunks; ++chunk) {
    const int64_t group = one_group ? 0 : chunk, next = (chunk + 1) * args.chunk;
    const int64_t blocks = ((next < end ? next : end) - k + kBlockK - 1) / kBlockK;
    following.fetch<4>(strips.at, chunk);
    for (int s = 0; s < 4; ++s) {
      const char* from = strips.at[s] + args.at.weights + k / kBlockK * kBlockBytes;
      for (int64_t b = 0; b < blocks; ++b) {
        // The same place of the next chunk, which is wanted after products of all strips.
        __builtin_prefetch(from + (b + blocks) * kBlockBytes, 0, 2);
#pragma GCC unroll 4
        for (int v = 0; v < kStripVectors; ++v) {
          i32v pairs[kPairs];
          codes.decode(load_words(from + b * kBlockBytes + v * kLanes * 4), pairs);
#pragma GCC unroll 4
          for (int j = 0; j < kPairs; ++j)
            store_ints(decoded + (b * kPairs + j) * kStrip + v * kLanes, pairs[j]);
        }
      }
      const PairFinish<kFormat> finish(args, strips.at[s], chunk, group);
      by_rows<kPairRows>(rows, [&]<int kRows>(int64_t r) IPEX_LAMBDA {
        i32v acc[kRows][kStripVectors];
        multiply_pairs<kRows>(decoded, blocks * kPairs, x + r * stride + k, stride, acc);
        finish.add(row + r, acc, c + r * kFewColumns + s * kStrip);
      });
    }
    k += blocks * kBlockK;
  }
}

// Blocks of one vector of columns of a strip as float weights: [k][16].
template <uint32_t kFormat>
IPEX_INLINE void decode_floats(const char* from, int64_t blocks, f32v scale, bool offset,
                               f32v zeros, const Table16& table, float* to) {
  constexpr bool kNibbles = kFormat == kFormatInt4 || kFormat == kFormatNf4;
  constexpr bool kFp8 = kFormat == kFormatFp8E4M3 || kFormat == kFormatFp8E5M2;
  constexpr int kBlockK = kNibbles ? 8 : 4;
  const f32v raised = scale * set1(kRaised<kFormat>);
  for (int64_t b = 0; b < blocks; ++b, to += kBlockK * kStrip) {
    const i32v word = load_words(from + b * kBlockBytes);
    __builtin_prefetch(from + (b + blocks) * kBlockBytes, 0, 2);
    const auto put = [&](const auto& decode, f32v factor) IPEX_LAMBDA {
#pragma GCC unroll 8
      for (int j = 0; j < kBlockK; ++j) {
        f32v value = decode(j);
        if (offset) value = value - zeros;
        store(to + (kNibbles ? kNibbleK[j] : kByteK[j % 4]) * kStrip, value * factor);
      }
    };
    const auto exact = [&](int j) IPEX_LAMBDA { return element<kFormat, false>(word, j, table); };
    if constexpr (!kFp8) {
      put(exact, scale);
    } else {
      if (__builtin_expect(!has_tiny_fp8<kFormat>(word), 1))
        put([&](int j) IPEX_LAMBDA { return raised_fp8<kFormat>(word, j); }, raised);
      else
        put(exact, scale);
    }
  }
}

// Adds the products of kRows rows and one strip over `count` elements of K to c.
template <int kRows>
IPEX_INLINE void multiply_floats(const float* weights, int64_t count, const float* x,
                                 int64_t stride, float* c) {
  f32v acc[kRows][kStripVectors];
#pragma GCC unroll 6
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < kStripVectors; ++v) acc[r][v] = load(c + r * kFewColumns + v * kLanes);
#pragma GCC unroll 2
  for (int64_t i = 0; i < count; ++i) {
    f32v w[kStripVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kStripVectors; ++v) w[v] = load(weights + i * kStrip + v * kLanes);
#pragma GCC unroll 6
    for (int r = 0; r < kRows; ++r) {
      const f32v factor = set1(x[r * stride + i]);
#pragma GCC unroll 4
      for (int v = 0; v < kStripVectors; ++v) acc[r][v] = fma(factor, w[v], acc[r][v]);
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < kStripVectors; ++v) store(c + r * kFewColumns + v * kLanes, acc[r][v]);
}

// The same in float, with zero points taken off each code.
template <uint32_t kFormat>
void shared_float(const WoqLinearArgs& args, const StripList& strips, int64_t row, int64_t rows,
                  float* c) {
  constexpr bool kNibbles = kFormat == kFormatInt4 || kFormat == kFormatNf4;
  constexpr int kBlockK = kNibbles ? 8 : 4;
  constexpr int64_t kPiece = 128;
  alignas(64) float decoded[kPiece * kStrip];
  const PackedHeader& header = args.header;
  const Table16 table(kFormat == kFormatInt4 ? kInt4Values : nibble_values(header));
  // What has to be subtracted beside the zero points.
  constexpr float kTableTakes = kTaken<kFormat>;
  const bool offset = header.zero_kind != kZeroNone || kImpliedZero<kFormat> != 0.0f;
  const auto* x = static_cast<const float*>(args.operand) + row * args.operand_stride;
  const int64_t end = args.at.k_padded;
  const NextStrips following(args.at, (end + kPiece - 1) / kPiece);
  clear_rows(rows, c);
  int64_t group = 0;
  for (int64_t k = 0; k < end;) {
    const int64_t group_end = group + 1 < args.at.groups ? (group + 1) * header.group : end;
    const int64_t piece_end = group_end - k < kPiece ? group_end : k + kPiece;
    const int64_t count = piece_end - k;
    following.fetch<4>(strips.at, k / kPiece);
    for (int s = 0; s < 4; ++s) {
      const char* from = strips.at[s] + args.at.weights + k / kBlockK * kBlockBytes;
      for (int v = 0; v < kStripVectors; ++v) {
        f32v zeros = zero();
        if (offset)
          zeros = zero_vector(args.at, header, strips.at[s], group, v, kImpliedZero<kFormat>) -
                  set1(kTableTakes);
        decode_floats<kFormat>(from + v * kLanes * 4, count / kBlockK,
                               scale_vector(args.at, header, strips.at[s], group, v), offset, zeros,
                               table, decoded + v * kLanes);
      }
      by_rows<kFloatRows>(rows, [&]<int kRows>(int64_t r) IPEX_LAMBDA {
        multiply_floats<kRows>(decoded, count, x + r * args.operand_stride + k, args.operand_stride,
                               c + r * kFewColumns + s * kStrip);
      });
    }
    k = piece_end;
    if (k >= group_end) ++group;
  }
}

}  // namespace
}  // namespace ipex
