// SPDX-License-Identifier: Apache-2.0
// Attention of few queries for each head of keys (decoding) on a GPU: the keys of a sequence are
// split among work-groups, whose sums attention_join puts together. A group has up to kRows queries
// that share a head of keys, and goes through its keys in blocks of kBlock; all that its items
// share lies in the memory of the group.
#include "float8.h"

namespace here = sycl::ext::oneapi;
using Four = sycl::vec<float, 4>;

constexpr int kItems = 256;
constexpr int kRows = 8;
constexpr int kBlock = 64;
constexpr int kQuarters = kItems / kBlock;  // items that share the score of a key
constexpr int kOfRow = kItems / kRows;      // items that share the softmax of a query
constexpr int kMaxSize = 256;               // of a head

here::experimental::work_group_static<Four[kRows * kMaxSize / 4]> query_tile;  // and the sums
here::experimental::work_group_static<float[kQuarters * kRows * kBlock]> part_tile;
here::experimental::work_group_static<float[kRows * kBlock]> weight_tile;
here::experimental::work_group_static<float[kRows * kOfRow]> row_tile;
here::experimental::work_group_static<float[kRows]> factor_tile;

// Eight numbers; on a GPU by one load, for which they begin at a multiple of their bytes.
template <typename C>
IPEX_INLINE inline void load_eight(const C* p, float (&out)[8]) {
#ifdef IPEX_GPU
  using Words = unsigned int __attribute__((ext_vector_type(2 * sizeof(C))));
  const Words words = *reinterpret_cast<const Words*>(p);
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    constexpr int kOf = 4 / sizeof(C);
    const unsigned int word = words[j / kOf] >> (j % kOf * 8 * (sizeof(C) % 4));
    if constexpr (sizeof(C) == 4) {
      out[j] = sycl::bit_cast<float>(word);
    } else if constexpr (sizeof(C) == 2) {
      out[j] = static_cast<float>(sycl::bit_cast<C>(static_cast<unsigned short>(word)));
    } else {
      out[j] = static_cast<float>(sycl::bit_cast<C>(static_cast<unsigned char>(word)));
    }
  }
#else
#pragma unroll
  for (int j = 0; j < 8; ++j) out[j] = load(p, j);
#endif
}

