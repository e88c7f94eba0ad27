// SPDX-License-Identifier: Apache-2.0
// The packed format of linear weights; ipex_core.packing.dense describes the same format in Python.
//
// 64-byte header, the same for dense and quantized weights. Dense weights: ceil(N / 32) panels
// follow. Panel: [K][32] for float and Half, [ceil(K / 2)][32][2] for BFloat16. Padding is zero.
// Quantized weights: see woq_linear/woq_format.h. A float weight that was transformed for
// convolution/winograd.h has a format of its own, so that no other op takes it. The format does not
// depend on the ISA level.
#pragma once

#include <cstdint>

namespace ipex {

struct PackedHeader {
  uint32_t magic;
  uint32_t version;
  uint32_t format;  // 0 float, 1 BFloat16, 2 Half, 3 and above: quantized, or kFormatWinograd
  uint32_t panel;
  int64_t n;
  int64_t k;
  // Quantized weights only, zero in a dense one.
  int32_t group;  // elements of K that share a scale
  uint8_t scale_type;
  uint8_t zero_kind;
  uint8_t order;
  uint8_t flags;
  uint8_t scale_columns;  // 16, or 1 where the columns of a strip share their scales
  uint8_t reserved[23];
};
static_assert(sizeof(PackedHeader) == 64);

inline constexpr uint32_t kPackedMagic = 0x57585049;  // "IPXW"
inline constexpr uint32_t kPackedVersion = 1;
inline constexpr int64_t kPackedPanel = 32;
inline constexpr uint32_t kFormatWinograd = 32;

// Neighbors along K that lie side by side.
inline int64_t packed_inner(uint32_t format) { return format == 1 ? 2 : 1; }

inline int64_t packed_bytes(int64_t n, int64_t k, uint32_t format) {
  const int64_t inner = packed_inner(format);
  const int64_t columns = (n + kPackedPanel - 1) / kPackedPanel * kPackedPanel;
  return static_cast<int64_t>(sizeof(PackedHeader)) +
         columns * ((k + inner - 1) / inner * inner) * (format == 0 ? 4 : 2);
}

}  // namespace ipex
