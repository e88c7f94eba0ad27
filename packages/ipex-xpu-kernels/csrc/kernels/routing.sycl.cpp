// SPDX-License-Identifier: Apache-2.0
// Which experts a token goes to. A work-group has a token; the best are found one after the other.
#include "order.h"

using Index = unsigned long;
using Key = unsigned long;

// Larger for a better choice; of equal numbers the first is better.
inline Key choice_key(float x, Index i) {
  return static_cast<Key>(ordered_bits(x)) << 32 | (0xfffffffeul - i);
}
inline Index index_of(Key key) { return 0xfffffffeul - (key & 0xfffffffful); }

// The best key below `before` of `count` ones.
template <typename F>
inline Key next_best(const Row& row, Index count, Key before, F key_of) {
  Key best = 0;
  row.each_of(count, [&](Index i) {
    const Key key = key_of(i);
    if (key < before && key > best) best = key;
  });
  return sycl::reduce_over_group(row.group, best, sycl::maximum<Key>());
}

// `scores` [tokens, experts] and `group_keys` [tokens, groups] are working memory; the latter is
// read only if there is more than one group.
template <typename T>
IPEX_KERNEL(1)
void route(float* weights, int* ids, float* scores, Key* group_keys, const T* logits,
           const float* bias, Index experts, long logit_row, long logit_column, Index top_k,
           Index groups, Index top_groups, int sigmoid, int renormalize, float factor) {
  const Row row(experts);
  logits += static_cast<long>(row.index) * logit_row;
  scores += row.begin;
  group_keys += row.index * groups;
  weights += row.index * top_k;
  ids += row.index * top_k;
  const auto logit = [&](Index i) { return load(logits, static_cast<long>(i) * logit_column); };

  if (sigmoid != 0) {
    row.each([&](Index i) { scores[i] = 1.f / (1.f + sycl::exp(-logit(i))); });
  } else {
    float top = -__builtin_inff();
    bool nan = false;
    row.each([&](Index i) {
      const float x = logit(i);
      top = sycl::fmax(top, x);
      nan = nan || x != x;
    });
    const float whole = sycl::reduce_over_group(row.group, top, sycl::maximum<float>());
    const float most = sycl::any_of_group(row.group, nan) ? __builtin_nanf("") : whole;
    const float total = row.sum([&](Index i) { return sycl::exp(logit(i) - most); });
    row.each([&](Index i) { scores[i] = sycl::exp(logit(i) - most) / total; });
  }
  sycl::group_barrier(row.group);
  const auto choice = [&](Index i) { return bias != nullptr ? scores[i] + bias[i] : scores[i]; };

  Key least = 0;  // of a group that experts may come from
  const Index size = experts / groups;
  if (groups > 1) {
    row.each_of(groups, [&](Index g) {
      Key first = 0, second = 0;
      for (Index i = g * size; i < (g + 1) * size; ++i) {
        const Key key = choice_key(choice(i), i);
        second = key > first ? first : key > second ? key : second;
        first = key > first ? key : first;
      }
      float score = choice(index_of(first));
      if (bias != nullptr && second != 0) score += choice(index_of(second));
      group_keys[g] = choice_key(score, g);
    });
    sycl::group_barrier(row.group);
    least = ~0ul;
    for (Index g = 0; g < top_groups; ++g)
      least = next_best(row, groups, least, [&](Index i) { return group_keys[i]; });
  }

  Key last = ~0ul;
  float sum = 0.f;
  for (Index place = 0; place < top_k; ++place) {
    last = next_best(row, experts, last, [&](Index i) {
      return groups > 1 && group_keys[i / size] < least ? 0 : choice_key(choice(i), i);
    });
    const Index expert = index_of(last);
    sum += scores[expert];
    if (row.leader()) {
      ids[place] = static_cast<int>(expert);
      weights[place] = scores[expert];
    }
  }
  if (!row.leader()) return;
  const float scale = renormalize != 0 ? sum + 1e-20f : 1.f;
  for (Index place = 0; place < top_k; ++place) weights[place] = weights[place] / scale * factor;
}

#define ROUTE(T)                                                                                \
  template void route<T>(float*, int*, float*, Key*, const T*, const float*, Index, long, long, \
                         Index, Index, Index, int, int, float);
ROUTE(float)
ROUTE(half)
ROUTE(bf16)
