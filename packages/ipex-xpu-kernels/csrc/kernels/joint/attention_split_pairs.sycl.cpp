// SPDX-License-Identifier: Apache-2.0
// Attention of few queries for each head of keys (decoding) by joint_matrix where the layout of
// ../pairs.h holds: the keys of a sequence are split among work-groups, whose sums attention_join
// puts together. A sub-group goes through 16 keys at a time and has a softmax of its own. Keys and
// values come from memory as items hold them of a matrix, the next ones meanwhile.
// Subnormal numbers may be zero.
#include "attention_rules.h"
#include "pairs.h"

constexpr int kSubGroups = 4;
constexpr int kItems = kSubGroups * 32;
constexpr int kMostRows = 16;
constexpr int kMostSize = 128;
// Of each sub-group: sums, the largest score of each query, and the sums of the weights.
here::experimental::work_group_static<Vector[kSubGroups * kMostRows * kMostSize / 4]> sum_tile;
here::experimental::work_group_static<float[2 * kSubGroups * kMostRows]> stat_tile;

using Two = __bf16 __attribute__((ext_vector_type(2)));

// Codes in bits 0 to 7 and 16 to 23 as numbers: 128 + the code's lower bits less 128, or 256 if it
// is below 0.
IPEX_INLINE inline unsigned int numbers_of(unsigned int codes) {
  const auto more = sycl::bit_cast<Two>((codes & 0x007f007fu) | 0x43004300u);
  const auto less = sycl::bit_cast<Two>((codes & 0x00800080u) | 0x43004300u);
  return sycl::bit_cast<unsigned int>(more - less);
}

// Number j of x and of z.
template <typename C>
IPEX_INLINE inline unsigned int pair_at(const Stored<C>& x, const Stored<C>& z, int j) {
  if constexpr (sizeof(C) == 2) {
    return pair_of_row(x[j / 2], z[j / 2], j);
  } else {
    return numbers_of(pair_of_row(x[j / 4], z[j / 4], j % 4 / 2) >> (j % 2 * 8));
  }
}