// The arguments of attend in attention.h. parts: for each sequence, head of keys, split and query
// (most_rows of them) value_size sums; stats: the largest score and the sum of the weights.
template <typename T, typename C>
IPEX_KERNEL(3)
void attention_split(const T* q, const C* k, const C* v, float* parts, float* stats,
                     const float* mask, const float* slopes, const int* q_starts,
                     const int* k_lengths, const int* table, long group, long queries, long keys,
                     long size, long value_size, long most_rows, long splits, long q_batch,
                     long q_head, long q_row, long k_batch, long k_head, long k_row, long v_batch,
                     long v_head, long v_row, long m_batch, long m_head, long m_row, long m_key,
                     long slope_batch, long table_row, long block_size, long behind, long ahead,
                     float scale, float softcap, int bottom_right, const float* k_rows,
                     const float* v_rows, long kr_batch, long kr_head, long kr_row, long vr_batch,
                     long vr_head, long vr_row) {
  const auto position = here::this_work_item::get_nd_item<3>();
  const auto team = position.get_group();
  const int item = static_cast<int>(position.get_local_id(2));
  const long sequence = position.get_group(0);
  const long kv_head = position.get_group(1);
  const long split = static_cast<long>(position.get_group(2)) % splits;
  const long first = static_cast<long>(position.get_group(2)) / splits * kRows;
  Four* const query = *&query_tile;
  float* const query_numbers = reinterpret_cast<float*>(query);
  float* const part = *&part_tile;
  float* const weights = *&weight_tile;
  float* const of_rows = *&row_tile;
  float* const factors = *&factor_tile;

  long q_begin = 0;
  if (q_starts != nullptr) {
    q_begin = q_starts[sequence];
    queries = q_starts[sequence + 1] - q_begin;
  }
  if (k_lengths != nullptr) keys = k_lengths[sequence];
  const long rows = group * queries;
  if (first >= rows) return;  // the whole group
  const long offset = bottom_right != 0 ? keys - queries : 0;
  long from = offset - behind;
  long to = queries - 1 + offset + ahead + 1;
  from = behind < 0 || from < 0 ? 0 : from;
  to = ahead < 0 || to > keys ? keys : to;
  // Whole blocks for each split.
  const long blocks = to > from ? (to - from + kBlock - 1) / kBlock : 0;
  const long chunk = (blocks + splits - 1) / splits * kBlock;
  from += split * chunk;
  to = from + chunk < to ? from + chunk : to;

  const auto place_of = [=](long j, long& block, long& line) {
    block = sequence;
    line = j;
    if (table != nullptr) {
      block = table[sequence * table_row + j / block_size];
      line = j % block_size;
    }
  };
  for (int at = item; at < kRows * size; at += kItems) {
    const long row = first + at / size;
    float number = 0.f;
    if (row < rows) {
      number =
          load(q + (q_starts != nullptr ? 0 : sequence * q_batch) +
                   (kv_head * group + row / queries) * q_head + (q_begin + row % queries) * q_row,
               at % size);
    }
    query_numbers[at] = number;
  }
  // Of the softmax the item has a part of the query `own`.
  const int own = item / kOfRow;
  const int column = item % kOfRow;
  const long row = first + own < rows ? first + own : rows - 1;
  const long head = kv_head * group + row / queries;
  const long place = row % queries + offset;
  const float* bias =
      mask != nullptr ? mask + sequence * m_batch + head * m_head + row % queries * m_row : nullptr;
  const float low = -__builtin_inff();
  float most = low;
  float total = 0.f;
  // Of the values it has eight numbers of the keys slice, slice + slices, ...
  const int vectors = static_cast<int>(value_size) / 8;
  const int slices = kItems / vectors;
  const int vector = item % vectors;
  const int slice = item / vectors;
  float sums[kRows][8] = {};
  sycl::group_barrier(team);

  for (long start = from; start < to; start += kBlock) {
    {
      const int t = item / kQuarters;
      const int quarter = item % kQuarters;
      float score[kRows] = {};
      if (start + t < to) {
        long block, line;
        place_of(start + t, block, line);
        const C* key = k + block * k_batch + kv_head * k_head + line * k_row;
        for (int d = quarter * 8; d < size; d += kQuarters * 8) {
          float numbers[8];
          load_eight(key + d, numbers);
#pragma unroll
          for (int r = 0; r < kRows; ++r) {
            const Four x = query[(r * size + d) / 4];
            const Four y = query[(r * size + d) / 4 + 1];
#pragma unroll
            for (int e = 0; e < 4; ++e) score[r] += x[e] * numbers[e] + y[e] * numbers[4 + e];
          }
        }
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r) part[(quarter * kRows + r) * kBlock + t] = score[r];
    }
    sycl::group_barrier(team);
    float score[kBlock / kOfRow];
    float value_factor[kBlock / kOfRow];
    float top = low;
#pragma unroll
    for (int i = 0; i < kBlock / kOfRow; ++i) {
      const int t = column + i * kOfRow;
      const long j = start + t;
      float s = 0.f;
#pragma unroll
      for (int p = 0; p < kQuarters; ++p) s += part[(p * kRows + own) * kBlock + t];
      s *= scale;
      value_factor[i] = 1.f;
      if (j < to && (k_rows != nullptr || v_rows != nullptr)) {
        long block, line;
        place_of(j, block, line);
        if (k_rows != nullptr) s *= k_rows[block * kr_batch + kv_head * kr_head + line * kr_row];
        if (v_rows != nullptr)
          value_factor[i] = v_rows[block * vr_batch + kv_head * vr_head + line * vr_row];
      }
      const long distance = j - place;
      if (softcap > 0.f) s = softcap * sycl::tanh(s / softcap);
      if (slopes != nullptr) {
        const float slope = slopes[sequence * slope_batch + head];
        s -= slope * static_cast<float>(distance < 0 ? -distance : distance);
      }
      if (bias != nullptr && j < to) s += bias[j * m_key];
      const bool hidden =
          j >= to || (ahead >= 0 && distance > ahead) || (behind >= 0 && -distance > behind);
      score[i] = hidden ? low : s;
      top = score[i] > top || score[i] != score[i] ? score[i] : top;
    }
    of_rows[item] = top;
    sycl::group_barrier(team);
    float next = most;
    for (int i = 0; i < kOfRow; ++i) {
      const float other = of_rows[own * kOfRow + i];
      next = other > next ? other : next;
    }
    const float base = next == low ? 0.f : next;
    const float factor = sycl::exp(most - base);
    most = next;
    total *= factor;
#pragma unroll
    for (int i = 0; i < kBlock / kOfRow; ++i) {
      const float weight = sycl::exp(score[i] - base);
      total += weight;
      weights[own * kBlock + column + i * kOfRow] = weight * value_factor[i];
    }
    if (column == 0) factors[own] = factor;
    sycl::group_barrier(team);
    if (slice < slices) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const float scaled = factors[r];
#pragma unroll
        for (int e = 0; e < 8; ++e) sums[r][e] *= scaled;
      }
      const int count = to - start < kBlock ? static_cast<int>(to - start) : kBlock;
      for (int t = slice; t < count; t += slices) {
        long block, line;
        place_of(start + t, block, line);
        float numbers[8];
        load_eight(v + block * v_batch + kv_head * v_head + line * v_row + vector * 8, numbers);
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          const float weight = weights[r * kBlock + t];
#pragma unroll
          for (int e = 0; e < 8; ++e) sums[r][e] += weight * numbers[e];
        }
      }
    }
  }

  // The sums of the slices, one after the other, so that results repeat.
  of_rows[item] = total;
  for (int s = 0; s < slices; ++s) {
    if (slice == s) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          float* const at = query_numbers + r * kMaxSize + vector * 8 + e;
          *at = s == 0 ? sums[r][e] : *at + sums[r][e];
        }
      }
    }
    sycl::group_barrier(team);
  }
  const long index =
      (sequence * static_cast<long>(position.get_group_range(1)) + kv_head) * splits + split;
  for (int at = item; at < kRows * value_size; at += kItems) {
    const long r = at / value_size;
    if (first + r < rows)
      parts[(index * most_rows + first + r) * value_size + at % value_size] =
          query_numbers[r * kMaxSize + at % value_size];
  }
  if (column == 0 && first + own < rows) {
    float whole = 0.f;
    for (int i = 0; i < kOfRow; ++i) whole += of_rows[own * kOfRow + i];
    stats[2 * (index * most_rows + first + own)] = most;
    stats[2 * (index * most_rows + first + own) + 1] = whole;
  }
}

