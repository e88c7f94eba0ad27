// SPDX-License-Identifier: Apache-2.0
// What a block of a matrix product is made of, and what follows it: rows of x times packed panels
// into y.
#pragma once

#include "ipex/kernel/epilogue.h"
#include "ipex/kernel/gemm.h"

namespace ipex {
namespace {

template <class T>
struct GemmBlock {
  const T* x;  // first row
  int64_t x_stride, rows;
  const T* w;  // first panel
  int64_t panels, k;
  T* y;  // first element
  int64_t y_stride;
  int64_t row, column, columns;  // where the block lies in y, for what follows the product
  const Epilogue* epilogue;
  const T* addend;  // what the sums begin with, its rows as far apart as in y, or null
  // Where the rows are pixels in lines: the pixels of a line, of which y has the first `kept`, and
  // the number of the first row. y and the addend then begin at pixel 0. 0: rows are rows of y.
  int64_t line = 0, kept = 0, first = 0;

  // Columns of y that a panel gives.
  int64_t panel_columns() const { return epilogue->gated ? kPanel / 2 : kPanel; }

  // For the panels from `panel` on, at most `width` columns.
  Finisher<T> finisher(int64_t panel, int64_t width) const {
    const int64_t begin = panel * panel_columns(), left = columns - begin;
    return Finisher<T>(*epilogue, column + begin, left < width ? left : width);
  }

  // Calls f(row, row of y, number) for rows [r, r + n), those that y has.
  template <class F>
  IPEX_INLINE void for_rows(int64_t r, int64_t n, const F& f) const {
    if (!line) return f(r, r, n);
    int64_t y_line = (first + r) / line, pixel = (first + r) % line;
    for (const int64_t end = r + n; r < end; ++y_line, pixel = 0) {
      const int64_t in_line = line - pixel < end - r ? line - pixel : end - r;
      const int64_t count = kept - pixel < in_line ? kept - pixel : in_line;
      if (count > 0) f(r, y_line * kept + pixel, count);
      r += in_line;
    }
  }

  // Puts the addend of rows [r, r + n) and the panels from `panel` on, at most `width` columns,
  // into C. What lies behind the columns of y is added to and left alone, so it must be no signal.
  void load_addend(int64_t panel, int64_t width, int64_t r, int64_t n, float* c,
                   int64_t ldc) const {
    const int64_t begin = panel * panel_columns(), left = columns - begin;
    for_rows(r, n, [&](int64_t at, int64_t y_row, int64_t count) IPEX_LAMBDA {
      const T* from = addend + y_row * y_stride + begin;
      for (float* to = c + (at - r) * ldc; count > 0; --count, from += y_stride, to += ldc) {
        for (int64_t i = 0; i < width; i += kLanes) {
          const int64_t lanes = left - i;
          store(to + i, lanes >= kLanes ? load(from + i)
                        : lanes > 0     ? load_n(from + i, lanes)
                                        : zero());
        }
      }
    });
  }

  // Finishes rows [r, r + n) of what the panels from `panel` on gave.
  void finish(const Finisher<T>& finisher, int64_t panel, const float* c, int64_t ldc, int64_t r,
              int64_t n) const {
    for_rows(r, n, [&](int64_t begin, int64_t y_row, int64_t count) IPEX_LAMBDA {
      finisher.rows(c + (begin - r) * ldc, ldc, count, row + y_row,
                    y + y_row * y_stride + panel * panel_columns(), y_stride);
    });
  }
};

}  // namespace
}  // namespace ipex
