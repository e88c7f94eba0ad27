// SPDX-License-Identifier: Apache-2.0
// Finishes blocks of a matrix product that lie in L1 as float: see epilogue_args.h for the formula.
//
//   Finisher<T> finisher(epilogue, column, count);        // once per group of columns
//   finisher.rows(c, ldc, rows, row, y, y_stride);        // for each block of rows
//
// All products of a level share one instance for each type: ops/linear/finisher.dispatch.cpp.
#pragma once

#include <cstdint>

#include "ipex/epilogue_args.h"
#include "ipex/kernel.h"

namespace ipex {

// Columns of C that a Finisher takes at most, and columns of each half if it is gated.
inline constexpr int64_t kFinishColumns = 64;
inline constexpr int64_t kGateColumns = 32;

// Finishes `count` columns of y from `column` on; up to 64, or up to 32 if gated.
template <class T>
class Finisher {
 public:
  Finisher() = default;
  Finisher(const Epilogue& epilogue, int64_t column, int64_t count);

  // `c` is the block: [rows][64], rows ldc floats apart, whose columns behind `count` may hold
  // anything; a gated one has its gates in columns 0..31 and the other halves in 32..63. `y` is
  // where the block's first element goes, `row` the row of y it belongs to.
  void rows(const float* c, int64_t ldc, int64_t rows, int64_t row, T* y, int64_t y_stride) const;

  // Bias of the block's columns; zeros without a bias.
  const float* bias() const { return bias_; }

 private:
  void load_bias(int64_t column, int64_t count, float* to) const;
  const T* operand(const void* base, int64_t stride, int64_t row) const;
  template <class F>
  void run(const float* c, int64_t ldc, int64_t rows, int64_t row, T* y, int64_t y_stride,
           const F& value) const;

  const Epilogue* epilogue_ = nullptr;
  int64_t column_ = 0, count_ = 0;
  alignas(64) float bias_[kFinishColumns];
};

extern template class Finisher<float>;
extern template class Finisher<BFloat16>;
extern template class Finisher<Half>;

}  // namespace ipex