// Joins the splits of a query: an item owns a number of it.
template <typename T>
IPEX_KERNEL(2)
void attention_join(const float* parts, const float* stats, T* out, const float* sinks,
                    const int* q_starts, long group, long queries, long value_size, long most_rows,
                    long splits, long heads, long o_batch, long o_head, long o_row,
                    float value_scale) {
  const auto position = here::this_work_item::get_nd_item<2>();
  const long d = position.get_global_id(1);
  const long index = static_cast<long>(position.get_global_id(0)) / most_rows;
  const long row = static_cast<long>(position.get_global_id(0)) % most_rows;
  const long sequence = index / heads;
  const long kv_head = index % heads;
  long q_begin = 0;
  if (q_starts != nullptr) {
    q_begin = q_starts[sequence];
    queries = q_starts[sequence + 1] - q_begin;
  }
  if (d >= value_size || row >= group * queries) return;
  const float low = -__builtin_inff();
  float most = low;
  for (long s = 0; s < splits; ++s) {
    const float top = stats[2 * ((index * splits + s) * most_rows + row)];
    most = top > most ? top : most;
  }
  const float base = most == low ? 0.f : most;
  float sum = 0.f;
  float whole = 0.f;
  for (long s = 0; s < splits; ++s) {
    const long at = (index * splits + s) * most_rows + row;
    const float factor = sycl::exp(stats[2 * at] - base);
    whole += stats[2 * at + 1] * factor;
    sum += parts[at * value_size + d] * factor;
  }
  const long head = kv_head * group + row / queries;
  // A query that sees no key gives zeros. (A score that is not a number leaves a total that is
  // none.)
  float factor = whole == 0.f ? 0.f : 1.f / whole;
  if (sinks != nullptr && whole != 0.f) {
    const float peak = sycl::fmax(most, sinks[head]);
    const float weight = sycl::exp(most - peak);
    factor = weight / (whole * weight + sycl::exp(sinks[head] - peak));
  }
  T* const target = out + (q_starts != nullptr ? 0 : sequence * o_batch) + head * o_head +
                    (q_begin + row % queries) * o_row;
  store(target, d, sum * factor * value_scale);
}

#define ATTENTION_SPLIT(T, C)                                                                    \
  template void attention_split<T, C>(                                                           \
      const T*, const C*, const C*, float*, float*, const float*, const float*, const int*,      \
      const int*, const int*, long, long, long, long, long, long, long, long, long, long, long,  \
      long, long, long, long, long, long, long, long, long, long, long, long, long, long, float, \
      float, int, const float*, const float*, long, long, long, long, long, long);
#define OF_DTYPE(T)                                                                               \
  ATTENTION_SPLIT(T, T)                                                                           \
  ATTENTION_SPLIT(T, signed char)                                                                 \
  ATTENTION_SPLIT(T, e5m2)                                                                        \
  ATTENTION_SPLIT(T, e4m3)                                                                        \
  template void attention_join<T>(const float*, const float*, T*, const float*, const int*, long, \
                                  long, long, long, long, long, long, long, long, float);
OF_DTYPE(float)
OF_DTYPE(half)
OF_DTYPE(bf16)
