// SPDX-License-Identifier: Apache-2.0
// What all kernels of attention share: which queries and keys a work-group has, which keys a query
// sees, and what sums are divided by. Arguments are as in attention.h.
#pragma once

#include "names.h"

namespace here = sycl::ext::oneapi;

using ipex::kLog2e;
// Powers of 2, by an instruction where there is one, as a call would be slower: before it all loads
// have to arrive.
IPEX_INLINE inline float power(float x) { return __builtin_elementwise_exp2(x); }
// tanh, by the power and, since a division may be a call, by Newton's steps to 1 / (1 + power).
IPEX_INLINE inline float capped(float x) {
  const float low = power(-2.f * kLog2e * (x < 0 ? -x : x));
  float inverse = 1.4571f - 0.5f * (1.f + low);
#pragma unroll
  for (int step = 0; step < 3; ++step) inverse *= 2.f - (1.f + low) * inverse;
  const float value = (1.f - low) * inverse;
  return x < 0 ? -value : value;
}
IPEX_INLINE inline float larger(float a, float b) { return __builtin_elementwise_max(a, b); }

// The rows `first` up to `last` (queries of all heads that share keys) of a work-group. There are
// fewer than 2^30 of everything but elements.
struct Sequence {
  static constexpr int kFar = 1 << 30;  // what is not bound sees everything
  int q_begin = 0;
  int k_begin = 0;
  unsigned int queries;  // of each head
  int keys;
  unsigned int rows;
  unsigned int first;
  unsigned int last;
  int offset;  // from a query to its place among the keys
  int before;  // how far a query sees
  int after;
  int lowest;  // places of the queries
  int highest;
  int from;  // what no query of the group sees is not read
  int to;

  IPEX_INLINE Sequence(long sequence, const int* q_starts, const int* k_starts,
                       const int* k_lengths, long group, long queries_, long keys_, long first_,
                       int most_rows, long behind, long ahead, int bottom_right)
      : queries(static_cast<unsigned int>(queries_)),
        keys(static_cast<int>(keys_)),
        first(static_cast<unsigned int>(first_)) {
    if (q_starts != nullptr) {
      q_begin = q_starts[sequence];
      queries = static_cast<unsigned int>(q_starts[sequence + 1] - q_begin);
    }
    if (k_starts != nullptr) {
      k_begin = k_starts[sequence];
      keys = k_starts[sequence + 1] - k_begin;
    } else if (k_lengths != nullptr) {
      keys = k_lengths[sequence];
    }
    rows = static_cast<unsigned int>(group) * queries;
    if (nothing()) return;
    last = first + most_rows < rows ? first + most_rows - 1 : rows - 1;
    offset = bottom_right != 0 ? keys - static_cast<int>(queries) : 0;
    before = behind < 0 || behind > kFar ? kFar : static_cast<int>(behind);
    after = ahead < 0 || ahead > kFar ? kFar : static_cast<int>(ahead);
    const bool one_head = first / queries == last / queries;
    lowest = static_cast<int>(one_head ? first % queries : 0) + offset;
    highest = static_cast<int>(one_head ? last % queries : queries - 1) + offset;
    from = lowest > before ? lowest - before : 0;
    to = highest < keys - after ? highest + after + 1 : keys;
  }
  // Of the whole group.
  IPEX_INLINE bool nothing() const { return first >= rows; }
  IPEX_INLINE unsigned int row(int r) const { return first + r <= last ? first + r : last; }
  // Where a query sees a key `distance` behind its place.
  IPEX_INLINE bool hides(int key, int distance) const {
    return key >= to || distance > after || -distance > before;
  }
  // The numbers of a row of x, queries or results.
  template <typename T>
  IPEX_INLINE T* line(T* x, long row, const int* q_starts, long sequence, long batch, long head,
                      long step, long first_head) const {
    const auto r = static_cast<unsigned int>(row);
    return x + (q_starts != nullptr ? 0 : sequence * batch) + (first_head + r / queries) * head +
           (q_begin + static_cast<long>(r % queries)) * step;
  }
};

