// SPDX-License-Identifier: Apache-2.0
// Attention by joint_matrix where the layout of ../pairs.h holds, with the arguments of
// attention_tiles.sycl.cpp, for heads of up to kSize numbers of 16 bits. A group owns 64 or 128
// queries that share a head of keys and goes through the keys in blocks, of which the next one is
// on its way to registers; a sub-group owns 16 or 32 of the queries. Scores of 32 keys at a time
// stay in registers: what an item holds of them is what it holds of the left operand of the product
// with the values, if keys are dealt out as steps are. Values are kept by columns, since their
// steps are the keys.
// Subnormal numbers may be zero.
#include "attention_rules.h"
#include "pairs.h"

constexpr int kSubGroups = 4;
constexpr int kItems = kSubGroups * 32;
constexpr float kLowest = -3.4028235e38f;  // of numbers

template <int kSize>
constexpr int kKeys = 4096 / kSize;  // of a block
// Matrices of queries of a sub-group, which share what it reads of keys and values.
template <int kSize>
constexpr int kTall = kSize <= 64 ? 2 : 1;
constexpr int kStored = 4096 / 8;  // vectors of a block of keys or values
here::experimental::work_group_static<Vector[4 * kStored]> tiles_of_group;

// Calls `multiply` with each of kMatrices matrices of queries and both of the columns that `units`
// hold.
template <typename E, int kMatrices, typename F>
IPEX_INLINE inline void each_product(const sycl::sub_group& sub_group, const Vector* units,
                                     const int (&own)[2], F multiply) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    Right<E> columns;
    set_unit(sub_group, columns, units[own[half]]);
#pragma unroll
    for (int m = 0; m < kMatrices; ++m) multiply(m, half, columns);
  }
}