// The arguments of attention_split. kOwn: queries of an item.
template <typename T, typename C, int kSize, int kOwn>
IPEX_KERNEL(3)
void attention_split_pairs(const T* q, const C* k, const C* v, float* parts, float* stats,
                           const float* mask, const float* slopes, const int* q_starts,
                           const int* k_lengths, const int* table, long group, long queries,
                           long keys, long size, long value_size, long most_rows, long splits,
                           long q_batch, long q_head, long q_row, long k_batch, long k_head,
                           long k_row, long v_batch, long v_head, long v_row, long m_batch,
                           long m_head, long m_row, long m_key, long slope_batch, long table_row,
                           long block_size, long behind, long ahead, float scale, float softcap,
                           int bottom_right, const float* k_rows, const float* v_rows,
                           long kr_batch, long kr_head, long kr_row, long vr_batch, long vr_head,
                           long vr_row) {
  using E = typename Element<T>::type;
  constexpr bool kCodes = sizeof(C) == 1;
  constexpr int kRows = 8 * kOwn;
  constexpr int kParts = kSize / kSide;
  constexpr int kBlocks = kSize / kDepth;  // of 32 numbers of a key
  constexpr int kHalves = kSize / 64;      // of 64 numbers of a value
  constexpr int kBlock = kSubGroups * kSide;
  const auto position = here::this_work_item::get_nd_item<3>();
  const auto sub_group = position.get_sub_group();
  const int item = static_cast<int>(position.get_local_id(2));
  const int team = item / 32;
  const int g = item % 32 / 4;
  const int t = item % 4;
  const long sequence = position.get_group(0);
  const long kv_head = position.get_group(1);
  const auto index_of_group = static_cast<unsigned int>(position.get_group(2));
  const auto split = static_cast<int>(index_of_group % static_cast<unsigned int>(splits));
  const unsigned int first_row = index_of_group / static_cast<unsigned int>(splits) * kRows;

  const Sequence all(sequence, q_starts, nullptr, k_lengths, group, queries, keys, first_row, kRows,
                     behind, ahead, bottom_right);
  if (all.nothing()) return;
  // Whole blocks for each split.
  const int blocks = all.to > all.from ? (all.to - all.from + kBlock - 1) / kBlock : 0;
  const int chunk = (blocks + static_cast<int>(splits) - 1) / static_cast<int>(splits) * kBlock;
  const int from = all.from + split * chunk;
  const int to = from + chunk < all.to ? from + chunk : all.to;
  const int begin = from + team * kSide;

  // The item's queries: rows g and g + 8.
  int place[kOwn];
  float slope[kOwn];
  const float* bias[kOwn];
  const T* query[kOwn];
#pragma unroll
  for (int r = 0; r < kOwn; ++r) {
    const unsigned int row = all.row(g + 8 * r);
    const long head = kv_head * group + row / all.queries;
    const int at = static_cast<int>(row % all.queries);
    place[r] = at + all.offset;
    slope[r] = slopes != nullptr ? slopes[sequence * slope_batch + head] : 0.f;
    bias[r] = mask != nullptr ? mask + sequence * m_batch + head * m_head + at * m_row : nullptr;
    query[r] = all.line(q, row, q_starts, sequence, q_batch, q_head, q_row, kv_head * group);
  }
  Left<E> parts_of_query[kParts];
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
    const int at = b * kDepth + t * 8;
    Vector x[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      Vector own(0);
      if (r < kOwn && at < size)
        own = *reinterpret_cast<const Vector*>(query[r < kOwn ? r : 0] + at);
      // Steps 0 and 2, 1 and 3 of four codes are the pairs.
      x[r] = kCodes ? Vector{pair_of_row(own[0], own[1], 0), pair_of_row(own[0], own[1], 1),
                             pair_of_row(own[2], own[3], 0), pair_of_row(own[2], own[3], 1)}
                    : own;
    }
    set_unit(sub_group, parts_of_query[2 * b], unit_of<true>(x[0][0], x[0][1], x[1][0], x[1][1]));
    set_unit(sub_group, parts_of_query[2 * b + 1],
             unit_of<true>(x[0][2], x[0][3], x[1][2], x[1][3]));
  }

  // Where key item % 16 of a block lies, known one block ahead. Behind the last key it is read
  // again.
  const auto of_page = static_cast<unsigned int>(block_size);
  int page = static_cast<int>(sequence);
  int line = 0;
  const auto find = [&](int start) IPEX_INLINE {
    const int j = start + item % kSide < to ? start + item % kSide : to - 1;
    line = j;
    if (table == nullptr) return;
    const unsigned int of_table = static_cast<unsigned int>(j) / of_page;
    line = j - static_cast<int>(of_table * of_page);
    page = table[sequence * table_row + of_table];
  };
  k += kv_head * k_head;
  v += kv_head * v_head;
  const int k_page = static_cast<int>(k_batch);
  const int k_line = static_cast<int>(k_row);
  const int v_page = static_cast<int>(v_batch);
  const int v_line = static_cast<int>(v_row);
  const auto from_item = [&](auto value, int i)
                             IPEX_INLINE { return sycl::select_from_group(sub_group, value, i); };
  // Keys g and g + 8 of 16; of the values 2 t, 2 t + 1, 2 t + 8 and 2 t + 9.
  Stored<C> some_keys[kBlocks][2];
  Stored<C> some_values[4][kHalves];
  float value_factor = 1.f;
  float key_factor = 1.f;
  const auto fetch_keys = [&]() IPEX_INLINE {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const C* const x = k + static_cast<long>(from_item(page, g + 8 * half)) * k_page +
                         static_cast<long>(from_item(line, g + 8 * half)) * k_line;
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        const int at = b * kDepth + t * 8;
        some_keys[b][half] = *reinterpret_cast<const Stored<C>*>(x + (at < size ? at : 0));
      }
    }
    if (kCodes && k_rows != nullptr)
      key_factor = k_rows[page * kr_batch + kv_head * kr_head + line * kr_row];
  };
  const auto fetch_values = [&]() IPEX_INLINE {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int own = 2 * t + i % 2 + i / 2 * 8;
      const C* const x = v + static_cast<long>(from_item(page, own)) * v_page +
                         static_cast<long>(from_item(line, own)) * v_line;
#pragma unroll
      for (int h = 0; h < kHalves; ++h) {
        const int at = h * 64 + g * 8;
        some_values[i][h] = *reinterpret_cast<const Stored<C>*>(x + (at < value_size ? at : 0));
      }
    }
    if (kCodes && v_rows != nullptr)
      value_factor = v_rows[page * vr_batch + kv_head * vr_head + line * vr_row];
  };
  if (begin < to) {
    find(begin);
    fetch_keys();
    fetch_values();
    find(begin + kBlock);
  }

  const float cap = softcap > 0.f ? 1.f / softcap : 0.f;
  const float low = -__builtin_inff();
  float most[kOwn];
  float total[kOwn];  // of the item's own keys
