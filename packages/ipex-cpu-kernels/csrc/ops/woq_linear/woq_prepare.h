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

// 16-bit fixed point; the largest magnitude becomes 32767.
inline void write_fixed_point(const float* values, int64_t count, int16_t* to, float* scale,
                              float* sum) {
  f32v largest = zero();
  for (int64_t i = 0; i < count; i += kLanes) largest = max(largest, abs(load(values + i)));
  const float top = reduce_max(largest);
  // Below this nothing is left of a product, and the reciprocal would overflow.
  const bool some = top > 1e-30f;
  const f32v factor = set1(some ? 32767.0f / top : 0.0f);
  f32v total = zero();
  for (int64_t i = 0; i < count; i += kLanes) {
    const i32v q = to_int(load(values + i) * factor);
    total = total + __builtin_convertvector(q, f32v);
    const int64_t n = count - i < kLanes ? count - i : kLanes;
    for (int64_t l = 0; l < n; ++l) to[i + l] = static_cast<int16_t>(q[l]);
  }
  *scale = some ? top / 32767.0f : 0.0f;
  *sum = reduce_add(total);
}

template <class T>
bool prepare(const WoqLinearArgs& args, bool panels, int64_t row_begin, int64_t row_end) {
  alignas(64) float piece[kWoqChunk + 16];
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
          write_activations(piece, count, as_bf16 + k);
        } else if (args.kind == WoqOperand::kInt16) {
          const int64_t place = r * args.chunks + chunk;
          write_fixed_point(piece, count, as_int16 + k, args.chunk_scales + place,
                            args.chunk_sums + place);
        } else {
          write_activations(piece, count, as_floats + k);
        }
      }
      k = end;
    }
    if (panels) continue;
    for (int64_t k = args.k; k < args.at.k_padded; ++k) {
      if (args.kind == WoqOperand::kFloat)
        as_floats[k] = 0.0f;
      else
        as_int16[k] = 0;  // also the zero of BFloat16
    }
  }
  return reduce_add(bad) != 0.0f;
}

}  // namespace
}  // namespace ipex
