// SPDX-License-Identifier: Apache-2.0
// Attention of few queries for each head of keys (decoding) on a GPU: the keys of a sequence are
// split among work-groups, whose sums attention_join puts together. A group has up to kRows queries
// that share a head of keys. `lanes` neighboring items, a team, share a key and a value, eight
// numbers each, and have a softmax of their own for every kTeams-th kEach keys: nothing waits for
// another team until the end. (A barrier may be a call, before which all loads have to arrive.) The
// numbers of the next keys are on their way to registers meanwhile.
// Subnormal numbers may be zero.
#include "attention_rules.h"
#include "float8.h"

using Four = sycl::vec<float, 4>;

constexpr int kItems = 128;
constexpr int kLanes = 16;  // of a team, if heads have up to 128 numbers; else 32, a sub-group
constexpr int kMostRows = 8;

// Of each team: sums, the largest score of each query, and the sums of the weights.
constexpr int kMostTeams = kItems / kLanes;
here::experimental::work_group_static<Four[kItems * 8 * kMostRows / 4]> sum_tile;
here::experimental::work_group_static<float[2 * kMostTeams * kMostRows]> stat_tile;

// Number j of eight.
template <typename C>
IPEX_INLINE inline float number_of(const Stored<C>& words, int j) {
  constexpr int kOf = 4 / sizeof(C);
  const unsigned int word = words[j / kOf] >> (j % kOf * 8 * (sizeof(C) % 4));
  if constexpr (sizeof(C) == 4) {
    return sycl::bit_cast<float>(word);
  } else if constexpr (sizeof(C) == 2) {
    return static_cast<float>(sycl::bit_cast<C>(static_cast<unsigned short>(word)));
  } else if constexpr (std::is_same_v<C, signed char>) {
    // 2^23 + 128 + the code, whose conversion would take longer.
    return sycl::bit_cast<float>(0x4b000000u | ((word & 0xff) ^ 0x80)) - 8388736.f;
  } else {
    return static_cast<float>(sycl::bit_cast<C>(static_cast<unsigned char>(word)));
  }
}

// All items have a part of all scores: in each step an item gives half of its own away, and keeps
// the score of its place in the end.
template <int step>
IPEX_INLINE inline void gather(const sycl::sub_group& sub_group, int item, float (&score)[kLanes]) {
  const bool upper = (item & step) != 0;
#pragma unroll
  for (int i = 0; i < step; ++i) {
    const float a = score[i];
    const float b = score[i + step];
    score[i] = (upper ? b : a) + sycl::permute_group_by_xor(sub_group, upper ? a : b, step);
  }
  if constexpr (step > 1) gather<step / 2>(sub_group, item, score);
}

