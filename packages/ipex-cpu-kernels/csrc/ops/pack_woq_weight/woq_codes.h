// SPDX-License-Identifier: Apache-2.0
// Where the codes of a quantized weight lie, plain and packed. For the glue that moves them.
#pragma once

#include <cstdint>
#include <cstring>

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

// The four nibbles of 16 bits as the low ones of four bytes, and back.
inline uint32_t spread_nibbles(uint32_t x) {
  x = (x | x << 8) & 0x00ff00ff;
  return (x | x << 4) & 0x0f0f0f0f;
}
inline uint32_t gather_nibbles(uint32_t x) {
  x = (x | x >> 4) & 0x00ff00ff;
  return (x | x >> 8) & 0xffff;
}

// Moves codes that lie in the order of K, a block at a time: the four bytes that a column has in
// it.
struct BlockOrder {
  enum Kind { kEvenFirst, kHalvesMixed, kMiddleSwapped, kSame } kind;
  uint32_t flip;

  BlockOrder(const PackedHeader& header, bool back) {
    const bool dot = header.order == kOrderDot;
    if (woq_is_nibble(header.format))
      kind = dot != back ? kEvenFirst : kHalvesMixed;  // the one undoes the other
    else
      kind = dot ? kMiddleSwapped : kSame;
    flip = header.format == kFormatInt8 && !dot ? 0x80808080 : 0;
  }
  uint32_t operator()(uint32_t x) const {
    if (kind == kEvenFirst)
      return gather_nibbles(x & 0x0f0f0f0f) | gather_nibbles(x >> 4 & 0x0f0f0f0f) << 16;
    if (kind == kHalvesMixed) return spread_nibbles(x & 0xffff) | spread_nibbles(x >> 16) << 4;
    if (kind == kMiddleSwapped) return (x & 0xff0000ff) | (x & 0xff00) << 8 | (x >> 8 & 0xff00);
    return x ^ flip;
  }
  // `blocks` blocks of the columns 0 .. count: from rows that lie `row` bytes apart, or back.
  template <bool kPack, class Plain, class Packed>
  void move(Plain* plain, int64_t row, Packed* packed, int64_t count, int64_t blocks) const {
    for (int64_t b = 0; b < blocks; ++b)
      for (int64_t c = 0; c < count; ++c) {
        auto* at = plain + c * row + 4 * b;
        auto* in_block = packed + b * kBlockBytes + 4 * c;
        uint32_t word = 0;
        if constexpr (kPack) {
          std::memcpy(&word, at, sizeof(word));
          word = (*this)(word);
          std::memcpy(in_block, &word, sizeof(word));
        } else {
          std::memcpy(&word, in_block, sizeof(word));
          word = (*this)(word);
          std::memcpy(at, &word, sizeof(word));
        }
      }
  }
};

}  // namespace ipex
