// SPDX-License-Identifier: Apache-2.0
// Activations as the kernels take them: in the packed order of K, rounded to what is computed in,
// padded with zeros, with the sums that zero points meet.
#pragma once

#include "ipex/kernel/vec.h"
#include "woq_linear/woq_linear.h"

namespace ipex {
namespace {

// `count` activations from packed place `k` of a row on, as float; a multiple of kLanes is written.
template <class T>
void read_activations(const WoqLinearArgs& args, const T* row, int64_t k, int64_t count,
                      float* to) {
  if (args.at.permutation) {
    const auto* places = reinterpret_cast<const int32_t*>(args.packed + args.at.permutation) + k;
    T piece[kLanes];
    for (int64_t i = 0; i < count; i += kLanes) {
      const int64_t n = count - i < kLanes ? count - i : kLanes;
      for (int64_t l = 0; l < n; ++l) piece[l] = row[places[i + l]];
      store(to + i, load_n(piece, n));
    }
    return;
  }
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(to + i, load(row + k + i));
  if (i < count) store(to + i, load_n(row + k + i, count - i));
}

// Rounds to the type of the products. Returns zeros, or NaN where a number is not finite.
IPEX_INLINE f32v round_activations(WoqCompute compute, float* values, int64_t count) {
  f32v bad = zero();
  for (int64_t i = 0; i < count; i += kLanes) {
    f32v v = load(values + i);
    if (compute == WoqCompute::kHalf) v = round_to(static_cast<const Half*>(nullptr), v);
    if (compute == WoqCompute::kBFloat16) v = round_to(static_cast<const BFloat16*>(nullptr), v);
    store(values + i, v);
    bad = bad + v * zero();
  }
  return bad;
}

template <class C>
IPEX_INLINE void write_activations(const float* values, int64_t count, C* to) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(to + i, load(values + i));
  if (i < count) store_n(to + i, load(values + i), count - i);
}

typedef int16_t i16v __attribute__((vector_size(kLanes * 2)));

// 16-bit fixed point; the largest magnitude becomes `most`.
inline void write_fixed_point(const float* values, int64_t count, float most, int16_t* to,
                              float* scale, float* sum) {
  f32v largest = zero();
  for (int64_t i = 0; i < count; i += kLanes) largest = max(largest, abs(load(values + i)));
  const float top = reduce_max(largest);
  // Below this nothing is left of a product, and the reciprocal would overflow.
  const bool some = top > 1e-30f;
  const f32v factor = set1(some ? most / top : 0.0f);
  f32v total = zero();
  for (int64_t i = 0; i < count; i += kLanes) {
    const i32v q = to_int(load(values + i) * factor);
    total = total + __builtin_convertvector(q, f32v);
#if IPEX_HAVE_AVX512
    const __m256i narrow = _mm512_cvtepi32_epi16(raw(q));
#else
    const i16v narrow = __builtin_convertvector(q, i16v);
#endif
    if (count - i >= kLanes)
      __builtin_memcpy(to + i, &narrow, sizeof(narrow));
    else
      __builtin_memcpy(to + i, &narrow, static_cast<size_t>(count - i) * 2);
  }
  *scale = some ? top / most : 0.0f;
  *sum = reduce_add(total);
}

typedef int16_t Numbers8 __attribute__((vector_size(16)));
typedef int8_t Bytes8 __attribute__((vector_size(8)));

// Eight or, with AVX-512, sixteen numbers in fixed point as signed bytes, 256 * high + low, in the
// order of the codes.
template <bool kNibbles>
IPEX_INLINE void split_planes8(const int16_t* from, char* high, char* low) {
  const Bytes8 order = kNibbles ? Bytes8{0, 4, 1, 5, 2, 6, 3, 7} : Bytes8{0, 2, 1, 3, 4, 6, 5, 7};
  Numbers8 value;
  __builtin_memcpy(&value, from, sizeof(value));
  const Numbers8 upper = (value + 128) >> 8;
  const Bytes8 high8 = __builtin_shuffle(__builtin_convertvector(upper, Bytes8), order);
  const Bytes8 low8 =
      __builtin_shuffle(__builtin_convertvector(value - (upper << 8), Bytes8), order);
  __builtin_memcpy(high, &high8, sizeof(high8));
  __builtin_memcpy(low, &low8, sizeof(low8));
}

#if IPEX_HAVE_AVX512
template <bool kNibbles>
IPEX_INLINE void split_planes16(const int16_t* from, char* high, char* low) {
  const __m128i order = kNibbles
                            ? _mm_setr_epi8(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15)
                            : _mm_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15);
  const __m256i value = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  const __m256i upper = _mm256_srai_epi16(_mm256_add_epi16(value, _mm256_set1_epi16(128)), 8);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(high),
                   _mm_shuffle_epi8(_mm256_cvtepi16_epi8(upper), order));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(low),
                   _mm_shuffle_epi8(_mm256_cvtepi16_epi8(value), order));
}
#endif

