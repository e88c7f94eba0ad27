// SPDX-License-Identifier: Apache-2.0
// Attention on a GPU, with the running softmax of attention.sycl.cpp and its arguments: a group
// owns 64 queries that share a head of keys, and goes through the keys in blocks of 64. An item
// computes 4 x 4 scores and 4 x 4 x kParts sums; what is shared goes through the memory of the
// group.
#include "attention_rules.h"

constexpr int kRows = 64;   // queries of a group
constexpr int kKeys = 64;   // keys of a block
constexpr int kDepth = 32;  // numbers of a head that are brought at a time
constexpr int kItems = 256;
constexpr int kPitch = 68;  // of a tile of 64; neighboring rows begin in different banks
using Four = sycl::vec<float, 4>;

// Parts of queries and of keys, or a part of values.
here::experimental::work_group_static<Four[2 * kDepth * kPitch / 4]> input_tile;
here::experimental::work_group_static<Four[kKeys * kPitch / 4]> weight_tile;  // by keys
here::experimental::work_group_static<float[kRows * 17]> row_tile;            // of 16 items each

template <typename T, int kParts>
IPEX_KERNEL(3)
void attention_tiles(const T* q, const T* k, const T* v, T* out, const float* mask,
                     const float* slopes, const float* sinks, const int* q_starts,
                     const int* k_starts, const int* k_lengths, const int* table, long group,
                     long queries, long keys, long size, long value_size, long q_batch, long q_head,
                     long q_row, long k_batch, long k_head, long k_row, long v_batch, long v_head,
                     long v_row, long o_batch, long o_head, long o_row, long m_batch, long m_head,
                     long m_row, long m_key, long slope_batch, long table_row, long block_size,
                     long behind, long ahead, float scale, float softcap, int bottom_right) {
  const auto position = here::this_work_item::get_nd_item<3>();
  const auto team = position.get_group();
  const int item = static_cast<int>(position.get_local_id(2));
  const int down = item / 16 * 4;    // the item's queries
  const int across = item % 16 * 4;  // its keys, and its numbers of a part of the values
  const long sequence = position.get_group(0);
  const long kv_head = position.get_group(1);
  Four* const inputs = *&input_tile;
  Four* const weights = *&weight_tile;
  float* const of_rows = *&row_tile;
  float* const input_numbers = reinterpret_cast<float*>(inputs);
  float* const weight_numbers = reinterpret_cast<float*>(weights);

  const Sequence all(sequence, q_starts, k_starts, k_lengths, group, queries, keys,
                     position.get_group(2) * kRows, kRows, behind, ahead, bottom_right);
  if (all.nothing()) return;
  const long to = all.to;
  const auto query_at = [=](long row) {
    return all.line(q, row, q_starts, sequence, q_batch, q_head, q_row, kv_head * group);
  };
  const auto at_line = [=](const T* x, long batch, long head, long step, long j) {
    return line_of(x, j, sequence, all.k_begin, k_starts, table, table_row, block_size, batch,
                   step) +
           kv_head * head;
  };
  const float low = -__builtin_inff();
  float most[4] = {low, low, low, low};
  float total[4] = {};  // of the item's own keys
  float sums[4][4 * kParts] = {};
  for (long start = all.from; start < to; start += kKeys) {
    float score[4][4] = {};
    for (long begin = 0; begin < size; begin += kDepth) {
#pragma unroll
      for (int e = 0; e < kRows * kDepth / kItems; ++e) {
        const int at = item + e * kItems;
        const int line = at / kDepth;
        const long d = begin + at % kDepth;
        const bool inside = d < size;
        input_numbers[at % kDepth * kPitch + line] =
            inside ? load(query_at(all.row(line)), d) : 0.f;
        input_numbers[(kDepth + at % kDepth) * kPitch + line] =
            inside && start + line < to ? load(at_line(k, k_batch, k_head, k_row, start + line), d)
                                        : 0.f;
      }
      sycl::group_barrier(team);
#pragma unroll 8
      for (int d = 0; d < kDepth; ++d) {
        const Four x = inputs[(d * kPitch + down) / 4];
        const Four y = inputs[((kDepth + d) * kPitch + across) / 4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
#pragma unroll
          for (int j = 0; j < 4; ++j) score[i][j] += x[i] * y[j];
        }
      }
      sycl::group_barrier(team);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const long row = all.row(down + i);
      const long head = kv_head * group + row / all.queries;
      const long place = row % all.queries + all.offset;
      const float slope = slopes != nullptr ? slopes[sequence * slope_batch + head] : 0.f;
      const float* bias =
          mask != nullptr ? mask + sequence * m_batch + head * m_head + row % all.queries * m_row
                          : nullptr;
      float top = low;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const long key = start + across + j;
        const long distance = key - place;
        const float s = ruled(score[i][j] * scale, softcap, slope, static_cast<int>(distance),
                              key < to ? bias : nullptr, key * m_key);
        const bool hidden = all.hides(static_cast<int>(key), static_cast<int>(distance));
        score[i][j] = hidden ? low : s;
        top = sycl::fmax(top, score[i][j]);
      }
      of_rows[(down + i) * 17 + item % 16] = top;
    }
    sycl::group_barrier(team);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float next = most[i];
#pragma unroll
      for (int j = 0; j < 16; ++j) next = sycl::fmax(next, of_rows[(down + i) * 17 + j]);
      const float base = next == low ? 0.f : next;
      const float factor = sycl::exp(most[i] - base);
      most[i] = next;
      total[i] *= factor;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float weight = sycl::exp(score[i][j] - base);
        total[i] += weight;
        weight_numbers[(across + j) * kPitch + down + i] = weight;
      }
