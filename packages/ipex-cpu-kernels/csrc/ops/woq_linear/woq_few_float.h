// SPDX-License-Identifier: Apache-2.0
// Few rows in float: each code is decoded as it is read and multiplied by the activations in
// registers. Zero points are subtracted from sums, not from each code. Activations of one sign make
// such sums large and their difference small, so sums are short, and int4 codes are taken minus 8
// where a table gives them, which leaves little to subtract.
#pragma once

#include "woq_linear/woq_decode.h"
#include "woq_linear/woq_linear.h"

namespace ipex {
namespace {

// Columns of C in all kernels for few rows: four strips.
inline constexpr int64_t kFewColumns = 4 * kStrip;

// Strips at a time: as many as give enough independent sums and fit the registers.
template <int kRows>
inline constexpr int kFewStrips = kLanes == 16 ? 4
                                  : kRows == 1 ? 2
                                               : 1;

// Elements of K that are summed before the zero point is subtracted. Where codes are not taken
// minus 8, because that would be another instruction for each, sums have to be shorter.
template <uint32_t kFormat>
inline constexpr int64_t kFewDepth = kFormat == kFormatInt4 && !IPEX_HAVE_AVX512 ? 128 : 512;

// What is subtracted from the codes of this format by the table they are looked up in.
template <uint32_t kFormat>
inline constexpr float kTaken = kFormat == kFormatInt4 && IPEX_HAVE_AVX512 ? 8.0f : 0.0f;

// The sum of `count` activations.
inline float sum_activations(const float* x, int64_t count) {
  f32v sum[4] = {zero(), zero(), zero(), zero()};  // independent: one would wait for each addition
  int64_t i = 0;
  for (; i + 4 * kLanes <= count; i += 4 * kLanes)
    for (int j = 0; j < 4; ++j) sum[j] = sum[j] + load(x + i + j * kLanes);
  for (; i + kLanes <= count; i += kLanes) sum[0] = sum[0] + load(x + i);
  if (i < count) sum[1] = sum[1] + load_n(x + i, count - i);
  return reduce_add((sum[0] + sum[1]) + (sum[2] + sum[3]));
}

// Where the strips of a call begin.
struct StripList {
  const char* at[4];
};

// c[row][strip][16] of kRows rows and kStrips strips.
template <uint32_t kFormat, int kRows, int kStrips>
void few_float(const WoqLinearArgs& args, const char* const* strips, int64_t row, float* c) {
  constexpr bool kNibbles = kFormat == kFormatInt4 || kFormat == kFormatNf4;
  constexpr bool kFp8 = kFormat == kFormatFp8E4M3 || kFormat == kFormatFp8E5M2;
  constexpr int kBlockK = kNibbles ? 8 : 4;
  constexpr int kVectors = kStrips * kStripVectors;
  const PackedHeader& header = args.header;
  const Table16 table(kFormat == kFormatInt4 ? kInt4Values : nibble_values(header));
  const float* x = static_cast<const float*>(args.operand) + row * args.operand_stride;
  const bool offset = header.zero_kind != kZeroNone || kImpliedZero<kFormat> != 0.0f;
  for (int r = 0; r < kRows; ++r)
    for (int64_t i = 0; i < kStrips * kStrip; i += kLanes) store(c + r * kFewColumns + i, zero());
  const char* weights[kStrips];
  for (int s = 0; s < kStrips; ++s) weights[s] = strips[s] + args.at.weights;
  const int64_t end = args.at.k_padded;
  const int64_t depth = offset ? kFewDepth<kFormat> : end;
  int64_t g = 0, group_begin = 0, group_end = header.group < end ? header.group : end;
  for (int64_t k = 0; k < end;) {
    const int64_t begin = k, depth_end = group_end - begin < depth ? group_end : begin + depth;
    const bool whole = begin == group_begin && depth_end == group_end;
    f32v acc[kRows][kVectors];
    for (auto& of_row : acc)
      for (auto& sum : of_row) sum = zero();
    for (; k < depth_end; k += kBlockK) {
      i32v word[kVectors];
#pragma GCC unroll 4
      for (int s = 0; s < kStrips; ++s)
#pragma GCC unroll 4
        for (int v = 0; v < kStripVectors; ++v)
          word[s * kStripVectors + v] =
              load_words(weights[s] + k / kBlockK * kBlockBytes + v * kLanes * 4);
      const auto multiply = [&](const auto& decode) IPEX_LAMBDA {
#pragma GCC unroll 8
        for (int j = 0; j < kBlockK; ++j) {
          const int64_t at = k + (kNibbles ? kNibbleK[j] : kByteK[j % 4]);
          f32v value[kVectors];
#pragma GCC unroll 8
          for (int v = 0; v < kVectors; ++v) value[v] = decode(word[v], j);
#pragma GCC unroll 4
          for (int r = 0; r < kRows; ++r) {
            const f32v factor = set1(x[r * args.operand_stride + at]);
#pragma GCC unroll 8
            for (int v = 0; v < kVectors; ++v) acc[r][v] = fma(factor, value[v], acc[r][v]);
          }
        }
      };
      const auto exact = [&](i32v w, int j)
                             IPEX_LAMBDA { return element<kFormat, false>(w, j, table); };
      if constexpr (!kFp8) {
        multiply(exact);
      } else {
        bool tiny = false;
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) tiny |= has_tiny_fp8<kFormat>(word[v]);
        if (__builtin_expect(!tiny, 1))
          multiply([](i32v w, int j) IPEX_LAMBDA { return raised_fp8<kFormat>(w, j); });
        else
          multiply([&](i32v w, int j)
                       IPEX_LAMBDA { return exact(w, j) * set1(1.0f / kRaised<kFormat>); });
      }
    }
    f32v sums[kRows] = {};
    if (offset)
      for (int r = 0; r < kRows; ++r)
        sums[r] = set1(whole ? args.sums[(row + r) * args.at.groups + g]
                             : sum_activations(x + r * args.operand_stride + begin, k - begin));
    for (int s = 0; s < kStrips; ++s) {
#pragma GCC unroll 4
      for (int v = 0; v < kStripVectors; ++v) {
        const f32v scale = scale_vector(args.at, header, strips[s], g, v) * set1(kRaised<kFormat>);
        f32v zeros = zero();
        if (offset)
          zeros = zero_vector(args.at, header, strips[s], g, v, kImpliedZero<kFormat>) -
                  set1(kTaken<kFormat>);
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
          f32v value = acc[r][s * kStripVectors + v];
          if (offset) value = fnma(sums[r], zeros, value);
          float* to = c + r * kFewColumns + s * kStrip + v * kLanes;
          store(to, fma(scale, value, load(to)));
        }
      }
    }
    if (k >= group_end) {
      ++g;
      group_begin = group_end;
      group_end = end - group_end < header.group ? end : group_end + header.group;
    }
  }
}

}  // namespace
}  // namespace ipex