// `plain`: without masks, slopes, a bound of scores and a table, whose code takes registers even
// where it does not run.
template <typename T, int kSize, bool plain>
IPEX_KERNEL(3)
void attention_pairs(const T* q, const T* k, const T* v, T* out, const float* mask,
                     const float* slopes, const float* sinks, const int* q_starts,
                     const int* k_starts, const int* k_lengths, const int* table, long group,
                     long queries, long keys, long size, long value_size, long q_batch, long q_head,
                     long q_row, long k_batch, long k_head, long k_row, long v_batch, long v_head,
                     long v_row, long o_batch, long o_head, long o_row, long m_batch, long m_head,
                     long m_row, long m_key, long slope_batch, long table_row, long block_size,
                     long behind, long ahead, float scale, float softcap, int bottom_right) {
  using E = typename Element<T>::type;
  constexpr int kBlock = kKeys<kSize>;
  constexpr int kScores = kBlock / kSide;   // matrices of keys of a block
  constexpr int kParts = kSize / kSide;     // matrices of a query, and of the sums
  constexpr int kOwn = 2 * kTall<kSize>;    // queries of an item
  constexpr int kTogether = plain ? 2 : 1;  // for which the others have no registers
  constexpr int kRows = kSubGroups * kSide * kTall<kSize>;
  const auto position = here::this_work_item::get_nd_item<3>();
  const auto team = position.get_group();
  const auto sub_group = position.get_sub_group();
  const int item = static_cast<int>(position.get_local_id(2));
  const int g = item % 32 / 4;
  const int t = item % 4;
  const long sequence = position.get_group(0);
  const long kv_head = position.get_group(1);

  const Sequence all(sequence, q_starts, k_starts, k_lengths, group, queries, keys,
                     position.get_group(2) * kRows, kRows, behind, ahead, bottom_right);
  if (all.nothing()) return;
  const int from = all.from;
  const int to = all.to;

  k += kv_head * k_head;
  v += kv_head * v_head;
  if (plain || table == nullptr) {
    const long block = k_starts != nullptr ? 0 : sequence;
    k += block * k_batch + (all.k_begin + from) * k_row;
    v += block * v_batch + (all.k_begin + from) * v_row;
  }
  // Key j, of the block whose first key is `from` where there is no table.
  const auto at_line = [=](const T* x, long batch, long step, int j, int place) IPEX_INLINE {
    if (plain || table == nullptr) return x + place * step;
    const auto line = static_cast<unsigned int>(j);
    const auto lines = static_cast<unsigned int>(block_size);
    return x + table[sequence * table_row + line / lines] * batch + line % lines * step;
  };
  Vector* const tiles = *&tiles_of_group;
  // An item brings eight numbers of two keys twice, and eight of four values.
  const int value_row = item / kSize * kDepth + item % 8 * 4;
  const int value_at = item / 8 % (kSize / 8) * 8;
  const auto key_row = [](int j, int across, int half) IPEX_INLINE {
    return j / 2 * kDepth + across / 2 * 8 + j % 2 * 4 + half * 2 + across % 2;
  };
  Vector some_keys[2][2];
  Vector some_values[4];
  const auto fetch = [&](int start) IPEX_INLINE {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int block = (item + i * kItems) / 32;
      const int at = block / kScores * kDepth + t * 8;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int j = start + key_row(block % kScores, g, half);
        some_keys[i][half] =
            j < to && at < size
                ? *reinterpret_cast<const Vector*>(
                      at_line(k, k_batch, k_row, j, key_row(block % kScores, g, half)) + at)
                : Vector(0);
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int j = start + value_row + i;
      some_values[i] = j < to && value_at < value_size
                           ? *reinterpret_cast<const Vector*>(
                                 at_line(v, v_batch, v_row, j, value_row + i) + value_at)
                           : Vector(0);
    }
    if (plain || table == nullptr) {
      k += kBlock * k_row;
      v += kBlock * v_row;
    }
  };
  const auto put = [&](Vector* target) IPEX_INLINE {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      Vector* const units = target + (item + i * kItems) / 32 * kUnits;
      const Vector x = some_keys[i][0];
      const Vector z = some_keys[i][1];
      units[unit_at(g, t, 0)] = unit_of<false>(x[0], x[1], z[0], z[1]);
      units[unit_at(g, t, 1)] = unit_of<false>(x[2], x[3], z[2], z[3]);
    }
    Vector* const units = target + kStored + (item / kSize * kParts + value_at / kSide) * kUnits;
    // Keys 2 row and 2 row + 1 of a column.
    const auto pair = [&](int i, int row) IPEX_INLINE {
      return pair_of_row(some_values[2 * row][i / 2], some_values[2 * row + 1][i / 2], i);
    };
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
      units[unit_at(value_at % kSide / 2 + i / 2, item % 8 / 2, item % 2)] =
          unit_of<false>(pair(i, 0), pair(i, 1), pair(i + 1, 0), pair(i + 1, 1));
    }
  };
  if (from < to) fetch(from);

  // The item's queries: rows g and g + 8 of each matrix of its sub-group.
  int place[kOwn];
  float slope[kOwn];
  const float* bias[kOwn];
  const int own = item / 32 * kSide * kTall<kSize> + g;
  Left<E> parts_of_query[kTall<kSize>][kParts];
#pragma unroll
  for (int m = 0; m < kTall<kSize>; ++m) {
    const T* query[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = 2 * m + half;
      const unsigned int row = all.row(own + 8 * r);
      const long head = kv_head * group + row / all.queries;
      const int at = static_cast<int>(row % all.queries);
      place[r] = at + all.offset;
      slope[r] = slopes != nullptr ? slopes[sequence * slope_batch + head] : 0.f;
      bias[r] = mask != nullptr ? mask + sequence * m_batch + head * m_head + at * m_row : nullptr;
      query[half] = all.line(q, row, q_starts, sequence, q_batch, q_head, q_row, kv_head * group);
    }
#pragma unroll
    for (int b = 0; b < kParts / 2; ++b) {
      const int at = b * kDepth + t * 8;
      const bool inside = at < size;
      const Vector x = inside ? *reinterpret_cast<const Vector*>(query[0] + at) : Vector(0);
      const Vector z = inside ? *reinterpret_cast<const Vector*>(query[1] + at) : Vector(0);
      set_unit(sub_group, parts_of_query[m][2 * b], unit_of<true>(x[0], x[1], z[0], z[1]));
      set_unit(sub_group, parts_of_query[m][2 * b + 1], unit_of<true>(x[2], x[3], z[2], z[3]));
    }
  }
  const int own_units[2] = {unit_at(g, t, 0), unit_at(g, t, 1)};
  Sums sums[kTall<kSize>][kParts];