#pragma unroll
      for (int j = 0; j < 4 * kParts; ++j) sums[i][j] *= factor;
    }
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      if (part * 64 >= value_size) break;
#pragma unroll
      for (int e = 0; e < kKeys * 64 / kItems; ++e) {
        const int at = item + e * kItems;
        const long j = start + at / 64;
        const long d = part * 64 + at % 64;
        input_numbers[at / 64 * kPitch + at % 64] =
            j < to && d < value_size ? load(at_line(v, v_batch, v_head, v_row, j), d) : 0.f;
      }
      sycl::group_barrier(team);
#pragma unroll 8
      for (int j = 0; j < kKeys; ++j) {
        const Four x = weights[(j * kPitch + down) / 4];
        const Four y = inputs[(j * kPitch + across) / 4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
#pragma unroll
          for (int d = 0; d < 4; ++d) sums[i][part * 4 + d] += x[i] * y[d];
        }
      }
      sycl::group_barrier(team);
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) of_rows[(down + i) * 17 + item % 16] = total[i];
  sycl::group_barrier(team);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (all.first + down + i > all.last) return;
    float whole = 0.f;
#pragma unroll
    for (int j = 0; j < 16; ++j) whole += of_rows[(down + i) * 17 + j];
    const long row = all.first + down + i;
    const float factor = share_of(whole, most[i], sinks, kv_head * group + row / all.queries);
    T* target = all.line(out, row, q_starts, sequence, o_batch, o_head, o_row, kv_head * group);
#pragma unroll
    for (int d = 0; d < 4 * kParts; ++d) {
      const long at = d / 4 * 64 + across + d % 4;
      if (at < value_size) store(target, at, sums[i][d] * factor);
    }
  }
}

#define ATTENTION_TILES(T, kParts) \
  template void attention_tiles<T, kParts>(IPEX_ATTENTION_ARGUMENTS(T));
#define ALL_PARTS(T)    \
  ATTENTION_TILES(T, 1) \
  ATTENTION_TILES(T, 2) \
  ATTENTION_TILES(T, 4)
ALL_PARTS(float)
ALL_PARTS(half)
ALL_PARTS(bf16)
