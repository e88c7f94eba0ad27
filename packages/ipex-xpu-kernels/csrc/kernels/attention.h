// SPDX-License-Identifier: Apache-2.0
// Attention with a running softmax (Dao et al., "FlashAttention-2", 2023): scores never exist as a
// whole. An item owns a query; a work-group owns 16 of those that share a head of keys, and goes
// through the keys in blocks of 8. Queries and sums lie in local memory, each item using its own
// column, so that a number of a key is one broadcast for 16 queries and nothing waits.
#pragma once

#include "attention_rules.h"
#include "float8.h"

using Index = unsigned long;
constexpr Index kLanes = 16;
constexpr Index kBlock = 8;
constexpr Index kMaxSize = 256;  // of a head

here::experimental::work_group_static<float[kMaxSize * kLanes]> query_tile;
here::experimental::work_group_static<float[kMaxSize * kLanes]> sum_tile;

// Heads of `size` numbers, all with steps of 1 between the numbers of a head.
// Sequence s has the queries q_starts[s] up to q_starts[s + 1] (or `queries` of its own) and the
// keys k_starts[s] up to k_starts[s + 1], or k_lengths[s], or `keys`. Key j of a sequence is row j,
// or with a table the row j % block_size of the block table[s][j / block_size]. `ahead` bounds how
// far a query sees before and behind its place.
// Keys and values may be quantized: `scale` includes the factor of the keys, `value_scale` is the
// factor of the values, and `k_rows` and `v_rows` (or null) give the factor of each row.
template <typename T, typename C>
IPEX_INLINE inline void attend(const T* q, const C* k, const C* v, T* out, const float* mask,
                               const float* slopes, const float* sinks, const int* q_starts,
                               const int* k_starts, const int* k_lengths, const int* table,
                               long group, long queries, long keys, long size, long value_size,
                               long q_batch, long q_head, long q_row, long k_batch, long k_head,
                               long k_row, long v_batch, long v_head, long v_row, long o_batch,
                               long o_head, long o_row, long m_batch, long m_head, long m_row,
                               long m_key, long slope_batch, long table_row, long block_size,
                               long behind, long ahead, float scale, float softcap,
                               int bottom_right, float value_scale, const float* k_rows,
                               const float* v_rows, long kr_batch, long kr_head, long kr_row,
                               long vr_batch, long vr_head, long vr_row) {
  const auto position = here::this_work_item::get_nd_item<3>();
  const Index lane = position.get_local_id(2);
  const long sequence = position.get_group(0);
  const long kv_head = position.get_group(1);
  float* query = *&query_tile;
  float* sum = *&sum_tile;

  const Sequence all(sequence, q_starts, k_starts, k_lengths, group, queries, keys,
                     position.get_group(2) * kLanes, kLanes, behind, ahead, bottom_right);
  if (all.nothing()) return;
  const long to = all.to;
  const bool mine = all.first + lane <= all.last;
  const long row = all.row(static_cast<int>(lane));
  const long i = row % all.queries;
  const long head = kv_head * group + row / all.queries;
  const long place = i + all.offset;
  const T* own = all.line(q, row, q_starts, sequence, q_batch, q_head, q_row, kv_head * group);
  for (Index d = 0; d < static_cast<Index>(size); ++d) query[d * kLanes + lane] = load(own, d);
  for (Index d = 0; d < static_cast<Index>(value_size); ++d) sum[d * kLanes + lane] = 0.f;
  const float slope = slopes != nullptr ? slopes[sequence * slope_batch + head] : 0.f;
  const float* bias =
      mask != nullptr ? mask + sequence * m_batch + head * m_head + i * m_row : nullptr;
  const float low = -__builtin_inff();
  float most = low;
  float total = 0.f;
  for (long start = all.from; start < to; start += kBlock) {
    const C* key[kBlock];
    const C* value[kBlock];
    float key_scale[kBlock];
    float value_factor[kBlock];
#pragma unroll
    for (Index t = 0; t < kBlock; ++t) {
      const long j = start + static_cast<long>(t) < to ? start + static_cast<long>(t) : to - 1;
      long block = k_starts != nullptr ? 0 : sequence;
      long line = all.k_begin + j;
      if (table != nullptr) {
        block = table[sequence * table_row + j / block_size];
        line = j % block_size;
      }
      key[t] = k + block * k_batch + kv_head * k_head + line * k_row;
      value[t] = v + block * v_batch + kv_head * v_head + line * v_row;
      key_scale[t] =
          k_rows != nullptr ? k_rows[block * kr_batch + kv_head * kr_head + line * kr_row] : 1.f;
      value_factor[t] =
          v_rows != nullptr ? v_rows[block * vr_batch + kv_head * vr_head + line * vr_row] : 1.f;
    }
    float score[kBlock] = {};
    for (Index d = 0; d < static_cast<Index>(size); ++d) {
      const float x = query[d * kLanes + lane];
#pragma unroll
      for (Index t = 0; t < kBlock; ++t) score[t] += x * load(key[t], d);
    }
    float next = most;
#pragma unroll
    for (Index t = 0; t < kBlock; ++t) {
      const long j = start + static_cast<long>(t);
      const long distance = j - place;
      const float s = ruled(score[t] * scale * key_scale[t], softcap, slope,
                            static_cast<int>(distance), j < to ? bias : nullptr, j * m_key);
      const bool hidden = all.hides(static_cast<int>(j), static_cast<int>(distance));
      score[t] = hidden ? low : s;
      next = sycl::fmax(next, score[t]);
    }
    const float base = next == low ? 0.f : next;
    const float factor = sycl::exp(most - base);
    most = next;
    total *= factor;
#pragma unroll
    for (Index t = 0; t < kBlock; ++t) {
      score[t] = sycl::exp(score[t] - base);
      total += score[t];
      score[t] *= value_factor[t];
    }
    if (start + static_cast<long>(kBlock) <= to) {
      for (Index d = 0; d < static_cast<Index>(value_size); ++d) {
        float x = sum[d * kLanes + lane] * factor;
#pragma unroll
        for (Index t = 0; t < kBlock; ++t) x += score[t] * load(value[t], d);
        sum[d * kLanes + lane] = x;
      }
    } else {  // weights of 0 would make NaN of infinite values
      for (Index d = 0; d < static_cast<Index>(value_size); ++d) {
        float x = sum[d * kLanes + lane] * factor;
#pragma unroll
        for (Index t = 0; t < kBlock; ++t) {
          if (start + static_cast<long>(t) < to) x += score[t] * load(value[t], d);
        }
        sum[d * kLanes + lane] = x;
      }
    }
  }
  if (!mine) return;
  const float factor = share_of(total, most, sinks, head) * value_scale;
  T* target = all.line(out, row, q_starts, sequence, o_batch, o_head, o_row, kv_head * group);
  for (Index d = 0; d < static_cast<Index>(value_size); ++d)
    store(target, d, sum[d * kLanes + lane] * factor);
}
