// SPDX-License-Identifier: Apache-2.0
// Products of matrices by joint_matrix. The build has no device for SPIR-V of it, so that it is
// compiled on the device, with the size of sub-groups in IPEX_SUB_GROUP. A group makes kTile x
// kTile elements of the result, a sub-group kDown x kAcross of them. The next kDepth steps of both
// operands are on their way to registers while tiles in the memory of the group are multiplied.
#include "joint.h"

constexpr int kTile = 128;
constexpr int kDepth = 32;
constexpr int kSubGroups = 4;
constexpr int kItems = kSubGroups * IPEX_SUB_GROUP;
constexpr int kDown = 64;
constexpr int kAcross = kTile * kTile / kSubGroups / kDown;
constexpr int kVectors = kTile * kDepth / 8 / kItems;  // of an operand that an item brings
// Rows of a tile begin in different banks, whichever dimension has neighboring numbers.
constexpr int kStepPitch = kDepth + 8;
constexpr int kRowPitch = kTile + 8;
constexpr int kStored =
    (kTile * kStepPitch > kDepth * kRowPitch ? kTile * kStepPitch : kDepth * kRowPitch) / 8;

here::experimental::work_group_static<Vector[2 * kStored]> left_tiles;
here::experimental::work_group_static<Vector[2 * kStored]> right_tiles;

// The part of x that a group needs: x[row, step], or x[step, row] if swapped.
template <bool swapped>
struct Operand {
  static constexpr int kPitch = swapped ? kRowPitch : kStepPitch;
  static constexpr int kLine = (swapped ? kTile : kDepth) / 8;  // vectors of a line of the tile
  static constexpr int kJump = kItems / kLine;                  // lines to the next vector

  const unsigned short* x;
  long jump;     // to the item's next vector
  long advance;  // to the next tile
  int line;      // the item's first one
  int at;        // and the place in it
  int lines;     // that there are, from the item's first one
  int places;
  Vector values[kVectors];

  IPEX_INLINE Operand(const void* first, long pitch, int rows, int steps, int item)
      : jump(kJump * pitch), advance(swapped ? kDepth * pitch : kDepth) {
    line = item / kLine;
    at = item % kLine * 8;
    x = static_cast<const unsigned short*>(first) + line * pitch + at;
    lines = (swapped ? steps : rows) - line;
    places = (swapped ? rows : steps) - at;
  }
  IPEX_INLINE void fetch() {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const bool inside = i * kJump < lines && places > 0;
      values[i] = inside ? *reinterpret_cast<const Vector*>(x + i * jump) : Vector(0);
    }
    x += advance;
    if (swapped) {
      lines -= kDepth;
    } else {
      places -= kDepth;
    }
  }
  IPEX_INLINE void put(Vector* tile) const {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) tile[((line + i * kJump) * kPitch + at) / 8] = values[i];
  }
};

