// SPDX-License-Identifier: Apache-2.0
// The best numbers of a row: a work-group finds the worst of them digit by digit, lists them, and
// puts them in order. NaN is the largest number; of equal ones the first come first.
#include "order.h"

using Key = unsigned long;

// A whole number that is larger for a better one; `flip` is all ones where the least are wanted.
inline Key key_of(float x, Key flip) { return ordered_bits(x) ^ (flip & 0xfffffffful); }
inline Key key_of(long x, Key flip) { return (static_cast<Key>(x) ^ (1ul << 63)) ^ flip; }

// indices: [rows, k] and found, as large: working memory.
template <typename T>
IPEX_KERNEL(1)
void topk(T* values, long* indices, long* found, const T* x, unsigned long length, unsigned long k,
          int largest) {
  constexpr unsigned int kDigit = 4;
  constexpr unsigned int kDigits = 1 << kDigit;
  const Key flip = largest ? 0 : ~0ul;
  const Row row(length);
  x += row.begin;
  values += row.index * k;
  indices += row.index * k;
  found += row.index * k;

  // The key of the worst that is wanted, and how many with that key are.
  Key worst = 0;
  unsigned long wanted = k;
  for (int shift = (std::is_same_v<T, long> ? 64 : 32) - kDigit; shift >= 0;
       shift -= static_cast<int>(kDigit)) {
    unsigned int counts[kDigits] = {};
    row.each([&](unsigned long i) {
      const Key key = key_of(load(x, i), flip);
      // Shifted twice: a shift by all bits is undefined.
      if (key >> shift >> kDigit == worst >> shift >> kDigit)
        ++counts[key >> shift & (kDigits - 1)];
    });
    unsigned int digit = kDigits;
    unsigned long better = 0;
    for (unsigned int d = kDigits; d-- > 0;) {
      const unsigned long count =
          sycl::reduce_over_group(row.group, counts[d], sycl::plus<unsigned int>());
      if (digit == kDigits) {
        if (better + count >= wanted) {
          digit = d;
        } else {
          better += count;
        }
      }
    }
    wanted -= better;
    worst |= static_cast<Key>(digit) << shift;
  }

  // Those that are better come first, then those that are equal, both as they are in the row.
  const unsigned long above = k - wanted;
  unsigned long places = 0;
  unsigned long equals = 0;
  for (unsigned long i = 0; i < length; i += row.lanes) {
    const bool inside = i + row.lane < length;
    const Key key = inside ? key_of(load(x, i + row.lane), flip) : 0;
    const unsigned int is_better = inside && key > worst ? 1 : 0;
    const unsigned int is_equal = inside && key == worst ? 1 : 0;
    const unsigned int before =
        sycl::exclusive_scan_over_group(row.group, is_better, sycl::plus<unsigned int>());
    const unsigned int same =
        sycl::exclusive_scan_over_group(row.group, is_equal, sycl::plus<unsigned int>());
    if (is_better != 0) found[places + before] = static_cast<long>(i + row.lane);
    if (is_equal != 0 && equals + same < wanted) {
      const unsigned long place = above + equals + same;
      indices[place] = static_cast<long>(i + row.lane);
      values[place] = x[i + row.lane];
    }
    places += sycl::group_broadcast(row.group, before + is_better, row.lanes - 1);
    equals += sycl::group_broadcast(row.group, same + is_equal, row.lanes - 1);
  }
  sycl::group_barrier(row.group);
  row.each_of(above, [&](unsigned long i) {
    const Key own = key_of(load(x, static_cast<unsigned long>(found[i])), flip);
    unsigned long place = 0;
    for (unsigned long j = 0; j < above; ++j) {
      const Key other = key_of(load(x, static_cast<unsigned long>(found[j])), flip);
      place += other > own || (other == own && j < i) ? 1 : 0;
    }
    indices[place] = found[i];
    values[place] = x[found[i]];
  });
}

template void topk<float>(float*, long*, long*, const float*, unsigned long, unsigned long, int);
template void topk<half>(half*, long*, long*, const half*, unsigned long, unsigned long, int);
template void topk<bf16>(bf16*, long*, long*, const bf16*, unsigned long, unsigned long, int);
template void topk<long>(long*, long*, long*, const long*, unsigned long, unsigned long, int);
