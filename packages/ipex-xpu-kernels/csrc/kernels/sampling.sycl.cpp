// SPDX-License-Identifier: Apache-2.0
// The next token of each row of logits, by inverting the sum of the probabilities. Limits are found
// digit by digit of the numbers in order. A work-group has a row.
#include "order.h"

using Index = unsigned long;

constexpr int kDigit = 4;
constexpr unsigned int kDigits = 1 << kDigit;

// A number in [0, 1) for a seed (SplitMix64).
inline float uniform(long seed) {
  unsigned long x = static_cast<unsigned long>(seed) + 0x9e3779b97f4a7c15ul;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ul;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebul;
  return static_cast<float>((x ^ (x >> 31)) >> 40) * 0x1p-24f;
}

// Goes through the digits of ordered_bits of the row's numbers, from the first one on. `weight_of`
// tells what a number counts, and `choose(digit, above, weight)` is asked of each digit, falling,
// whether it is taken in the place of the one before it; `above` counts what is larger than all
// numbers of the digit. Returns the digits that were taken.
template <typename W, typename BitsOf, typename WeightOf, typename Choose>
inline unsigned int find_limit(const Row& row, BitsOf bits_of, WeightOf weight_of, Choose choose) {
  unsigned int limit = 0;
  W above = 0;
  for (int shift = 32 - kDigit; shift >= 0; shift -= kDigit) {
    W weights[kDigits] = {};
    row.each([&](Index i) {
      const unsigned int bits = bits_of(i);
      // Shifted twice: a shift by all bits is undefined.
      if (bits >> shift >> kDigit == limit >> shift >> kDigit)
        weights[bits >> shift & (kDigits - 1)] += weight_of(i);
    });
    W passed = above;
    unsigned int taken = kDigits;
    for (unsigned int digit = kDigits; digit-- > 0;) {
      const W weight = sycl::reduce_over_group(row.group, weights[digit], sycl::plus<W>());
      if (weight > 0 && (taken == kDigits || choose(passed))) {
        taken = digit;
        above = passed;
      }
      passed += weight;
    }
    limit |= taken % kDigits << shift;
  }
  return limit;
}

// Random numbers come as `noise` or are made of `seeds`. `wrong` becomes 1 for a row without a
// finite maximum or with a NaN or a random number that is out of range.
template <typename T>
IPEX_KERNEL(1)
void sample(long* tokens, unsigned char* wrong, const T* logits, const float* noise,
            const long* seeds, Index columns, float temperature, Index top_k, float top_p,
            float min_p) {
  const Row row(columns);
  logits += row.begin;
  const float random = seeds != nullptr ? uniform(seeds[row.index]) : noise[row.index];
  const auto score = [&](Index i) { return load(logits, i) / temperature; };
  const auto bits_of = [&](Index i) { return ordered_bits(score(i)); };

  float top = -__builtin_inff();
  bool nan = !(random >= 0.f && random < 1.f);
  row.each([&](Index i) {
    const float x = score(i);
    top = sycl::fmax(top, x);
    nan = nan || x != x;
  });
  const float most = sycl::reduce_over_group(row.group, top, sycl::maximum<float>());
  const bool bad = sycl::any_of_group(row.group, nan) || !(sycl::fabs(most) < __builtin_inff());
  if (row.leader()) wrong[row.index] = bad ? 1 : 0;
  if (bad) return;

  unsigned int least = 0;  // ordered_bits of the least logit that is kept
  if (top_k > 0 && top_k < columns) {
    least = find_limit<unsigned int>(
        row, bits_of, [](Index) { return 1u; }, [&](unsigned int above) { return above < top_k; });
  }
  const auto weight = [&](Index i) {
    const float x = score(i);
    return ordered_bits(x) >= least ? sycl::exp(x - most) : 0.f;
  };
  if (top_p < 1.f) {
    const float goal = top_p * row.sum(weight);
    const unsigned int limit =
        find_limit<float>(row, bits_of, weight, [&](float above) { return above < goal; });
    least = sycl::max(least, limit);
  }
  const auto kept = [&](Index i) {
    const float value = weight(i);
    return value >= min_p ? value : 0.f;
  };

  // Each item has a piece of the vocabulary.
  const Index piece = (columns + row.lanes - 1) / row.lanes;
  const Index begin = sycl::min(row.lane * piece, columns);
  const Index end = sycl::min(begin + piece, columns);
  float own = 0.f;
  for (Index i = begin; i < end; ++i) own += kept(i);
  const float before = sycl::exclusive_scan_over_group(row.group, own, sycl::plus<float>());
  const float total = sycl::group_broadcast(row.group, before + own, row.lanes - 1);
  const float target = random * total;
  Index first = columns, last = 0;
  float sum = before;
  for (Index i = begin; i < end; ++i) {
    const float value = kept(i);
    if (!(value > 0.f)) continue;
    sum += value;
    last = i;
    if (first == columns && sum > target) first = i;
  }
  const Index found = sycl::reduce_over_group(row.group, first, sycl::minimum<Index>());
  const Index rest = sycl::reduce_over_group(row.group, last, sycl::maximum<Index>());
  // Rounding may leave no sum above the target.
  if (row.leader()) tokens[row.index] = static_cast<long>(found < columns ? found : rest);
}

#define SAMPLE(T)                                                                            \
  template void sample<T>(long*, unsigned char*, const T*, const float*, const long*, Index, \
                          float, Index, float, float);
SAMPLE(float)
SAMPLE(half)
SAMPLE(bf16)
