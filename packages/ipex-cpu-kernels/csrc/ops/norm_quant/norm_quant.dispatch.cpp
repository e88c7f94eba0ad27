// SPDX-License-Identifier: Apache-2.0
#include "norm_quant.h"

#include "../layer_norm/layer_norm_row.h"
#include "../rms_norm/rms_norm_row.h"
#include "ipex/kernel/quant.h"

namespace ipex {
namespace {

// The normalized row is rounded to T before it is quantized, as the two operations in a row would
// do; it stays in the cache.
template <typename T>
IPEX_INLINE void quantize(const NormQuant& work, const T* row, int64_t r) {
  uint8_t* q = work.q + r * work.cols;
  if (work.static_scale > 0.0f) {
    Quantizer by;
    by.inverse = 1.0f / work.static_scale;
    quantize_row<false, true>(row, work.cols, by, q);
  } else {
    const Quantizer by = row_quantizer(row, work.cols, true);
    quantize_row<false>(row, work.cols, by, q);
    work.scale[r] = by.scale;
  }
}

template <typename T>
IPEX_INLINE void run_rms(const NormQuant& work, T* row, int64_t begin, int64_t end) {
  const int64_t n = work.cols;
  for (int64_t r = begin; r < end; ++r) {
    const T* x = static_cast<const T*>(work.x) + r * work.x_stride;
    T* sum = static_cast<T*>(work.residual) + r * n;
    float squares;
    if (work.residual != nullptr) {
      squares = add_and_square(x, sum, sum, n);
      x = sum;
    } else {
      squares = sum_of_squares(x, n);
    }
    finish_rms_norm(x, squares, work.weight, work.params_are_f32, work.eps, work.weight_offset, row,
                    n);
    quantize(work, row, r);
  }
}

template <typename T>
IPEX_INLINE void run_layer(const NormQuant& work, T* row, int64_t begin, int64_t end) {
  const int64_t n = work.cols;
  for (int64_t r = begin; r < end; ++r) {
    const T* x = static_cast<const T*>(work.x) + r * work.x_stride;
    T* sum = static_cast<T*>(work.residual) + r * n;
    const bool adds = work.residual != nullptr;
    Moments moments = adds ? add_and_measure(x, sum, sum, n) : measure(x, n);
    finish_layer_norm(adds ? sum : x, moments, work.weight, work.bias, work.params_are_f32,
                      work.eps, row, n);
    quantize(work, row, r);
  }
}

}  // namespace
}  // namespace ipex

#define IPEX_DEFINE_NORM_QUANT(suffix, T)                                                   \
  void ipex_k_rms_norm_quant_##suffix(const ipex::NormQuant* work, T* row, int64_t begin,   \
                                      int64_t end) {                                        \
    ipex::run_rms(*work, row, begin, end);                                                  \
  }                                                                                         \
  void ipex_k_layer_norm_quant_##suffix(const ipex::NormQuant* work, T* row, int64_t begin, \
                                        int64_t end) {                                      \
    ipex::run_layer(*work, row, begin, end);                                                \
  }

IPEX_DEFINE_NORM_QUANT(f32, float)
IPEX_DEFINE_NORM_QUANT(bf16, ipex::BFloat16)
IPEX_DEFINE_NORM_QUANT(f16, ipex::Half)