#pragma unroll
  for (int m = 0; m < kTall<kSize>; ++m) {
#pragma unroll
    for (int d = 0; d < kParts; ++d) joint::joint_matrix_fill(sub_group, sums[m][d], 0.f);
  }

  const float cap = softcap > 0.f ? 1.f / softcap : 0.f;
  const float low = -__builtin_inff();
  // What a score is multiplied by on its way to a power of 2; above 0 if plain.
  const float unit = plain ? scale * kLog2e : 1.f;
  float most[kOwn];   // before that
  float total[kOwn];  // of the item's own keys
#pragma unroll
  for (int r = 0; r < kOwn; ++r) {
    most[r] = low;
    total[r] = 0.f;
  }
  if (from < to) put(tiles);
  sycl::group_barrier(team);
  int now = 0;
#pragma unroll 1
  for (int start = from; start < to; start += kBlock) {
    if (start + kBlock < to) fetch(start + kBlock);
#pragma unroll kTogether
    for (int pass = 0; pass < kBlock / kDepth; ++pass) {
      const int first = start + pass * kDepth;
      // Number i of a query is of the key first + 8 t + i.
      float score[kOwn][8];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        Sums products[kTall<kSize>];
#pragma unroll
        for (int m = 0; m < kTall<kSize>; ++m)
          joint::joint_matrix_fill(sub_group, products[m], 0.f);
#pragma unroll
        for (int b = 0; b < kParts / 2; ++b) {
          const Vector* const units = tiles + now + (b * kScores + 2 * pass + j) * kUnits;
          each_product<E, kTall<kSize>>(sub_group, units, own_units,
                                        [&](int m, int half, const Right<E>& columns) IPEX_INLINE {
                                          joint::joint_matrix_mad(sub_group, products[m],
                                                                  parts_of_query[m][2 * b + half],
                                                                  columns, products[m]);
                                        });
        }
#pragma unroll
        for (int m = 0; m < kTall<kSize>; ++m) {
          int e = 0;
          joint::joint_matrix_apply(sub_group, products[m], [&](float& value) IPEX_INLINE {
            score[2 * m + e / 2 % 2][4 * j + e / 4 * 2 + e % 2] = value;
            ++e;
          });
        }
      }
      const bool edge = first + kDepth > to || first + kDepth - 1 - all.lowest > all.after ||
                        all.highest - first > all.before;
      if (!plain || edge) {
#pragma unroll
        for (int r = 0; r < kOwn; ++r) {
#pragma unroll
          for (int i = 0; i < 8; ++i) {
            const int key = first + t * 8 + i;
            const int distance = key - place[r];
            float s = score[r][i];
            if (!plain) {
              s *= scale;
              if (softcap > 0.f) s = softcap * capped(s * cap);
              if (slopes != nullptr)
                s -= slope[r] * static_cast<float>(distance < 0 ? -distance : distance);
              if (mask != nullptr && key < to) s += bias[r][key * m_key];
              // The lowest number, of masks, stays one.
              const float scaled = s * kLog2e;
              s = s == low ? low : scaled < kLowest ? kLowest : scaled;
            }
            score[r][i] = all.hides(key, distance) ? low : s;
          }
        }
      }
      float factor[kOwn];
      bool changed = false;
#pragma unroll
      for (int r = 0; r < kOwn; ++r) {
        float top = most[r];
#pragma unroll
        for (int i = 0; i < 8; ++i) top = larger(score[r][i], top);
        top = shared(sub_group, top, [](float a, float b) IPEX_INLINE { return larger(a, b); });
        const float base = top == low ? 0.f : top * unit;
        factor[r] = power(most[r] * unit - base);
        changed = changed || factor[r] != 1.f;
        most[r] = top;
        total[r] *= factor[r];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          score[r][i] = power(score[r][i] * unit - base);
          total[r] += score[r][i];
        }
      }
      if (sycl::any_of_group(sub_group, changed)) {
#pragma unroll
        for (int m = 0; m < kTall<kSize>; ++m) {
#pragma unroll
          for (int d = 0; d < kParts; ++d) {
            int e = 0;
            joint::joint_matrix_apply(sub_group, sums[m][d], [&](float& value) IPEX_INLINE {
              value *= factor[2 * m + e / 2 % 2];
              ++e;
            });
          }
        }
      }
      Left<E> weights[kTall<kSize>][2];
