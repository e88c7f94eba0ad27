// SPDX-License-Identifier: Apache-2.0
// Names and dtypes of quantized formats, with the checks that packing and unpacking share. The
// texts are as in ipex_core.ops.woq_weight.
#pragma once

#include <algorithm>
#include <string>

#include "ipex/glue/dispatch.h"
#include "woq_linear/woq_format.h"

namespace ipex {

inline constexpr const char* kWoqFormats[] = {"int8", "int4", "nf4", "fp4", "fp8_e4m3", "fp8_e5m2"};

inline uint32_t parse_woq_format(const char* op, const std::string& name) {
  for (uint32_t i = 0; i < 6; ++i)
    if (name == kWoqFormats[i]) return kFormatInt8 + i;
  fail(op, ": format must be one of int8, int4, nf4, fp4, fp8_e4m3, fp8_e5m2, got ", name);
}

inline uint8_t parse_woq_order(const char* op, const std::string& name, uint32_t format) {
  IPEX_CHECK(name == "dot" || name == "vnni", op, ": order must be one of dot, vnni, got ", name);
  const bool fp8 = format >= kFormatFp8E4M3;
  IPEX_CHECK(name == "dot" || !fp8, op, ": order must be dot for format ",
             kWoqFormats[format - kFormatInt8], ", got ", name);
  return name == "dot" ? kOrderDot : kOrderVnni;
}

// Returns the number of elements that share a scale.
inline int32_t check_group_size(const char* op, int64_t size, int64_t k) {
  IPEX_CHECK(size == -1 || size == k || (size >= 16 && size <= 256 && size % 8 == 0), op,
             ": group_size must be -1, in_features = ", k,
             " or a multiple of 8 from 16 to 256, got ", size);
  return static_cast<int32_t>(size == -1 ? k : std::min(size, k));
}

inline ScalarType woq_code_dtype(uint32_t format) {
  if (format == kFormatInt8) return ScalarType::Char;
  if (format == kFormatFp8E4M3) return ScalarType::Float8_e4m3fn;
  if (format == kFormatFp8E5M2) return ScalarType::Float8_e5m2;
  return ScalarType::Byte;
}

// False if scales cannot have this dtype.
inline bool woq_scale_type(ScalarType dtype, uint8_t* type) {
  switch (dtype) {
    case ScalarType::Float:
      *type = kScaleFloat;
      return true;
    case ScalarType::BFloat16:
      *type = kScaleBFloat16;
      return true;
    case ScalarType::Half:
      *type = kScaleHalf;
      return true;
    case ScalarType::Byte:
    case ScalarType::Float8_e8m0fnu:
      *type = kScaleE8M0;
      return true;
    default:
      return false;
  }
}

// Columns of the plain weight.
inline int64_t woq_code_columns(uint32_t format, int64_t k) {
  return woq_is_nibble(format) ? (k + 1) / 2 : k;
}

// Moves the [rows][groups] values of a strip's columns to [groups][16] or back; `valid` columns.
template <class T, bool kPack>
void move_group_values(T* plain, T* strip, int64_t valid, int64_t groups) {
  for (int64_t c = 0; c < valid; ++c)
    for (int64_t g = 0; g < groups; ++g) {
      if constexpr (kPack)
        strip[g * kStrip + c] = plain[c * groups + g];
      else
        plain[c * groups + g] = strip[g * kStrip + c];
    }
}

// The same for values of `size` bytes; `plain` is the value of the first column.
template <bool kPack>
void move_group_bytes(void* plain, void* strip, int64_t valid, int64_t groups, int64_t size) {
  if (size == 4)
    move_group_values<uint32_t, kPack>(static_cast<uint32_t*>(plain), static_cast<uint32_t*>(strip),
                                       valid, groups);
  else if (size == 2)
    move_group_values<uint16_t, kPack>(static_cast<uint16_t*>(plain), static_cast<uint16_t*>(strip),
                                       valid, groups);
  else
    move_group_values<uint8_t, kPack>(static_cast<uint8_t*>(plain), static_cast<uint8_t*>(strip),
                                      valid, groups);
}

inline int64_t woq_scale_bytes(uint8_t type) {
  return type == kScaleFloat ? 4 : type == kScaleE8M0 ? 1 : 2;
}
inline int64_t woq_zero_bytes(uint8_t kind) {
  return kind == kZeroFloat ? 4 : kind == kZeroInt8 ? 1 : 0;
}

}  // namespace ipex
