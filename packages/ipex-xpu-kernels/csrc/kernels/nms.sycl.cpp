// SPDX-License-Identifier: Apache-2.0
// Non-maximum suppression in three steps: the order of the boxes, which of them overlap too much (a
// bit for each pair), and a sweep that lets boxes go.
#include "prelude.h"

using Index = unsigned long;
using Word = unsigned long;

constexpr Index kBits = 64;

// order[group, place] = box, for the first `most` places. An item counts the boxes before its own.
// Boxes without a score, or without one above `least`, have no place.
IPEX_KERNEL(2)
void nms_order(int* order, const float* scores, Index boxes, Index most, int sorted, int limited,
               float least) {
  const auto item = sycl::ext::oneapi::this_work_item::get_nd_item<2>();
  const Index group = item.get_global_id(0);
  const Index own = item.get_global_id(1);
  if (own >= boxes) return;
  scores += group * boxes;
  const float score = scores[own];
  if (score != score || (limited && !(score > least))) return;
  Index place = 0;
  for (Index i = 0; i < boxes; ++i) {
    const float other = scores[i];
    const bool counts = limited ? other > least : other == other;
    const bool before = sorted ? i < own : other > score || (other == score && i < own);
    place += counts && before ? 1 : 0;
  }
  if (place < most) order[group * most + place] = static_cast<int>(own);
}

struct Box {
  float left, top, right, bottom, area;

  Box(const float* corners, float offset)
      : left(corners[0]), top(corners[1]), right(corners[2]), bottom(corners[3]) {
#pragma clang fp contract(off)
    area = (right - left + offset) * (bottom - top + offset);
  }
};
// NaN stays NaN.
inline float not_negative(float x) { return x < 0.f ? 0.f : x; }
// Each step is rounded: an overlap of exactly the threshold is one on all devices. A box with NaN
// has an area of NaN and overlaps none.
inline bool overlap(const Box& a, const Box& b, float offset, float threshold) {
#pragma clang fp contract(off)
  const float width =
      (a.right < b.right ? a.right : b.right) - (a.left > b.left ? a.left : b.left) + offset;
  const float height =
      (a.bottom < b.bottom ? a.bottom : b.bottom) - (a.top > b.top ? a.top : b.top) + offset;
  const float common = not_negative(width) * not_negative(height);
  const float both = a.area + b.area;
  return common / (both - common) >= threshold;
}

// goes[group, a, word]: bit b says that the box at place 64 * word + b overlaps that at place a,
// which comes before it.
IPEX_KERNEL(2)
void nms_overlaps(Word* goes, const int* order, const float* boxes, Index count, Index most,
                  Index words, float offset, float threshold) {
  const auto item = sycl::ext::oneapi::this_work_item::get_nd_item<2>();
  const Index group = item.get_global_id(0) / words;
  const Index word = item.get_global_id(0) % words;
  const Index place = item.get_global_id(1);
  if (place >= most) return;
  order += group * most;
  boxes += group * count * 4;
  Word bits = 0;
  const int own = order[place];
  if (own >= 0) {
    const Box box(boxes + own * 4, offset);
    const Index begin = word * kBits;
    const Index end = begin + kBits < most ? begin + kBits : most;
    for (Index i = begin; i < end && order[i] >= 0; ++i) {
      const Box other(boxes + order[i] * 4, offset);
      bits |= i > place && overlap(box, other, offset, threshold) ? Word(1) << (i - begin) : 0;
    }
  }
  goes[(group * most + place) * words + word] = bits;
}

// A work-group for each group of boxes. `gone` holds the bits of boxes that have gone, first none.
IPEX_KERNEL(1)
void nms_sweep(unsigned char* keep, Word* gone, const Word* goes, const int* order, Index count,
               Index most, Index words, Index most_kept) {
  const auto group = sycl::ext::oneapi::this_work_item::get_work_group<1>();
  const Index index = group.get_group_linear_id();
  const Index lane = group.get_local_linear_id();
  const Index lanes = group.get_local_linear_range();
  order += index * most;
  gone += index * words;
  goes += index * most * words;
  Index kept = 0;
  for (Index place = 0; place < most && kept < most_kept && order[place] >= 0; ++place) {
    const bool stays = (gone[place / kBits] >> (place % kBits) & 1) == 0;
    sycl::group_barrier(group);
    if (stays) {
      for (Index word = place / kBits + lane; word < words; word += lanes)
        gone[word] |= goes[place * words + word];
      if (lane == 0) keep[index * count + order[place]] = 1;
      ++kept;
    }
    sycl::group_barrier(group);
  }
}
