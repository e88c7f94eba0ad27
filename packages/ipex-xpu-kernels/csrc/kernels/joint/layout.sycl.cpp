// SPDX-License-Identifier: Apache-2.0
// Whether the items of a device hold the numbers of a joint_matrix as ../pairs.h has it, which no
// query of SYCL tells: a sub-group loads matrices of the places themselves.
#include "pairs.h"

here::experimental::work_group_static<Vector[kSide * kSide / 4]> places_of_group;

template <typename E>
auto local_places() {
  return local(reinterpret_cast<E*>(*&places_of_group));
}
template <typename E>
void set_places(const sycl::sub_group& sub_group, int item) {
  sycl::group_barrier(sub_group);
  E* const places = reinterpret_cast<E*>(*&places_of_group);
  for (int i = item; i < kSide * kSide; i += 32) places[i] = E(static_cast<float>(i));
  sycl::group_barrier(sub_group);
}

// Counts the items that hold others. One sub-group.
template <typename T>
IPEX_KERNEL(1)
void joint_layout(int* wrong) {
  using E = typename Element<T>::type;
  const auto position = here::this_work_item::get_nd_item<1>();
  const auto sub_group = position.get_sub_group();
  const int item = static_cast<int>(position.get_local_id(0));
  const int g = item / 4;
  const int t = item % 4;
  int others = 0;
  // Of number i: its row, if the pairs go down before they go across, and its column.
  const auto place = [=](int i, bool down) IPEX_INLINE {
    const int pair = i % 8 / 2;
    const int row = g + (down ? pair % 2 : pair / 2) * 8;
    return row * kSide + 2 * t + (down ? pair / 2 : pair % 2) * 8 + i % 2;
  };
  const auto check = [&](auto& matrix, bool down) IPEX_INLINE {
    int i = 0;
    void* first = nullptr;
    joint::joint_matrix_apply(sub_group, matrix, [&](auto& element) IPEX_INLINE {
      using Number = std::remove_reference_t<decltype(element)>;
      if (i == 0) first = &element;
      if (static_cast<int>(static_cast<float>(element)) != place(i, down) ||
          static_cast<Number*>(first) + i != &element)
        ++others;
      ++i;
    });
    if (i != 8 && (i != 16 || sizeof(E) != 2)) ++others;
  };
  set_places<E>(sub_group, item);
  Left<E> left;
  joint::joint_matrix_load(sub_group, left, local_places<E>(), kSide);
  check(left, true);
  Right<E> right;  // by columns: numbers of a column are neighbors in memory
  joint::joint_matrix_load(sub_group, right, local_places<E>(), kSide);
  check(right, false);
  set_places<float>(sub_group, item);
  Sums sums;
  joint::joint_matrix_load(sub_group, sums, local_places<float>(), kSide, joint::layout::row_major);
  check(sums, true);
  const int all = sycl::reduce_over_group(sub_group, others, sycl::plus<int>());
  if (item == 0) *wrong = all + (sub_group.get_local_range()[0] == 32 ? 0 : 1);
}

template void joint_layout<half>(int*);
template void joint_layout<bf16>(int*);
