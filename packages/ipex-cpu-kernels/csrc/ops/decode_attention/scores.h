// SPDX-License-Identifier: Apache-2.0
// What happens to the scores of one query row: mask, softmax weights, and its output.
#pragma once

#include <cmath>
#include <cstring>

#include "decode.h"
#include "ipex/kernel/vec_math.h"

namespace ipex {
namespace {

struct Row {
  int64_t sequence, head, query;
};

// Row r of an item: beams, then heads of the group, then queries.
IPEX_INLINE Row row_of(const DecodeArgs& args, const DecodeItem& item, int64_t kv_head, int64_t r) {
  const int64_t group = args.heads / args.kv_heads;
  return {item.unit * args.beams + r / args.queries / group,
          kv_head * group + r / args.queries % group, r % args.queries};
}

// The mask of one query row and the keys [first, first + count), added to the scores.
template <class T>
IPEX_INLINE void add_mask(const DecodeArgs& args, const Row& row, int64_t first, int64_t count,
                          float* s) {
  const int64_t step = args.mask_key_stride;
  const int64_t offset = row.sequence * args.mask_strides.sequence +
                         row.head * args.mask_strides.head + row.query * args.mask_strides.row +
                         first * step;
  if (args.mask_kind == DecodeMask::kBool) {
    const auto* mask = static_cast<const uint8_t*>(args.mask) + offset;
    for (int64_t j = 0; j < count; ++j)
      if (!mask[j * step]) s[j] = -INFINITY;
  } else if (args.mask_kind == DecodeMask::kFloat) {
    const auto* mask = static_cast<const float*>(args.mask) + offset;
    for (int64_t j = 0; j < count; ++j) s[j] += mask[j * step];
  } else {
    const T* mask = static_cast<const T*>(args.mask) + offset;
    for (int64_t j = 0; j < count; ++j) s[j] += load_n(mask + j * step, 1)[0];
  }
}

IPEX_INLINE bool has_nan(const float* s, int64_t count) {
  bool found = false;
  for (int64_t j = 0; j < count; ++j) found |= s[j] != s[j];
  return found;
}

// Scores of one row and one block: [low, high) are visible, the others become -infinity. Returns
// the maximum; NaN if that is all there is.
template <class T>
IPEX_INLINE float finish_scores(const DecodeArgs& args, const Row& row, int64_t first, int64_t low,
                                int64_t high, const float* key_scales, float* s) {
  for (int64_t j = 0; j < kDecodeBlock; j += kLanes) {
    f32v v = load(s + j) * (load(key_scales + j) * set1(args.scale));
    if (args.softcap > 0.0f) v = tanh(v * set1(1.0f / args.softcap)) * set1(args.softcap);
    store(s + j, v);
  }
  if (args.alibi) {
    const float slope = args.alibi[row.head];
    const int64_t query =
        args.lengths[row.sequence] - args.queries + row.query;  // its own position
    for (int64_t j = low; j < high; ++j) s[j] += slope * static_cast<float>(first + j - query);
  }
  if (args.near) {  // one query, which stands at the last key
    const int64_t start = args.lengths[row.sequence] - args.near_keys - first;
    const T* near = static_cast<const T*>(args.near) +
                    (row.sequence * args.heads + row.head) * args.near_keys - start;
    for (int64_t j = start > low ? start : low; j < high; ++j) s[j] += load_n(near + j, 1)[0];
  }
  for (int64_t j = 0; j < low; ++j) s[j] = -INFINITY;
  for (int64_t j = high; j < kDecodeBlock; ++j) s[j] = -INFINITY;
  if (args.mask_kind != DecodeMask::kNone) add_mask<T>(args, row, first + low, high - low, s + low);
  f32v largest = set1(-INFINITY);
  for (int64_t j = 0; j < kDecodeBlock; j += kLanes) largest = max(largest, load(s + j));
  const float block = reduce_max(largest);
  return block == -INFINITY && has_nan(s + low, high - low) ? NAN : block;
}

// weights = exp(s - largest) * value scale; returns the sum without the scales.
template <bool kFast, class W>
IPEX_INLINE float weigh(const float* s, float largest, const float* value_scales, W* weights) {
  f32v total = zero();
  const f32v shift = set1(largest);
  for (int64_t j = 0; j < kDecodeBlock; j += kLanes) {
    // Keys that are not visible: exp_fast is exactly 0 there only at -infinity.
    const f32v e = exp_nonpositive_as<kFast>(load(s + j) - shift);
    total = total + e;
    store(weights + j, e * load(value_scales + j));
  }
  return reduce_add(total);
}

IPEX_INLINE void scale_floats(float* row, float factor, int64_t count) {
  for (int64_t d = 0; d < count; d += kLanes) store(row + d, load(row + d) * set1(factor));
}

// The output of a row: acc / total, where `sink` joins the denominator. A row that sees no key
// gives zeros.
template <class P, class T>
IPEX_INLINE void finish_row(const DecodeArgs& args, const Row& row, float largest, float total,
                            const float* acc, T* room) {
  float factor = 0.0f;
  if (largest != -INFINITY) {
    if (args.sinks) {
      const float sink = args.sinks[row.head];
      const float top = sink > largest ? sink : largest;
      const float shrink = std::exp(largest - top);
      factor = shrink / (total * shrink + std::exp(sink - top));
    } else {
      factor = 1.0f / total;
    }
  }
  P::store_row(acc, factor, decode_padded(args.size), room);
  std::memcpy(static_cast<T*>(args.out) + row.sequence * args.out_strides.sequence +
                  row.head * args.out_strides.head + row.query * args.out_strides.row,
              room, sizeof(T) * static_cast<size_t>(args.size));
}

}  // namespace
}  // namespace ipex
