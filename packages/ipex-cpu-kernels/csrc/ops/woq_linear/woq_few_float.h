// SPDX-License-Identifier: Apache-2.0
// Few rows in float: each code is decoded as it is read and multiplied by the activations in
// registers.
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

// Where the strips of a call begin.
struct StripList {
  const char* at[4];
};

// c[row][strip][16] of kRows rows and kStrips strips.
template <uint32_t kFormat, int kRows, int kStrips>
void few_float(const WoqLinearArgs& args, const char* const* strips, int64_t row, float* c) {
  constexpr bool kNibbles = kFormat == kFormatInt4 || kFormat == kFormatNf4;
  constexpr int kBlockK = kNibbles ? 8 : 4;
  constexpr int kVectors = kStrips * kStripVectors;
  const PackedHeader& header = args.header;
  const Table16 table(nibble_values(header));
  const float* x = static_cast<const float*>(args.operand) + row * args.operand_stride;
  const bool offset = header.zero_kind != kZeroNone || kImpliedZero<kFormat> != 0.0f;
  for (int r = 0; r < kRows; ++r)
    for (int64_t i = 0; i < kStrips * kStrip; i += kLanes) store(c + r * kFewColumns + i, zero());
  const char* weights[kStrips];
  for (int s = 0; s < kStrips; ++s) weights[s] = strips[s] + args.at.weights;
  const int64_t end = args.at.k_padded;
  for (int64_t g = 0, k = 0; g < args.at.groups; ++g) {
    const int64_t next = (g + 1) * header.group;
    const int64_t group_end = next < end ? next : end;
    f32v acc[kRows][kVectors];
    for (auto& of_row : acc)
      for (auto& sum : of_row) sum = zero();
    for (; k < group_end; k += kBlockK) {
      i32v word[kVectors];
#pragma GCC unroll 4
      for (int s = 0; s < kStrips; ++s)
#pragma GCC unroll 4
        for (int v = 0; v < kStripVectors; ++v)
          word[s * kStripVectors + v] =
              load_words(weights[s] + k / kBlockK * kBlockBytes + v * kLanes * 4);
#pragma GCC unroll 8
      for (int j = 0; j < kBlockK; ++j) {
        const int64_t at = k + (kNibbles ? kNibbleK[j] : kByteK[j % 4]);
        f32v value[kVectors];
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) value[v] = element<kFormat, false>(word[v], j, table);
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
          const f32v factor = set1(x[r * args.operand_stride + at]);
#pragma GCC unroll 8
          for (int v = 0; v < kVectors; ++v) acc[r][v] = fma(factor, value[v], acc[r][v]);
        }
      }
    }
    for (int s = 0; s < kStrips; ++s) {
#pragma GCC unroll 4
      for (int v = 0; v < kStripVectors; ++v) {
        const f32v scale = scale_vector(args.at, header, strips[s], g, v);
        const f32v zeros = zero_vector(args.at, header, strips[s], g, v, kImpliedZero<kFormat>);
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
          f32v value = acc[r][s * kStripVectors + v];
          if (offset) value = fnma(set1(args.sums[(row + r) * args.at.groups + g]), zeros, value);
          float* to = c + r * kFewColumns + s * kStrip + v * kLanes;
          store(to, fma(scale, value, load(to)));
        }
      }
    }
  }
}

}  // namespace
}  // namespace ipex
