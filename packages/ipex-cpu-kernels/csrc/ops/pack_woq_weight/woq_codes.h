// SPDX-License-Identifier: Apache-2.0
// Where the codes of a quantized weight lie, plain and packed. For the glue that moves them.
#pragma once

#include <cstdint>

#include "woq_linear/woq_format.h"

namespace ipex {

// Place of element k of a column within the four bytes it has in a block: nibbles are counted from
// the low one of the first byte.
inline constexpr uint8_t kNibblePlace[2][8] = {{0, 4, 1, 5, 2, 6, 3, 7}, {0, 2, 4, 6, 1, 3, 5, 7}};
inline constexpr uint8_t kBytePlace[2][4] = {{0, 2, 1, 3}, {0, 1, 2, 3}};

// The codes of one output feature in the plain weight.
struct PlainRow {
  const uint8_t* codes;
  bool nibbles;
  uint8_t at(int64_t k) const {
    if (!nibbles) return codes[k];
    return static_cast<uint8_t>(k % 2 ? codes[k / 2] >> 4 : codes[k / 2] & 15);
  }
};

// The codes of one output feature in a strip whose weights begin at `column`: first block plus four
// bytes for each column before this one.
template <class Byte>
struct PackedRow {
  Byte* column;
  bool nibbles;
  int order;
  uint8_t flip;  // int8 codes of order vnni have 128 added

  PackedRow(Byte* weights, int64_t index, const PackedHeader& header)
      : column(weights + 4 * index),
        nibbles(woq_is_nibble(header.format)),
        order(header.order),
        flip(header.format == kFormatInt8 && header.order == kOrderVnni ? 0x80 : 0) {}

  // Call once for each k on zeroed memory.
  void put(int64_t k, uint8_t code) const {
    if (nibbles) {
      const int place = kNibblePlace[order][k % 8];
      Byte& byte = column[k / 8 * kBlockBytes + place / 2];
      byte = static_cast<uint8_t>(byte | code << (place % 2 * 4));
    } else {
      column[k / 4 * kBlockBytes + kBytePlace[order][k % 4]] = code ^ flip;
    }
  }
  uint8_t at(int64_t k) const {
    if (!nibbles) return column[k / 4 * kBlockBytes + kBytePlace[order][k % 4]] ^ flip;
    const int place = kNibblePlace[order][k % 8];
    return (column[k / 8 * kBlockBytes + place / 2] >> (place % 2 * 4)) & 15;
  }
};

}  // namespace ipex