#pragma unroll
  for (int r = 0; r < kOwn; ++r) {
    most[r] = low;
    total[r] = 0.f;
  }
  Sums sums[kParts];
#pragma unroll
  for (int d = 0; d < kParts; ++d) joint::joint_matrix_fill(sub_group, sums[d], 0.f);

#pragma unroll 1
  for (int start = begin; start < to; start += kBlock) {
    Sums products;
    joint::joint_matrix_fill(sub_group, products, 0.f);
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const Stored<C> x = some_keys[b][0];
        const Stored<C> z = some_keys[b][1];
        Right<E> columns;
        if constexpr (kCodes) {
          set_unit(sub_group, columns,
                   unit_of<false>(numbers_of(x[half]), numbers_of(x[half] >> 8),
                                  numbers_of(z[half]), numbers_of(z[half] >> 8)));
        } else {
          set_unit(sub_group, columns,
                   unit_of<false>(x[2 * half], x[2 * half + 1], z[2 * half], z[2 * half + 1]));
        }
        joint::joint_matrix_mad(sub_group, products, parts_of_query[2 * b + half], columns,
                                products);
      }
    }
    // Number i of a query is of key 2 t + i % 2 + i / 2 * 8.
    float score[2][4];
    int e = 0;
    joint::joint_matrix_apply(sub_group, products, [&](float& value) IPEX_INLINE {
      score[e / 2 % 2][e / 4 * 2 + e % 2] = value;
      ++e;
    });
    float of_key[4] = {1.f, 1.f, 1.f, 1.f};
    float of_value[4] = {1.f, 1.f, 1.f, 1.f};
    if (kCodes && k_rows != nullptr) {
#pragma unroll
      for (int i = 0; i < 4; ++i) of_key[i] = from_item(key_factor, 2 * t + i % 2 + i / 2 * 8);
    }
    if (kCodes && v_rows != nullptr) {
#pragma unroll
      for (int i = 0; i < 4; ++i) of_value[i] = from_item(value_factor, 2 * t + i % 2 + i / 2 * 8);
    }
    fetch_keys();
    float factor[kOwn];
    bool changed = false;