#pragma unroll
      for (int m = 0; m < kTall<kSize>; ++m) {
        const float* const x = score[2 * m];
        const float* const z = score[2 * m + 1];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int i = 4 * half;
          set_unit(sub_group, weights[m][half],
                   unit_of<true>(pair_of<T>(x[i], x[i + 1]), pair_of<T>(x[i + 2], x[i + 3]),
                                 pair_of<T>(z[i], z[i + 1]), pair_of<T>(z[i + 2], z[i + 3])));
        }
      }
#pragma unroll
      for (int d = 0; d < kParts; ++d) {
        const Vector* const units = tiles + now + kStored + (pass * kParts + d) * kUnits;
        each_product<E, kTall<kSize>>(
            sub_group, units, own_units, [&](int m, int half, const Right<E>& columns) IPEX_INLINE {
              joint::joint_matrix_mad(sub_group, sums[m][d], weights[m][half], columns, sums[m][d]);
            });
      }
    }
    now = 2 * kStored - now;
    if (start + kBlock < to) put(tiles + now);
    sycl::group_barrier(team);
  }

#pragma unroll
  for (int m = 0; m < kTall<kSize>; ++m) {
    float numbers[2][kParts * 4];
#pragma unroll
    for (int d = 0; d < kParts; ++d) {
      int e = 0;
      joint::joint_matrix_apply(sub_group, sums[m][d], [&](float& value) IPEX_INLINE {
        numbers[e / 2 % 2][4 * d + e % 2 * 2 + e / 4] = value;
        ++e;
      });
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = 2 * m + half;
      const float whole =
          shared(sub_group, total[r], [](float a, float b) IPEX_INLINE { return a + b; });
      const unsigned int row = all.first + own + 8 * r;
      if (row > all.last) continue;
      const float factor = share_of(whole, most[r] * unit * (1.f / kLog2e), sinks,
                                    kv_head * group + row / all.queries);
      T* const target =
          all.line(out, row, q_starts, sequence, o_batch, o_head, o_row, kv_head * group);
      const bool dense = reinterpret_cast<unsigned long>(target) % 8 == 0;
#pragma unroll
      for (int d = 0; d < kParts; ++d) {
        const int at = d * kSide + t * 4;
        if (at >= value_size) continue;
        const float* const x = numbers[half] + 4 * d;
        const float scaled[4] = {x[0] * factor, x[1] * factor, x[2] * factor, x[3] * factor};
        store_four(target + at, 1, 4, dense, scaled);
      }
    }
  }
}

#define ATTENTION_PAIRS(T, kSize, plain) \
  template void attention_pairs<T, kSize, plain>(IPEX_ATTENTION_ARGUMENTS(T));
#define ALL(T)                  \
  ATTENTION_PAIRS(T, 64, true)  \
  ATTENTION_PAIRS(T, 64, false) \
  ATTENTION_PAIRS(T, 128, true) \
  ATTENTION_PAIRS(T, 128, false)
ALL(half)
ALL(bf16)