// Key or value j of a sequence.
template <typename C>
IPEX_INLINE inline const C* line_of(const C* x, long j, long sequence, long k_begin,
                                    const int* k_starts, const int* table, long table_row,
                                    long block_size, long batch, long step) {
  long block = k_starts != nullptr ? 0 : sequence;
  long line = k_begin + j;
  if (table != nullptr) {
    block = table[sequence * table_row + j / block_size];
    line = j % block_size;
  }
  return x + block * batch + line * step;
}

// A score as the rules of the call have it; `bias` is of its query, or null.
IPEX_INLINE inline float ruled(float s, float softcap, float slope, int distance, const float* bias,
                               long at) {
  if (softcap > 0.f) s = softcap * sycl::tanh(s / softcap);
  s -= slope * static_cast<float>(distance < 0 ? -distance : distance);
  return bias != nullptr ? s + bias[at] : s;
}

// What the sums of a row are multiplied by, of its largest score and the sum of its weights. A
// query that sees no key gives zeros. (A NaN among the scores makes the total NaN.)
IPEX_INLINE inline float share_of(float total, float most, const float* sinks, long head) {
  if (total == 0.f) return 0.f;
  if (sinks == nullptr) return 1.f / total;
  const float peak = sycl::fmax(most, sinks[head]);
  const float weight = sycl::exp(most - peak);
  return weight / (total * weight + sycl::exp(sinks[head] - peak));
}

// Eight numbers as they are stored.
template <typename C>
using Stored = unsigned int __attribute__((ext_vector_type(2 * sizeof(C))));

// What the teams of a work-group have of kRows queries, of which each has a softmax of its own,
// joined in one order and written to the place of the group. `sums` of a team: `pace` numbers of
// each query, of which there are `value_size`; `stats`: the largest score of each query and the sum
// of its weights.
template <int kRows>
IPEX_INLINE inline void join_teams(const Sequence& all, const float* sums, const float* stats,
                                   int teams, int pace, int item, int items, long value_size,
                                   float* all_sums, float* all_stats) {
  const float low = -__builtin_inff();
  for (int n = item; n < kRows * pace; n += items) {
    const int r = n / pace;
    const int d = n % pace;
    if (all.first + r >= all.rows || d >= value_size) continue;
    float top = low;
    for (int team = 0; team < teams; ++team) top = larger(stats[2 * (team * kRows + r)], top);
    const float base = top == low ? 0.f : top;
    float sum = 0.f;
    float whole = 0.f;
    for (int team = 0; team < teams; ++team) {
      const float factor = power((stats[2 * (team * kRows + r)] - base) * kLog2e);
      whole += stats[2 * (team * kRows + r) + 1] * factor;
      sum += sums[team * kRows * pace + n] * factor;
    }
    all_sums[r * value_size + d] = sum;
    if (d != 0) continue;
    all_stats[2 * r] = top;
    all_stats[2 * r + 1] = whole;
  }
}

// The arguments of kernels with T for everything, in lists of instantiations.
#define IPEX_ATTENTION_ARGUMENTS(T)                                                             \
  const T*, const T*, const T*, T*, const float*, const float*, const float*, const int*,       \
      const int*, const int*, const int*, long, long, long, long, long, long, long, long, long, \
      long, long, long, long, long, long, long, long, long, long, long, long, long, long, long, \
      long, long, float, float, int
// The same of the kernels that split the keys of a sequence.
#define IPEX_SPLIT_ARGUMENTS(T, C)                                                               \
  const T*, const C*, const C*, float*, float*, const float*, const float*, const int*,          \
      const int*, const int*, long, long, long, long, long, long, long, long, long, long, long,  \
      long, long, long, long, long, long, long, long, long, long, long, long, long, long, float, \
      float, int, const float*, const float*, long, long, long, long, long, long
