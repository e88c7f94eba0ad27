// SPDX-License-Identifier: Apache-2.0
#include "quantize.h"

#include "ipex/kernel/quant.h"

namespace ipex {
namespace {

template <class T>
IPEX_INLINE void per_token(const T* x, int64_t stride, int64_t rows, int64_t columns,
                           bool symmetric, uint8_t* q, float* scale, int32_t* zero_point) {
  for (int64_t r = 0; r < rows; ++r) {
    const Quantizer by = row_quantizer(x + r * stride, columns, symmetric);
    quantize_row(x + r * stride, columns, by, symmetric, q + r * columns);
    scale[r] = by.scale;
    zero_point[r] = by.zero;
  }
}

template <class T>
IPEX_INLINE void range(const T* x, int64_t n, bool symmetric, float* low_high) {
  Range found;
  if (symmetric) {
    found.high = absolute_maximum(x, n);
    found.low = -found.high;
  } else {
    found = range_of(x, n);
  }
  low_high[0] = found.low;
  low_high[1] = found.high;
}

template <class T>
IPEX_INLINE void quantize_with(const T* x, int64_t n, float scale, int32_t zero_point,
                               bool symmetric, uint8_t* q) {
  Quantizer by;
  by.inverse = 1.0f / scale;
  by.finite = is_finite(scale);
  by.zero = zero_point;
  symmetric ? quantize_row<false, true>(x, n, by, q) : quantize_row<true, true>(x, n, by, q);
}

}  // namespace
}  // namespace ipex

#define IPEX_DEFINE_QUANTIZE(suffix, T)                                                         \
  void ipex_k_quantize_per_token_##suffix(const T* x, int64_t stride, int64_t rows,             \
                                          int64_t columns, bool symmetric, uint8_t* q,          \
                                          float* scale, int32_t* zero) {                        \
    ipex::per_token(x, stride, rows, columns, symmetric, q, scale, zero);                       \
  }                                                                                             \
  void ipex_k_quantize_range_##suffix(const T* x, int64_t n, bool symmetric, float* low_high) { \
    ipex::range(x, n, symmetric, low_high);                                                     \
  }                                                                                             \
  void ipex_k_quantize_with_##suffix(const T* x, int64_t n, float scale, int32_t zero,          \
                                     bool symmetric, uint8_t* q) {                              \
    ipex::quantize_with(x, n, scale, zero, symmetric, q);                                       \
  }

IPEX_DEFINE_QUANTIZE(f32, float)
IPEX_DEFINE_QUANTIZE(bf16, ipex::BFloat16)
IPEX_DEFINE_QUANTIZE(f16, ipex::Half)