// The arguments of attend in attention.h. parts: for each sequence, head of keys, split and query
// (most_rows of them) value_size sums; stats: the largest score and the sum of the weights.
template <typename T, typename C, int kRows>
IPEX_KERNEL(3)
SYCL_EXT_ONEAPI_FUNCTION_PROPERTY((here::experimental::sub_group_size<32>)) void attention_split(
    const T* q, const C* k, const C* v, float* parts, float* stats, const float* mask,
    const float* slopes, const int* q_starts, const int* k_lengths, const int* table, long group,
    long queries, long keys, long size, long value_size, long most_rows, long splits, long q_batch,
    long q_head, long q_row, long k_batch, long k_head, long k_row, long v_batch, long v_head,
    long v_row, long m_batch, long m_head, long m_row, long m_key, long slope_batch, long table_row,
    long block_size, long behind, long ahead, float scale, float softcap, int bottom_right,
    const float* k_rows, const float* v_rows, long kr_batch, long kr_head, long kr_row,
    long vr_batch, long vr_head, long vr_row) {
  constexpr int kEach = kLanes / kRows;  // keys: as many scores as items
  const auto position = here::this_work_item::get_nd_item<3>();
  const auto sub_group = position.get_sub_group();
  const int item = static_cast<int>(position.get_local_id(2));
  const long sequence = position.get_group(0);
  const long kv_head = position.get_group(1);
  const auto index_of_group = static_cast<unsigned int>(position.get_group(2));
  const auto split = static_cast<int>(index_of_group % static_cast<unsigned int>(splits));
  const unsigned int first = index_of_group / static_cast<unsigned int>(splits) * kRows;

  const Sequence all(sequence, q_starts, nullptr, k_lengths, group, queries, keys, first, kRows,
                     behind, ahead, bottom_right);
  if (all.nothing()) return;
  const int lanes = size > kLanes * 8 || value_size > kLanes * 8 ? 2 * kLanes : kLanes;
  const int teams = kItems / lanes;
  const int block = teams * kEach;
  // Whole blocks for each split.
  const int blocks = all.to > all.from ? (all.to - all.from + block - 1) / block : 0;
  const int chunk = (blocks + static_cast<int>(splits) - 1) / static_cast<int>(splits) * block;
  const int from = all.from + split * chunk;
  const int to = from + chunk < all.to ? from + chunk : all.to;

  // The item has the numbers `at` to `at` + 7 of kEach neighboring keys of each block.
  const int at = item % lanes * 8;
  const int team = item / lanes;
  const int shift = team * kEach;
  const bool of_key = at < size;
  const bool of_value = at < value_size;
  float query[kRows][8];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const unsigned int row = first + r;
    const bool there = row < all.rows && of_key;
    const T* const own =
        all.line(q, row, q_starts, sequence, q_batch, q_head, q_row, kv_head * group) + at;
#pragma unroll
    for (int e = 0; e < 8; ++e) query[r][e] = there ? load(own, e) : 0.f;
  }

  // Where the keys of a block lie, known one block ahead. Behind the last key it is read again.
  const auto of_page = static_cast<unsigned int>(block_size);
  int pages[kEach];
  int lines[kEach];
  const auto find = [&](int start) IPEX_INLINE {
    const int j = start + shift < to ? start + shift : to - 1;
    pages[0] = static_cast<int>(sequence);
    lines[0] = j;
    if (table == nullptr) {
#pragma unroll
      for (int i = 1; i < kEach; ++i) {
        pages[i] = pages[0];
        lines[i] = j + i < to ? j + i : to - 1;
      }
      return;
    }
    auto page = static_cast<unsigned int>(j) / of_page;
    auto line = static_cast<unsigned int>(j) - page * of_page;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      pages[i] = table[sequence * table_row + page];
      lines[i] = static_cast<int>(line);
      if (j + i + 1 >= to) continue;
      const bool next = ++line == of_page;
      page += next ? 1 : 0;
      line = next ? 0 : line;
    }
  };
  k += kv_head * k_head + (of_key ? at : 0);
  v += kv_head * v_head + (of_value ? at : 0);
  // Of the softmax the item has the query `own` and the key `mine` of each block of its team.
  const int own = item % kRows;
  const int mine = item % kLanes / kRows;
  // Steps are below 2^31.
  const auto fetch = [&](Stored<C>(&numbers)[kEach], const C* x, int batch, int step) IPEX_INLINE {
#pragma unroll
    for (int i = 0; i < kEach; ++i)
      numbers[i] = *reinterpret_cast<const Stored<C>*>(x + static_cast<long>(pages[i]) * batch +
                                                       static_cast<long>(lines[i]) * step);
  };
  const auto factor_of = [&](const float* scales, long batch, long head, long step) IPEX_INLINE {
    if (scales == nullptr) return 1.f;
    long page = pages[0];
    long line = lines[0];
#pragma unroll
    for (int i = 1; i < kEach; ++i) {
      page = mine == i ? pages[i] : page;
      line = mine == i ? lines[i] : line;
    }
    return scales[page * batch + kv_head * head + line * step];
  };
  Stored<C> some_keys[kEach];
  Stored<C> some_values[kEach];
  float key_factor = 1.f;
  float value_factor = 1.f;
  const auto fetch_keys = [&] IPEX_INLINE {
    fetch(some_keys, k, static_cast<int>(k_batch), static_cast<int>(k_row));
    key_factor = factor_of(k_rows, kr_batch, kr_head, kr_row);
  };
  const auto fetch_values = [&] IPEX_INLINE {
    fetch(some_values, v, static_cast<int>(v_batch), static_cast<int>(v_row));
    value_factor = factor_of(v_rows, vr_batch, vr_head, vr_row);
  };
  if (from < to) {
    find(from);
    fetch_keys();
    fetch_values();
    find(from + block);
  }

  const unsigned int row = all.row(own);
  const long head = kv_head * group + row / all.queries;
  const int place = static_cast<int>(row % all.queries) + all.offset;
  const float slope = slopes != nullptr ? slopes[sequence * slope_batch + head] : 0.f;
  const float* const bias =
      mask != nullptr ? mask + sequence * m_batch + head * m_head + row % all.queries * m_row
                      : nullptr;
  const float cap = softcap > 0.f ? 1.f / softcap : 0.f;
  const float low = -__builtin_inff();
  const int leader = item % 32 / kLanes * kLanes;  // the first item with these queries and keys
  const auto from_item = [&](float value, int i) IPEX_INLINE {
    return sycl::select_from_group(sub_group, value, leader + i);
  };
  const auto exchanged = [&](float value, int step) IPEX_INLINE {
    return sycl::permute_group_by_xor(sub_group, value, step);
  };
  float most = low;
  float total = 0.f;
  float sums[kRows][8] = {};

