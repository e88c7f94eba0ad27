// SPDX-License-Identifier: Apache-2.0
// Attention by joint_matrix, with the arguments of attention_tiles.sycl.cpp, for heads of up to
// kSize numbers of 16 bits. A group owns 64 queries that share a head of keys and goes through the
// keys in blocks; a sub-group owns 16 of them, whose scores pass through memory for the running
// softmax. Sums stay in registers: what they are relative to changes only when a score is so much
// larger than the largest one before that powers would become large.
#include "attention_rules.h"
#include "joint.h"

constexpr int kSubGroups = 4;
constexpr int kRows = kSide * kSubGroups;  // queries of a group
constexpr int kItems = kSubGroups * IPEX_SUB_GROUP;
constexpr int kEach = IPEX_SUB_GROUP / kSide;  // items that share a query
constexpr float kGrowth = 8.f;                 // of a score, before sums are scaled

// Keys of a block, and numbers from one row of a tile to the next.
template <int kSize>
constexpr int kKeys = kSize <= 64 ? 64 : 32;
constexpr int kMostKeys = 64;
constexpr int kScorePitch = kMostKeys + 4;  // floats, or twice as many numbers of 16 bits

// One piece of memory, since joint_matrix wants addresses that are multiples of 32 bytes: queries
// at first, then a block of keys and of values ((64 + 64) x 72 or (32 + 32) x 136 numbers), the
// scores, and a factor for each query.
constexpr int kInputs = 2 * 64 * 72 / 8;  // vectors
constexpr int kScores = kRows * kScorePitch / 4;
here::experimental::work_group_static<Vector[kInputs + kScores + kRows / 4]> tiles_of_group;

// Joins the numbers of the items that share a query.
template <typename F>
IPEX_INLINE inline float shared(const sycl::sub_group& sub_group, float value, F join) {
#pragma unroll
  for (int step = 1; step < kEach; step *= 2)
    value = join(value, sycl::permute_group_by_xor(sub_group, value, step));
  return value;
}

