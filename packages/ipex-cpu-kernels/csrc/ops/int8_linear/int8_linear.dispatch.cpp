// SPDX-License-Identifier: Apache-2.0
#include "int8_linear.h"

#include "ipex/kernel/epilogue.h"
#include "ipex/kernel/gemm_int8.h"
#include "ipex/kernel/quant.h"

namespace ipex {
namespace {

constexpr int64_t kWidth = 2 * kPanel;

// Scales of the product's columns and the sums of the weight's, for up to 64 columns.
struct Columns {
  alignas(64) float scale[kWidth];
  alignas(64) int32_t sum[kWidth];

  // The sums are padded to whole panels and the scales are not.
  Columns(const Int8LinearArgs& args, int64_t column, int64_t width) {
    std::memcpy(sum, args.sums + column, static_cast<size_t>(width) * sizeof(int32_t));
    for (int64_t i = 0; i < width; ++i)
      scale[i] =
          column + i < args.weight_rows ? args.weight_scale[(column + i) * args.weight_step] : 0.0f;
  }
};

// Sums of one row as float.
IPEX_INLINE void scale_row(const int32_t* acc, const Columns& by, float x_scale, int32_t x_zero,
                           int64_t width, float* c) {
  const f32v scale = set1(x_scale);
  const i32v zero_code = iset1(x_zero);
  for (int64_t i = 0; i < width; i += kLanes) {
    const i32v sum = load_ints(acc + i) - zero_code * load_ints(by.sum + i);
    store(c + i, to_float(sum) * (scale * load(by.scale + i)));
  }
}

// T: what the epilogue reads and y is, but for codes, which are rounded from float.
template <class T, bool kCodes>
IPEX_INLINE void run(const Int8LinearArgs& args, int64_t row_begin, int64_t row_end,
                     int64_t panel_begin, int64_t panel_end) {
  alignas(64) int32_t acc[kRowStep8 * kWidth];
  alignas(64) float c[kRowStep8 * kWidth];
  alignas(64) T block[kCodes ? kRowStep8 * kWidth : 1];
  Quantizer to_codes;
  to_codes.inverse = 1.0f / args.y_scale;
  to_codes.zero = args.y_zero;
  const int64_t size = kPanel * args.k;
  const int64_t columns = args.epilogue.gated ? kPanel / 2 : kPanel;  // of y, for a panel
  TileScope scope;
  for (int64_t p = panel_begin; p < panel_end; p += 2) {
    const int8_t* p0 = args.weight + p * size;
    const int8_t* p1 = p + 1 < panel_end ? p0 + size : nullptr;
    const int64_t width = (p1 ? 2 : 1) * kPanel;
    const int64_t column = p * columns;
    const int64_t most = (p1 ? 2 : 1) * columns;
    const int64_t count = args.n - column < most ? args.n - column : most;
    const Columns by(args, p * kPanel, width);
    const Finisher<T> finisher(args.epilogue, column, count);
    for (int64_t r = row_begin; r < row_end; r += kRowStep8) {
      const int64_t rows = row_end - r < kRowStep8 ? row_end - r : kRowStep8;
      multiply8(scope, args.x + r * args.x_stride, args.x_stride, rows, p0, p1, args.k, acc, kWidth,
                false);
      for (int64_t i = 0; i < rows; ++i)
        scale_row(acc + i * kWidth, by, args.x_scale[(r + i) * args.x_step],
                  args.x_zero[(r + i) * args.x_step], width, c + i * kWidth);
      if constexpr (kCodes) {
        finisher.rows(c, kWidth, rows, r, block, kWidth);
        auto* y = static_cast<uint8_t*>(args.y) + r * args.n + column;
        for (int64_t i = 0; i < rows; ++i)
          args.y_signed
              ? quantize_row<false, true>(block + i * kWidth, count, to_codes, y + i * args.n)
              : quantize_row<true, true>(block + i * kWidth, count, to_codes, y + i * args.n);
      } else {
        finisher.rows(c, kWidth, rows, r, static_cast<T*>(args.y) + r * args.n + column, args.n);
      }
    }
  }
}

template <class T>
IPEX_INLINE void quantize_rows(const T* x, int64_t stride, int64_t rows, int64_t columns,
                               bool symmetric, uint8_t* q, int64_t q_stride, float* scale,
                               int32_t* zero_point) {
  for (int64_t r = 0; r < rows; ++r, x += stride, q += q_stride) {
    Quantizer by = row_quantizer(x, columns, symmetric);
    if (symmetric) by.zero = 128;
    quantize_row<true>(x, columns, by, q);
    std::memset(q + columns, 0, static_cast<size_t>(q_stride - columns));
    scale[r] = by.scale;
    zero_point[r] = by.zero;
  }
}

template <class T>
IPEX_INLINE void quantize_rows_with(const T* x, int64_t stride, int64_t rows, int64_t columns,
                                    float scale, int32_t zero_point, bool symmetric, uint8_t* q,
                                    int64_t q_stride) {
  Quantizer by;
  by.inverse = 1.0f / scale;
  by.zero = symmetric ? 128 : zero_point;
  by.finite = is_finite(scale);
  for (int64_t r = 0; r < rows; ++r, x += stride, q += q_stride) {
    quantize_row<true, true>(x, columns, by, q);
    std::memset(q + columns, 0, static_cast<size_t>(q_stride - columns));
  }
}

}  // namespace
}  // namespace ipex