#pragma unroll 1
  for (int start = from; start < to; start += block) {
    float score[kLanes];
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      float numbers[8];
#pragma unroll
      for (int e = 0; e < 8; ++e) numbers[e] = number_of<C>(some_keys[i], e);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        float product = 0.f;
#pragma unroll
        for (int e = 0; e < 8; ++e) product += query[r][e] * numbers[e];
        score[i * kRows + r] = of_key ? product : 0.f;
      }
    }
    const float factor_of_key = key_factor;
    fetch_keys();
    gather<kLanes / 2>(sub_group, item, score);
    float s = score[0];
    if (lanes > kLanes) s += exchanged(s, kLanes);
    s *= scale * factor_of_key;
    const int j = start + shift + mine;
    const int distance = j - place;
    if (softcap > 0.f) s = softcap * capped(s * cap);
    if (slopes != nullptr) s -= slope * static_cast<float>(distance < 0 ? -distance : distance);
    if (mask != nullptr && j < to) s += bias[j * m_key];
    const bool hidden = j >= to || all.hides(j, distance);
    s = hidden ? low : s;
    float next = s > most ? s : most;
#pragma unroll
    for (int step = kRows; step < kLanes; step *= 2) {
      const float other = exchanged(next, step);
      next = other > next ? other : next;
    }
    const float base = next == low ? 0.f : next;
    const float factor = power((most - base) * kLog2e);
    float weight = power((s - base) * kLog2e);
    most = next;
    total = total * factor + weight;
    weight *= value_factor;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float scaled = from_item(factor, r);
#pragma unroll
      for (int e = 0; e < 8; ++e) sums[r][e] *= scaled;
    }
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      float numbers[8];
#pragma unroll
      for (int e = 0; e < 8; ++e) numbers[e] = number_of<C>(some_values[i], e);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const float share = from_item(weight, i * kRows + r);
#pragma unroll
        for (int e = 0; e < 8; ++e) sums[r][e] += share * numbers[e];
      }
    }
    fetch_values();
    find(start + 2 * block);
  }
#pragma unroll
  for (int step = kRows; step < kLanes; step *= 2) total += exchanged(total, step);

  // The teams of a group, always in the same order.
  const int pace = lanes * 8;  // from a query to the next one
  Four* const fours = *&sum_tile;
  const float* const numbers_of_teams = reinterpret_cast<const float*>(fours);
  float* const stats_of_teams = *&stat_tile;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    Four* const own_sums = fours + ((team * kRows + r) * pace + at) / 4;
    own_sums[0] = Four(sums[r][0], sums[r][1], sums[r][2], sums[r][3]);
    own_sums[1] = Four(sums[r][4], sums[r][5], sums[r][6], sums[r][7]);
  }
  if (item % lanes < kRows) {
    stats_of_teams[2 * (team * kRows + own)] = most;
    stats_of_teams[2 * (team * kRows + own) + 1] = total;
  }
  sycl::group_barrier(position.get_group());
  const long place_of_group =
      ((sequence * static_cast<long>(position.get_group_range(1)) + kv_head) * splits + split) *
          most_rows +
      first;
  join_teams<kRows>(all, numbers_of_teams, stats_of_teams, teams, pace, item, kItems, value_size,
                    parts + place_of_group * value_size, stats + 2 * place_of_group);
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
#pragma unroll 8
  for (long s = 0; s < splits; ++s) {
    const float top = stats[2 * ((index * splits + s) * most_rows + row)];
    most = top > most ? top : most;
  }
  const float base = most == low ? 0.f : most;
  float sum = 0.f;
  float whole = 0.f;
#pragma unroll 8
  for (long s = 0; s < splits; ++s) {
    const long at = (index * splits + s) * most_rows + row;
    const float factor = power((stats[2 * at] - base) * kLog2e);
    whole += stats[2 * at + 1] * factor;
    sum += parts[at * value_size + d] * factor;
  }
  const long head = kv_head * group + row / queries;
  const float factor = share_of(whole, most, sinks, head);
  T* const target = out + (q_starts != nullptr ? 0 : sequence * o_batch) + head * o_head +
                    (q_begin + row % queries) * o_row;
  store(target, d, sum * factor * value_scale);
}

#define ATTENTION_SPLIT(T, C, kRows) \
  template void attention_split<T, C, kRows>(IPEX_SPLIT_ARGUMENTS(T, C));
#define OF_ROWS(T, C) ATTENTION_SPLIT(T, C, 4) ATTENTION_SPLIT(T, C, 8)
#define OF_DTYPE(T)                                                                               \
  OF_ROWS(T, T)                                                                                   \
  OF_ROWS(T, signed char)                                                                         \
  OF_ROWS(T, e5m2)                                                                                \
  OF_ROWS(T, e4m3)                                                                                \
  template void attention_join<T>(const float*, const float*, T*, const float*, const int*, long, \
                                  long, long, long, long, long, long, long, long, float);
OF_DTYPE(float)
OF_DTYPE(half)
OF_DTYPE(bf16)