// y[batch, i, j] = alpha * sum of a[batch, i, step] b[batch, j, step] + beta * c[batch, i, j], with
// rows and steps of a or b swapped where their names say so. Pitches and batches of a and b are
// multiples of 8, and so are their sizes in the dimension of neighboring numbers.
template <typename T, bool a_swapped, bool b_swapped>
IPEX_KERNEL(3)
void matmul_joint(const T* a, const T* b, const T* c, T* y, int m, int n, int steps, long a_batch,
                  long a_pitch, long b_batch, long b_pitch, long c_batch, long c_row, long c_column,
                  long y_batch, long y_row, long y_column, float alpha, float beta) {
  using E = typename Element<T>::type;
  const auto item = here::this_work_item::get_nd_item<3>();
  const auto group = item.get_group();
  const auto sub_group = item.get_sub_group();
  const int lane = static_cast<int>(item.get_local_id(2));
  const int part = lane / IPEX_SUB_GROUP;
  const long batch = item.get_group(0);
  const int first_row = static_cast<int>(item.get_group(1)) * kTile;
  const int first_column = static_cast<int>(item.get_group(2)) * kTile;
  Operand<a_swapped> left(a + batch * a_batch + (a_swapped ? first_row : first_row * a_pitch),
                          a_pitch, m - first_row, steps, lane);
  Operand<b_swapped> right(
      b + batch * b_batch + (b_swapped ? first_column : first_column * b_pitch), b_pitch,
      n - first_column, steps, lane);
  const int down = part / (kTile / kAcross) * kDown;
  const int across = part % (kTile / kAcross) * kAcross;
  Vector* const lefts = *&left_tiles;
  Vector* const rights = *&right_tiles;

  Sums sums[kDown / kSide][kAcross / kSide];
#pragma unroll
  for (int i = 0; i < kDown / kSide; ++i) {
#pragma unroll
    for (int j = 0; j < kAcross / kSide; ++j) joint::joint_matrix_fill(sub_group, sums[i][j], 0.f);
  }
  left.fetch();
  right.fetch();
  left.put(lefts);
  right.put(rights);
  sycl::group_barrier(group);
  int now = 0;
  for (int first = 0; first < steps; first += kDepth) {
    left.fetch();  // zeros behind the last step
    right.fetch();
    E* const l = reinterpret_cast<E*>(lefts + now);
    E* const r = reinterpret_cast<E*>(rights + now);
#pragma unroll
    for (int k = 0; k < kDepth; k += kSide) {
      Right<E, b_swapped ? kRowMajor : kColumnMajor> columns[kAcross / kSide];
#pragma unroll
      for (int j = 0; j < kAcross / kSide; ++j) {
        const int column = across + j * kSide;
        joint::joint_matrix_load(
            sub_group, columns[j],
            local(r + (b_swapped ? k * kRowPitch + column : column * kStepPitch + k)),
            Operand<b_swapped>::kPitch);
      }
#pragma unroll
      for (int i = 0; i < kDown / kSide; ++i) {
        const int row = down + i * kSide;
        Left<E, a_swapped ? kColumnMajor : kRowMajor> rows;
        joint::joint_matrix_load(
            sub_group, rows, local(l + (a_swapped ? k * kRowPitch + row : row * kStepPitch + k)),
            Operand<a_swapped>::kPitch);
#pragma unroll
        for (int j = 0; j < kAcross / kSide; ++j)
          joint::joint_matrix_mad(sub_group, sums[i][j], rows, columns[j], sums[i][j]);
      }
    }
    now = kStored - now;
    left.put(lefts + now);
    right.put(rights + now);
    sycl::group_barrier(group);
  }

  // Each sub-group passes its numbers through memory, a square after the other.
  float* const square = reinterpret_cast<float*>(lefts) + part * kSide * kSide;
  const int member = lane % IPEX_SUB_GROUP;
#pragma unroll
  for (int i = 0; i < kDown / kSide; ++i) {
#pragma unroll
    for (int j = 0; j < kAcross / kSide; ++j) {
      joint::joint_matrix_store(sub_group, sums[i][j], local(square), kSide, kRowMajor);
      sycl::group_barrier(sub_group);
      for (int k = member; k < kSide * kSide; k += IPEX_SUB_GROUP) {
        const int row = first_row + down + i * kSide + k / kSide;
        const int column = first_column + across + j * kSide + k % kSide;
        if (row < m && column < n) {
          float value = alpha * square[k];
          if (beta != 0.f)
            value += beta * load(c, batch * c_batch + row * c_row + column * c_column);
          store(y, batch * y_batch + row * y_row + column * y_column, value);
        }
      }
      sycl::group_barrier(sub_group);
    }
  }
}

#define MATMUL_JOINT(T, a_swapped, b_swapped)                                                     \
  template void matmul_joint<T, a_swapped, b_swapped>(const T*, const T*, const T*, T*, int, int, \
                                                      int, long, long, long, long, long, long,    \
                                                      long, long, long, long, float, float);
#define ALL(T)                  \
  MATMUL_JOINT(T, false, false) \
  MATMUL_JOINT(T, false, true) MATMUL_JOINT(T, true, false) MATMUL_JOINT(T, true, true)
ALL(half)
ALL(bf16)
