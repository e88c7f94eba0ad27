// SPDX-License-Identifier: Apache-2.0
// The packed format of quantized linear weights; ipex_core.packing.woq describes the same in
// Python.
//
// PackedHeader, the permutation of K if there is one (int32 [K]: packed position -> input feature),
// then strips of 16 output features, an even number of them. A strip is contiguous:
//   scales   [G][16], or [G] where scale_columns is 1
//   zeros    [G][16], int8 or float, if there are any
//   sums     [G][16] int32, order vnni only: sum over the group of the integer values below
//   weights  64-byte blocks of 16 columns x 8 (nibbles) or 4 (bytes) elements of K
// Each part, the permutation included, is padded to 64 bytes. All padding is zero: output features
// behind N have the scale 0, and elements behind K meet activations that are padded with 0.
//
// Order dot, for float activations: 16-bit lane i of a block is column i / 2 with K of parity
// i % 2; element j of the lane, counted from the low bits, is k = 2 j + i % 2. So a 32-bit word is
// one column: nibbles k0 k2 k4 k6 k1 k3 k5 k7, or bytes k0 k2 k1 k3.
// Order vnni, for int8 activations: byte b of a block is column b / 4; nibbles: the low one is
// k = b % 4, the high one k = 4 + b % 4; bytes: k = b % 4. int8 codes are stored as q + 128, so
// that the weight is the unsigned operand.
//
// A weight is scale * value. Values: int4 code - zero (8 without zeros), int8 code - zero (0
// without zeros), nf4 and fp4 table[code], fp8 the number itself. The integer values of order vnni:
// the same for int4 and int8, round(127 table[code]) for nf4, 2 table[code] for fp4.
#pragma once

#include "linear/packed.h"

namespace ipex {

inline constexpr uint32_t kFormatInt8 = 3;
inline constexpr uint32_t kFormatInt4 = 4;
inline constexpr uint32_t kFormatNf4 = 5;
inline constexpr uint32_t kFormatFp4 = 6;  // e2m1
inline constexpr uint32_t kFormatFp8E4M3 = 7;
inline constexpr uint32_t kFormatFp8E5M2 = 8;

inline constexpr uint8_t kScaleFloat = 0;
inline constexpr uint8_t kScaleBFloat16 = 1;
inline constexpr uint8_t kScaleHalf = 2;
inline constexpr uint8_t kScaleE8M0 = 3;  // 2^(byte - 127); 255 is NaN

inline constexpr uint8_t kZeroNone = 0;
inline constexpr uint8_t kZeroInt8 = 1;
inline constexpr uint8_t kZeroFloat = 2;

inline constexpr uint8_t kOrderDot = 0;
inline constexpr uint8_t kOrderVnni = 1;

inline constexpr uint8_t kFlagPermuted = 1;
inline constexpr uint8_t kFlagSpecial =
    2;  // fp8 codes for NaN or infinity, unknown to fast decoders

inline constexpr int64_t kStrip = 16;
inline constexpr int64_t kBlockBytes = 64;

// The values of 4-bit codes. Plain arrays of constants: usable in kernels, which have no
// initializers.
inline constexpr float kNf4Values[16] = {-1.0f,
                                         -0.6961928009986877f,
                                         -0.5250730514526367f,
                                         -0.39491748809814453f,
                                         -0.28444138169288635f,
                                         -0.18477343022823334f,
                                         -0.09105003625154495f,
                                         0.0f,
                                         0.07958029955625534f,
                                         0.16093020141124725f,
                                         0.24611230194568634f,
                                         0.33791524171829224f,
                                         0.44070982933044434f,
                                         0.5626170039176941f,
                                         0.7229568362236023f,
                                         1.0f};
inline constexpr float kFp4Values[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                         -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};
inline constexpr int8_t kNf4Integers[16] = {-127, -88, -67, -50, -36, -23, -12, 0,
                                            10,   20,  31,  43,  56,  71,  92,  127};
inline constexpr int8_t kFp4Integers[16] = {0, 1,  2,  3,  4,  6,  8,  12,
                                            0, -1, -2, -3, -4, -6, -8, -12};

inline bool woq_is_nibble(uint32_t format) { return format >= kFormatInt4 && format <= kFormatFp4; }

// Elements of K in a block.
inline int64_t woq_block_k(uint32_t format) { return woq_is_nibble(format) ? 8 : 4; }

inline int64_t woq_round_up(int64_t value, int64_t to) { return (value + to - 1) / to * to; }

// Where everything is. Offsets of parts are relative to the strip.
struct WoqLayout {
  int64_t strips;       // an even number
  int64_t groups;       // G
  int64_t blocks;       // per strip
  int64_t k_padded;     // blocks * block_k
  int64_t permutation;  // offset in the tensor, 0 without one
  int64_t first_strip;  // offset in the tensor
  int64_t strip_bytes;
  int64_t scales, zeros, sums, weights;  // zeros and sums are 0 if there are none
  int64_t bytes;                         // of the whole tensor
};

inline WoqLayout woq_layout(const PackedHeader& header) {
  WoqLayout at{};
  const int64_t block_k = woq_block_k(header.format);
  at.strips = woq_round_up(header.n, kPackedPanel) / kStrip;
  at.groups = (header.k + header.group - 1) / header.group;
  at.blocks = (header.k + block_k - 1) / block_k;
  at.k_padded = at.blocks * block_k;
  at.first_strip = static_cast<int64_t>(sizeof(PackedHeader));
  if (header.flags & kFlagPermuted) {
    at.permutation = at.first_strip;
    at.first_strip += woq_round_up(header.k * 4, kBlockBytes);
  }
  const int64_t scale_bytes = header.scale_type == kScaleFloat  ? 4
                              : header.scale_type == kScaleE8M0 ? 1
                                                                : 2;
  int64_t end = woq_round_up(at.groups * header.scale_columns * scale_bytes, kBlockBytes);
  if (header.zero_kind != kZeroNone) {
    at.zeros = end;
    const int64_t zero_bytes = header.zero_kind == kZeroFloat ? 4 : 1;
    end += woq_round_up(at.groups * kStrip * zero_bytes, kBlockBytes);
  }
  if (header.order == kOrderVnni) {
    at.sums = end;
    end += at.groups * kStrip * 4;
  }
  at.weights = end;
  at.strip_bytes = end + at.blocks * kBlockBytes;
  at.bytes = at.first_strip + at.strips * at.strip_bytes;
  return at;
}

}  // namespace ipex
