// SPDX-License-Identifier: Apache-2.0
// How the glue of row-wise and element-wise ops cuts its work into pieces for the threads. The
// results do not depend on the cut: every row, and every element, is computed alone.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "ipex/glue/dispatch.h"

namespace ipex {

// Least number of input bytes of one piece: some microseconds of work, several times the cost of a
// parallel region.
inline constexpr int64_t kPieceBytes = 32 * 1024;

template <class T>
int64_t row_grain(int64_t columns) {
  return std::max<int64_t>(1, kPieceBytes / (columns * static_cast<int64_t>(sizeof(T))));
}

// A matrix view with rows in groups, for heads that are part of a wider row: row r of group g is at
// g * group_stride + r * stride. Copies x only if that cannot describe it.
struct RowGroups {
  Tensor tensor;  // keeps the memory alive
  const void* data = nullptr;
  int64_t groups = 1, rows = 1, columns = 0, group_stride = 0, stride = 0;

  explicit RowGroups(const Tensor& x) : tensor(x) {
    const int64_t last = x.dim() - 1;
    if (last < 1 || !describe(x)) {
      const Rows plain = as_rows(x);
      tensor = plain.tensor;
      groups = 1;
      rows = plain.rows;
      columns = plain.columns;
      stride = plain.stride;
    }
    data = tensor.const_data_ptr();
  }

  // call(data, index of the first row, rows) for the parts of [begin, end) in one group each.
  template <class T, class Call>
  void for_parts(int64_t begin, int64_t end, const Call& call) const {
    while (begin < end) {
      const int64_t group = begin / rows, row = begin % rows;
      const int64_t count = std::min(end - begin, rows - row);
      call(static_cast<const T*>(data) + group * group_stride + row * stride, begin, count);
      begin += count;
    }
  }

 private:
  // Merges dimensions from the inside while one stride steps through them, twice.
  bool describe(const Tensor& x) {
    const int64_t last = x.dim() - 1;
    columns = x.size(last);
    if (x.stride(last) != 1 && columns > 1) return false;
    int64_t size[2] = {1, 1}, step[2] = {columns, 0};
    int64_t level = 0;
    for (int64_t i = last - 1; i >= 0; --i) {
      if (x.size(i) == 1) continue;
      if (size[level] > 1 && x.stride(i) != step[level] * size[level] && ++level > 1) return false;
      if (size[level] == 1) step[level] = x.stride(i);
      size[level] *= x.size(i);
    }
    rows = size[0];
    stride = step[0];
    groups = size[1];
    group_stride = step[1];
    return true;
  }
};

// call(x, y, n) on pieces of two contiguous arrays of n elements.
template <class T, class Call>
void for_elements(const T* x, T* y, int64_t n, const Call& call) {
  constexpr int64_t kGrain = kPieceBytes / static_cast<int64_t>(sizeof(T));
  parallel_for(n, kGrain,
               [&](int64_t begin, int64_t end) { call(x + begin, y + begin, end - begin); });
}

// call(a, b, y, n) on pieces of two row-wise inputs of one shape and a contiguous output. Halves of
// one wide tensor, the usual inputs of a gated MLP, are read in place.
template <class T, class Call>
void for_element_pairs(const Rows& a, const Rows& b, T* y, const Call& call) {
  const T* pa = static_cast<const T*>(a.data);
  const T* pb = static_cast<const T*>(b.data);
  const int64_t columns = a.columns;
  const int64_t rows = a.rows;
  if (rows == 1 || (a.stride == columns && b.stride == columns)) {
    constexpr int64_t kGrain = kPieceBytes / static_cast<int64_t>(sizeof(T));
    parallel_for(rows * columns, kGrain, [&](int64_t begin, int64_t end) {
      call(pa + begin, pb + begin, y + begin, end - begin);
    });
    return;
  }
  parallel_for(rows, row_grain<T>(columns), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r)
      call(pa + r * a.stride, pb + r * b.stride, y + r * columns, columns);
  });
}

// Whether the GELU variant of this name is the tanh form.
inline bool is_tanh_form(const char* op, const std::string& approximate) {
  IPEX_CHECK(approximate == "none" || approximate == "tanh", op,
             ": approximate must be 'none' or 'tanh', got '", approximate, "'");
  return approximate == "tanh";
}

// An optional per-feature vector as kernels take it.
struct Vector {
  OptionalTensor tensor;  // keeps the memory alive
  const void* data = nullptr;
  bool is_f32 = false;

  Vector() = default;
  explicit Vector(const OptionalTensor& value) {
    if (!value) return;
    tensor = as_contiguous(*value);
    data = tensor->const_data_ptr();
    is_f32 = tensor->scalar_type() == ScalarType::Float;
  }
};

}  // namespace ipex