#pragma unroll
    for (int r = 0; r < kOwn; ++r) {
      float top = most[r];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int j = start + 2 * t + i % 2 + i / 2 * 8;
        const int distance = j - place[r];
        float s = score[r][i] * (scale * of_key[i]);
        if (softcap > 0.f) s = softcap * capped(s * cap);
        if (slopes != nullptr)
          s -= slope[r] * static_cast<float>(distance < 0 ? -distance : distance);
        if (mask != nullptr && j < to) s += bias[r][j * m_key];
        score[r][i] = j >= to || all.hides(j, distance) ? low : s;
        top = larger(score[r][i], top);
      }
      top = shared(sub_group, top, [](float a, float b) IPEX_INLINE { return larger(a, b); });
      const float base = top == low ? 0.f : top;
      factor[r] = power((most[r] - base) * kLog2e);
      changed = changed || factor[r] != 1.f;
      most[r] = top;
      total[r] *= factor[r];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float weight = power((score[r][i] - base) * kLog2e);
        total[r] += weight;
        score[r][i] = weight * of_value[i];
      }
    }
    if (changed) {
#pragma unroll
      for (int d = 0; d < kParts; ++d) {
        int n = 0;
        joint::joint_matrix_apply(sub_group, sums[d], [&](float& value) IPEX_INLINE {
          if (n / 2 % 2 < kOwn) value *= factor[n / 2 % 2 < kOwn ? n / 2 % 2 : 0];
          ++n;
        });
      }
    }
    Left<E> weights;
    const unsigned int second0 = kOwn == 2 ? pair_of<T>(score[1][0], score[1][1]) : 0;
    const unsigned int second1 = kOwn == 2 ? pair_of<T>(score[1][2], score[1][3]) : 0;
    set_unit(sub_group, weights,
             unit_of<true>(pair_of<T>(score[0][0], score[0][1]),
                           pair_of<T>(score[0][2], score[0][3]), second0, second1));
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
#pragma unroll
      for (int d = 0; d < 4; ++d) {
        const auto pair = [&](int i, int j) IPEX_INLINE {
          return pair_at<C>(some_values[i][h], some_values[i + 1][h], j);
        };
        Right<E> columns;
        set_unit(
            sub_group, columns,
            unit_of<false>(pair(0, 2 * d), pair(2, 2 * d), pair(0, 2 * d + 1), pair(2, 2 * d + 1)));
        joint::joint_matrix_mad(sub_group, sums[4 * h + d], weights, columns, sums[4 * h + d]);
      }
    }
    fetch_values();
    find(start + 2 * kBlock);
  }

  // The sub-groups of a group, always in the same order.
  Vector* const fours = *&sum_tile;
  float* const stats_of_teams = *&stat_tile;
#pragma unroll
  for (int h = 0; h < kHalves; ++h) {
    float numbers[2][16];
#pragma unroll
    for (int d = 0; d < 4; ++d) {
      int e = 0;
      joint::joint_matrix_apply(sub_group, sums[4 * h + d], [&](float& value) IPEX_INLINE {
        numbers[e / 2 % 2][e % 2 * 8 + 2 * d + e / 4] = value;
        ++e;
      });
    }
#pragma unroll
    for (int r = 0; r < kOwn; ++r) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* const x = numbers[r] + 4 * i;
        fours[((team * kRows + g + 8 * r) * kSize + h * 64 + t * 16) / 4 + i] =
            Vector{sycl::bit_cast<unsigned int>(x[0]), sycl::bit_cast<unsigned int>(x[1]),
                   sycl::bit_cast<unsigned int>(x[2]), sycl::bit_cast<unsigned int>(x[3])};
      }
    }
  }
#pragma unroll
  for (int r = 0; r < kOwn; ++r) {
    const float whole =
        shared(sub_group, total[r], [](float a, float b) IPEX_INLINE { return a + b; });
    if (t != 0) continue;
    stats_of_teams[2 * (team * kRows + g + 8 * r)] = most[r];
    stats_of_teams[2 * (team * kRows + g + 8 * r) + 1] = whole;
  }
  sycl::group_barrier(position.get_group());
  const long place_of_group =
      ((sequence * static_cast<long>(position.get_group_range(1)) + kv_head) * splits + split) *
          most_rows +
      first_row;
  join_teams<kRows>(all, reinterpret_cast<const float*>(fours), stats_of_teams, kSubGroups, kSize,
                    item, kItems, value_size, parts + place_of_group * value_size,
                    stats + 2 * place_of_group);
}

#define SPLIT_PAIRS(T, C, kSize, kOwn) \
  template void attention_split_pairs<T, C, kSize, kOwn>(IPEX_SPLIT_ARGUMENTS(T, C));
#define ALL(T, C)           \
  SPLIT_PAIRS(T, C, 64, 1)  \
  SPLIT_PAIRS(T, C, 64, 2)  \
  SPLIT_PAIRS(T, C, 128, 1) \
  SPLIT_PAIRS(T, C, 128, 2)
ALL(half, half)
ALL(bf16, bf16)
ALL(bf16, signed char)