#define IPEX_DEFINE_INT8_LINEAR(suffix, T, codes)                                             \
  void ipex_k_int8_linear_##suffix(const ipex::Int8LinearArgs* args, int64_t row_begin,       \
                                   int64_t row_end, int64_t panel_begin, int64_t panel_end) { \
    ipex::run<T, codes>(*args, row_begin, row_end, panel_begin, panel_end);                   \
  }
IPEX_DEFINE_INT8_LINEAR(f32, float, false)
IPEX_DEFINE_INT8_LINEAR(bf16, ipex::BFloat16, false)
IPEX_DEFINE_INT8_LINEAR(f16, ipex::Half, false)
IPEX_DEFINE_INT8_LINEAR(codes, float, true)

#define IPEX_DEFINE_INT8_ROWS(suffix, T)                                                           \
  void ipex_k_int8_linear_rows_##suffix(const T* x, int64_t stride, int64_t rows, int64_t columns, \
                                        bool symmetric, uint8_t* q, int64_t q_stride,              \
                                        float* scale, int32_t* zero) {                             \
    ipex::quantize_rows(x, stride, rows, columns, symmetric, q, q_stride, scale, zero);            \
  }                                                                                                \
  void ipex_k_int8_linear_static_rows_##suffix(const T* x, int64_t stride, int64_t rows,           \
                                               int64_t columns, float scale, int32_t zero,         \
                                               bool symmetric, uint8_t* q, int64_t q_stride) {     \
    ipex::quantize_rows_with(x, stride, rows, columns, scale, zero, symmetric, q, q_stride);       \
  }
IPEX_DEFINE_INT8_ROWS(f32, float)
IPEX_DEFINE_INT8_ROWS(bf16, ipex::BFloat16)
IPEX_DEFINE_INT8_ROWS(f16, ipex::Half)

void ipex_k_int8_linear_copy_rows(const uint8_t* x, int64_t stride, int64_t rows, int64_t columns,
                                  bool is_signed, uint8_t* q, int64_t q_stride) {
  const uint8_t flip = is_signed ? 0x80 : 0;  // adds 128
  for (int64_t r = 0; r < rows; ++r, x += stride, q += q_stride) {
    for (int64_t i = 0; i < columns; ++i) q[i] = x[i] ^ flip;
    for (int64_t i = columns; i < q_stride; ++i) q[i] = 0;
  }
}