template <typename T, int kSize>
IPEX_KERNEL(3)
void attention_joint(const T* q, const T* k, const T* v, T* out, const float* mask,
                     const float* slopes, const float* sinks, const int* q_starts,
                     const int* k_starts, const int* k_lengths, const int* table, long group,
                     long queries, long keys, long size, long value_size, long q_batch, long q_head,
                     long q_row, long k_batch, long k_head, long k_row, long v_batch, long v_head,
                     long v_row, long o_batch, long o_head, long o_row, long m_batch, long m_head,
                     long m_row, long m_key, long slope_batch, long table_row, long block_size,
                     long behind, long ahead, float scale, float softcap, int bottom_right) {
  using E = typename Element<T>::type;
  constexpr int kBlock = kKeys<kSize>;
  constexpr int kPitch = kSize + 8;
  constexpr int kLine = kSize / 8;  // vectors of a row of a tile
  constexpr int kVectors = kBlock * kLine / kItems;
  const auto position = here::this_work_item::get_nd_item<3>();
  const auto team = position.get_group();
  const auto sub_group = position.get_sub_group();
  const int item = static_cast<int>(position.get_local_id(2));
  const int part = item / IPEX_SUB_GROUP;
  const int lane = item % IPEX_SUB_GROUP;
  const int own = lane / kEach;     // the item's query of its sub-group
  const int column = lane % kEach;  // and the first of its keys
  const long sequence = position.get_group(0);
  const long kv_head = position.get_group(1);

  const Sequence all(sequence, q_starts, k_starts, k_lengths, group, queries, keys,
                     position.get_group(2) * kRows, kRows, behind, ahead, bottom_right);
  if (all.nothing()) return;
  const long to = all.to;
  const auto at_line = [=](const T* x, long batch, long head, long step, long j) {
    return line_of(x, j, sequence, all.k_begin, k_starts, table, table_row, block_size, batch,
                   step) +
           kv_head * head;
  };
  Vector* const tiles = *&tiles_of_group;
  E* const key_tile = reinterpret_cast<E*>(tiles);
  E* const value_tile = key_tile + kBlock * kPitch;
  float* const scores = reinterpret_cast<float*>(tiles + kInputs) + part * kSide * kScorePitch;
  E* const weights = reinterpret_cast<E*>(scores);  // in the place of the scores
  float* const factors = reinterpret_cast<float*>(tiles + kInputs + kScores) + part * kSide;

  for (int at = item; at < kRows * kLine; at += kItems) {
    const T* line = all.line(q, all.row(at / kLine), q_starts, sequence, q_batch, q_head, q_row,
                             kv_head * group);
    const int d = at % kLine * 8;
    tiles[(at / kLine * kPitch + d) / 8] =
        d < size ? *reinterpret_cast<const Vector*>(line + d) : Vector(0);
  }
  sycl::group_barrier(team);
  Left<E> query_parts[kSize / kSide];
#pragma unroll
  for (int d = 0; d < kSize / kSide; ++d) {
    joint::joint_matrix_load(sub_group, query_parts[d],
                             local(key_tile + part * kSide * kPitch + d * kSide), kPitch);
  }
  sycl::group_barrier(team);

  // The item's query.
  const long my_row = all.row(part * kSide + own);
  const long my_head = kv_head * group + my_row / all.queries;
  const long place = my_row % all.queries + all.offset;
  const float slope = slopes != nullptr ? slopes[sequence * slope_batch + my_head] : 0.f;
  const float* bias =
      mask != nullptr ? mask + sequence * m_batch + my_head * m_head + my_row % all.queries * m_row
                      : nullptr;
  const float low = -__builtin_inff();
  float most = low;
  float total = 0.f;  // of the item's own keys
  bool begun = false;
  Sums sums[kSize / kSide];
#pragma unroll
  for (int d = 0; d < kSize / kSide; ++d) joint::joint_matrix_fill(sub_group, sums[d], 0.f);

  Vector key_parts[kVectors];
  Vector value_parts[kVectors];
  const auto fetch = [&](long start) IPEX_INLINE {
#pragma unroll
    for (int e = 0; e < kVectors; ++e) {
      const int at = item + e * kItems;
      const long j = start + at / kLine;
      const int d = at % kLine * 8;
      key_parts[e] =
          j < to && d < size
              ? *reinterpret_cast<const Vector*>(at_line(k, k_batch, k_head, k_row, j) + d)
              : Vector(0);
      value_parts[e] =
          j < to && d < value_size
              ? *reinterpret_cast<const Vector*>(at_line(v, v_batch, v_head, v_row, j) + d)
              : Vector(0);
    }
  };
  fetch(all.from);
  for (long start = all.from; start < to; start += kBlock) {
#pragma unroll
    for (int e = 0; e < kVectors; ++e) {
      const int at = item + e * kItems;
      const int to_vector = (at / kLine * kPitch + at % kLine * 8) / 8;
      tiles[to_vector] = key_parts[e];
      tiles[to_vector + kBlock * kPitch / 8] = value_parts[e];
    }
    sycl::group_barrier(team);
    fetch(start + kBlock);  // on its way while this block is computed
#pragma unroll 1
    for (int j = 0; j < kBlock / kSide; ++j) {
      Sums square;
      joint::joint_matrix_fill(sub_group, square, 0.f);
#pragma unroll
      for (int d = 0; d < kSize / kSide; ++d) {
        Right<E> columns;
        joint::joint_matrix_load(sub_group, columns,
                                 local(key_tile + j * kSide * kPitch + d * kSide), kPitch);
        joint::joint_matrix_mad(sub_group, square, query_parts[d], columns, square);
      }
      joint::joint_matrix_store(sub_group, square, local(scores + j * kSide), kScorePitch,
                                kRowMajor);
    }
    sycl::group_barrier(sub_group);

    float score[kBlock / kEach];
    float top = low;
#pragma unroll
    for (int j = 0; j < kBlock / kEach; ++j) {
      const long key = start + j * kEach + column;
      const long distance = key - place;
      const float s = ruled(scores[own * kScorePitch + j * kEach + column] * scale, softcap, slope,
                            static_cast<int>(distance), key < to ? bias : nullptr, key * m_key);
      const bool hidden = all.hides(static_cast<int>(key), static_cast<int>(distance));
      score[j] = hidden ? low : s;
      top = larger(top, score[j]);
    }
    top = shared(sub_group, top, [](float a, float b) IPEX_INLINE { return larger(a, b); });
    if (sycl::any_of_group(sub_group, top > most + kGrowth)) {
      const float next = larger(most, top);
      const float factor = most == low ? 0.f : sycl::native::exp(most - next);
      most = next;
      total *= factor;
      if (begun) {
        if (column == 0) factors[own] = factor;
        // The scores are in registers: their memory is free.
#pragma unroll
        for (int d = 0; d < kSize / kSide; ++d) {
          sycl::group_barrier(sub_group);
          joint::joint_matrix_store(sub_group, sums[d], local(scores), kSide, kRowMajor);
          sycl::group_barrier(sub_group);
          for (int e = lane; e < kSide * kSide; e += IPEX_SUB_GROUP)
            scores[e] *= factors[e / kSide];
          sycl::group_barrier(sub_group);
          joint::joint_matrix_load(sub_group, sums[d], local(scores), kSide, kRowMajor);
        }
      }
    }
    begun = true;
    const float base = most == low ? 0.f : most;
    sycl::group_barrier(sub_group);  // all have read their scores
#pragma unroll
    for (int j = 0; j < kBlock / kEach; ++j) {
      const float weight = sycl::native::exp(score[j] - base);
      total += weight;
      weights[own * 2 * kScorePitch + j * kEach + column] = E(weight);
    }
    sycl::group_barrier(sub_group);
#pragma unroll 1
    for (int j = 0; j < kBlock / kSide; ++j) {
      Left<E> row_parts;
      joint::joint_matrix_load(sub_group, row_parts, local(weights + j * kSide), 2 * kScorePitch);
#pragma unroll
      for (int d = 0; d < kSize / kSide; ++d) {
        Right<E, kRowMajor> columns;
        joint::joint_matrix_load(sub_group, columns,
                                 local(value_tile + j * kSide * kPitch + d * kSide), kPitch);
        joint::joint_matrix_mad(sub_group, sums[d], row_parts, columns, sums[d]);
      }
    }
    sycl::group_barrier(team);  // before the next block takes the place of this one
  }

  const float whole = shared(sub_group, total, [](float a, float b) { return a + b; });
  const float factor = share_of(whole, most, sinks, my_head);
  if (column == 0) factors[own] = factor;
#pragma unroll
  for (int d = 0; d < kSize / kSide; ++d) {
    sycl::group_barrier(sub_group);
    joint::joint_matrix_store(sub_group, sums[d], local(scores), kSide, kRowMajor);
    sycl::group_barrier(sub_group);
    for (int e = lane; e < kSide * kSide; e += IPEX_SUB_GROUP) {
      const long row = all.first + part * kSide + e / kSide;
      const long at = d * kSide + e % kSide;
      if (row > all.last || at >= value_size) continue;
      T* target = all.line(out, row, q_starts, sequence, o_batch, o_head, o_row, kv_head * group);
      store(target, at, scores[e] * factors[e / kSide]);
    }
  }
}

#define ATTENTION_JOINT(T, kSize) \
  template void attention_joint<T, kSize>(IPEX_ATTENTION_ARGUMENTS(T));
ATTENTION_JOINT(half, 64)
ATTENTION_JOINT(half, 128)
ATTENTION_JOINT(bf16, 64)
ATTENTION_JOINT(bf16, 128)