// Elements [k, k + count) of row r, where k is a multiple of 8; zeros up to a multiple of 8.
template <bool kNibbles>
void write_planes(const WoqLinearArgs& args, int16_t* values, int64_t r, int64_t k, int64_t count) {
  for (int64_t i = count; i % 8; ++i) values[i] = 0;
  for (int64_t i = 0; i < count;) {
    char* to = static_cast<char*>(args.operand) + r * kWoqPlaneStep +
               (k + i) / kWoqPlaneStep * args.operand_step + (k + i) % kWoqPlaneStep;
#if IPEX_HAVE_AVX512
    if ((k + i) % 16 == 0 && count - i >= 16) {
      split_planes16<kNibbles>(values + i, to, to + args.operand_step / 2);
      i += 16;
      continue;
    }
#endif
    split_planes8<kNibbles>(values + i, to, to + args.operand_step / 2);
    i += 8;
  }
}

inline void write_planes(const WoqLinearArgs& args, int16_t* values, int64_t r, int64_t k,
                         int64_t count) {
  if (args.header.format == kFormatInt8)
    write_planes<false>(args, values, r, k, count);
  else
    write_planes<true>(args, values, r, k, count);
}

template <class T>
bool prepare(const WoqLinearArgs& args, bool panels, int64_t row_begin, int64_t row_end) {
  alignas(64) float piece[kWoqChunk + 16];
  [[maybe_unused]] alignas(64) int16_t fixed[kWoqChunk + 16];
  f32v bad = zero();
  const int64_t group = args.header.group;
  for (int64_t r = row_begin; r < row_end; ++r) {
    const T* row = static_cast<const T*>(args.x) + r * args.x_stride;
    const int64_t start = r * args.operand_stride;
    auto* as_floats = static_cast<float*>(args.operand) + start;
    auto* as_bf16 = static_cast<BFloat16*>(args.operand) + start;
    auto* as_f16 = static_cast<Half*>(args.operand) + start;
    auto* as_int16 = static_cast<int16_t*>(args.operand) + start;
    float* sums = panels ? nullptr : args.sums + r * args.at.groups;
    if (sums)
      for (int64_t g = 0; g < args.at.groups; ++g) sums[g] = 0.0f;
    for (int64_t k = 0, chunk = 0; k < args.k; ++chunk) {
      // A piece is a chunk of one group.
      const int64_t group_end = (k / group + 1) * group;
      int64_t end = k + kWoqChunk < group_end ? k + kWoqChunk : group_end;
      if (end > args.k) end = args.k;
      const int64_t count = end - k;
      read_activations(args, row, k, count, piece);
      bad = bad + round_activations(args.compute, piece, count);
      if (panels) {
        if (args.compute == WoqCompute::kBFloat16)
          write_activations(piece, count, as_bf16 + k);
        else if (args.compute == WoqCompute::kHalf)
          write_activations(piece, count, as_f16 + k);
        else
          write_activations(piece, count, as_floats + k);
      } else {
        f32v sum = zero();
        for (int64_t i = 0; i < count; i += kLanes) sum = sum + load(piece + i);
        sums[k / group] += reduce_add(sum);
        if (args.kind == WoqOperand::kBFloat16) {
          // `k` is a multiple of 32 where steps are apart.
          const int64_t length = args.operand_step == 32 ? count : 32;
          for (int64_t i = 0; i < count; i += length)
            write_activations(piece + i, count - i < length ? count - i : length,
                              as_bf16 + (k + i) / 32 * args.operand_step + (k + i) % 32);
        } else if (args.kind == WoqOperand::kInt16) {
          const int64_t place = r * args.chunks + chunk;
          const auto most = static_cast<float>(woq_int16_most(args.header.format, args.chunk));
          write_fixed_point(piece, count, most, as_int16 + k, args.chunk_scales + place,
                            args.chunk_sums + place);
          args.chunk_scales[place] *= woq_int16_unit(args.header.format);
        } else if (args.kind == WoqOperand::kPlanes) {
          const int64_t place = r * args.chunks + chunk;
          // The upper byte of more would not be a signed one.
          write_fixed_point(piece, count, 127.0f * 256.0f, fixed, args.chunk_scales + place,
                            args.chunk_sums + place);
          write_planes(args, fixed, r, k, count);
        } else {
          write_activations(piece, count, as_floats + k);
        }
      }
      k = end;
    }
    if (panels) continue;
    if (args.kind == WoqOperand::kPlanes) {  // whole steps
      const int64_t end = woq_round_up(args.k, 8), steps = woq_round_up(end, kWoqPlaneStep);
      alignas(16) int16_t zeros[8] = {};
      for (int64_t k = end; k < steps; k += 8) write_planes(args, zeros, r, k, 8);
      continue;
    }
    for (int64_t k = args.k; k < args.at.k_padded; ++k) {
      if (args.kind == WoqOperand::kFloat)
        as_floats[k] = 0.0f;
      else
        as_int16[k / 32 * args.operand_step + k % 32] = 0;  // also the zero of BFloat16
    }
  }
  return reduce_add(bad) != 0.0f;
}

}  // namespace
}  // namespace ipex
