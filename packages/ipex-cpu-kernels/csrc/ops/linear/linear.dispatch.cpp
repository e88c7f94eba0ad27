// SPDX-License-Identifier: Apache-2.0
#include "linear.h"

#include "ipex/epilogue.h"
#include "ipex/gemm.h"

namespace ipex {
namespace {

template <class T>
IPEX_INLINE void run(const LinearArgs& args, int64_t row_begin, int64_t row_end,
                     int64_t panel_begin, int64_t panel_end) {
  alignas(64) float c[kRowStep<T> * 2 * kPanel];
  constexpr int64_t ldc = 2 * kPanel;
  const T* x = static_cast<const T*>(args.x);
  const T* w = static_cast<const T*>(args.weight);
  const int64_t size = panel_size<T>(args.k);
  const int64_t columns = args.epilogue.gated ? kPanel / 2 : kPanel;  // of y, for a panel
  TileScope scope;
  for (int64_t p = panel_begin; p < panel_end; p += 2) {
    const T* p0 = w + p * size;
    const T* p1 = p + 1 < panel_end ? p0 + size : nullptr;
    const int64_t column = p * columns;
    const int64_t width = (p1 ? 2 : 1) * columns;
    const int64_t count = args.n - column < width ? args.n - column : width;
    const Finisher<T> finisher(args.epilogue, column, count);
    for (int64_t r = row_begin; r < row_end; r += kRowStep<T>) {
      const int64_t rows = row_end - r < kRowStep<T> ? row_end - r : kRowStep<T>;
      multiply(scope, x + r * args.x_stride, args.x_stride, rows, p0, p1, args.k, c, ldc, false);
      finisher.rows(c, ldc, rows, r, static_cast<T*>(args.y) + r * args.n + column, args.n);
    }
  }
}

}  // namespace
}  // namespace ipex

void ipex_k_linear_f32(const ipex::LinearArgs* args, int64_t row_begin, int64_t row_end,
                       int64_t panel_begin, int64_t panel_end) {
  ipex::run<float>(*args, row_begin, row_end, panel_begin, panel_end);
}

void ipex_k_linear_bf16(const ipex::LinearArgs* args, int64_t row_begin, int64_t row_end,
                        int64_t panel_begin, int64_t panel_end) {
  ipex::run<ipex::BFloat16>(*args, row_begin, row_end, panel_begin, panel_end);
}

void ipex_k_linear_f16(const ipex::LinearArgs* args, int64_t row_begin, int64_t row_end,
                       int64_t panel_begin, int64_t panel_end) {
  ipex::run<ipex::Half>(*args, row_begin, row_end, panel_begin, panel_end);
}
