// SPDX-License-Identifier: Apache-2.0
// Rotary embedding in place: one work-item for each pair of a token, which goes through the heads.
#include "names.h"

// `offsets` (or null) has for each token, or for each position of all sequences, where its row of
// the tables begins; without, rows are counted like that. A table has a number for each element
// (columns == 2 * pairs) or for each pair.
template <typename T, typename W, bool half_split>
IPEX_KERNEL(2)
void rope(T* x, const W* sines, const W* cosines, const long* offsets, unsigned long heads,
          unsigned long positions, unsigned long pairs, unsigned long columns, int per_token,
          long batch_stride, long position_stride, long head_stride) {
  const auto item = sycl::ext::oneapi::this_work_item::get_nd_item<2>();
  const unsigned long token = item.get_global_id(0);
  const unsigned long pair = item.get_global_id(1);
  if (pair >= pairs) return;
  const unsigned long position = token % positions;
  const unsigned long row = per_token ? token : position;
  const long offset = offsets ? offsets[row] : static_cast<long>(row * columns);
  if (offset < 0) return;  // no such row: the flag of the offsets says so
  x += static_cast<long>(token / positions) * batch_stride +
       static_cast<long>(position) * position_stride;
  const unsigned long first = half_split ? pair : 2 * pair;
  const unsigned long second = half_split ? pair + pairs : 2 * pair + 1;
  const bool whole = columns == 2 * pairs;
  const float sine1 = load(sines + offset, whole ? first : pair);
  const float sine2 = load(sines + offset, whole ? second : pair);
  const float cosine1 = load(cosines + offset, whole ? first : pair);
  const float cosine2 = load(cosines + offset, whole ? second : pair);
  for (unsigned long h = 0; h < heads; ++h) {
    const float a = load(x, first);
    const float b = load(x, second);
    store(x, first, a * cosine1 - b * sine1);
    store(x, second, b * cosine2 + a * sine2);
    x += head_stride;
  }
}

#define ROPE_OF(T, W, half_split)                                                              \
  template void rope<T, W, half_split>(T*, const W*, const W*, const long*, unsigned long,     \
                                       unsigned long, unsigned long, unsigned long, int, long, \
                                       long, long);
#define ROPE(T, W)     \
  ROPE_OF(T, W, false) \
  ROPE_OF(T, W, true)
ROPE(float, float)
ROPE(half, half)
ROPE(half, float)
ROPE(bf16, bf16)
ROPE(bf16, float)
