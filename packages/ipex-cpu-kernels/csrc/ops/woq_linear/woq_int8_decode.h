// SPDX-License-Identifier: Apache-2.0
// Codes of order vnni as bytes, and what belongs to the chunks of a strip.
#pragma once

#include "ipex/kernel/gemm_int8.h"
#include "woq_linear/woq_decode.h"
#include "woq_linear/woq_int8_kernel.h"

namespace ipex {
namespace {

// How bytes come from a block of weights.
enum class Codes { kBytes, kNibbles, kTable };

IPEX_INLINE Codes codes_kind(uint32_t format) {
  return format == kFormatInt8   ? Codes::kBytes
         : format == kFormatInt4 ? Codes::kNibbles
                                 : Codes::kTable;
}

// Calls f.operator()<kind>().
template <class F>
IPEX_INLINE void with_codes(uint32_t format, const F& f) {
  switch (codes_kind(format)) {
    case Codes::kBytes:
      return f.template operator()<Codes::kBytes>();
    case Codes::kNibbles:
      return f.template operator()<Codes::kNibbles>();
    case Codes::kTable:
      return f.template operator()<Codes::kTable>();
  }
}

inline const int8_t* integer_table(uint32_t format) {
  return format == kFormatNf4 ? kNf4Integers : kFp4Integers;
}

// A weight is scale * v * this.
inline float integer_step(uint32_t format) {
  return format == kFormatNf4 ? 1.0f / 127.0f : format == kFormatFp4 ? 0.5f : 1.0f;
}

// table[byte] for each byte of a vector, bytes below 16.
class ByteTable {
 public:
  explicit ByteTable(const int8_t* values, int32_t plus) {
    for (int64_t i = 0; i < static_cast<int64_t>(sizeof(i32v)); ++i)
      values_[i] = static_cast<uint8_t>(values[i % 16] + plus);
  }
  IPEX_INLINE i32v operator[](i32v bytes) const {
#if IPEX_HAVE_AVX512
    return reinterpret_cast<i32v>(_mm512_shuffle_epi8(raw(load_ints(values_)), raw(bytes)));
#elif IPEX_HAVE_AVX2
    return reinterpret_cast<i32v>(_mm256_shuffle_epi8(raw(load_ints(values_)), raw(bytes)));
#else
    uint8_t lanes[sizeof(i32v)];
    std::memcpy(lanes, &bytes, sizeof(lanes));
    for (uint8_t& lane : lanes) lane = values_[lane & 15];
    return load_ints(lanes);
#endif
  }

 private:
  alignas(64) uint8_t values_[sizeof(i32v)];
};

IPEX_INLINE i32v low_nibbles(i32v word) { return word & iset1(0x0f0f0f0f); }
IPEX_INLINE i32v high_nibbles(i32v word) { return (word >> 4) & iset1(0x0f0f0f0f); }

// Scales of 16 columns for integer weights.
IPEX_INLINE void chunk_scales(const WoqInt8Args& args, const char* strip, int64_t group,
                              float* to) {
  if (args.header.scale_type == kScaleBFloat16 && args.header.scale_columns == kStrip &&
      args.header.format <= kFormatInt4) {  // the usual case
    const auto* scales = reinterpret_cast<const BFloat16*>(strip + args.at.scales) + group * kStrip;
    for (int64_t v = 0; v < kStrip; v += kLanes) store(to + v, load(scales + v));
    return;
  }
  load_scales(args.at, args.header, strip, group, to);
  const f32v step = set1(integer_step(args.header.format));
  for (int64_t v = 0; v < kStrip; v += kLanes) store(to + v, load(to + v) * step);
}

// Zero points of 16 columns, plus `implied`.
inline void chunk_zeros(const WoqInt8Args& args, const char* strip, int64_t group, int32_t implied,
                        int32_t* to) {
  const auto* zeros = reinterpret_cast<const int8_t*>(strip + args.at.zeros) + group * kStrip;
  for (int64_t l = 0; l < kStrip; ++l)
    to[l] = implied + (args.header.zero_kind == kZeroNone ? 0 : zeros[l]);
}

// The sums of v over a group for 16 columns.
inline const int32_t* stored_sums(const WoqInt8Args& args, const char* strip, int64_t group) {
  return reinterpret_cast<const int32_t*>(strip + args.at.sums) + group * kStrip;
}

IPEX_INLINE int64_t group_of(const WoqInt8Args& args, int64_t chunk) {
  return args.at.groups > 1 ? chunk : 0;
}

}  // namespace
}  // namespace ipex
