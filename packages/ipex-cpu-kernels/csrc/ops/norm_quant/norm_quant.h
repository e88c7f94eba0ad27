// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "ipex/kernel.h"

namespace ipex {

struct NormQuant {
  const void* x = nullptr;  // [rows, cols], rows x_stride elements apart
  int64_t x_stride = 0;
  void* residual = nullptr;      // [rows, cols] row-major or null; receives the sum with x
  const void* weight = nullptr;  // [cols] of the type of x, or of float if params_are_f32; or null
  const void* bias = nullptr;    // the same; layer norm only
  bool params_are_f32 = false;
  float eps = 0.0f;
  float weight_offset = 0.0f;  // RMS norm only
  float static_scale = 0.0f;   // of all rows; 0: each row has its own, stored in `scale`
  uint8_t* q = nullptr;        // [rows, cols], int8 codes
  float* scale = nullptr;      // [rows]
  int64_t cols = 0;
};

}  // namespace ipex

// Codes of the normalized rows [begin, end). `row` has room for one row of the type of x.
#define IPEX_DECLARE_NORM_QUANT(suffix, T)                                                   \
  IPEX_KERNEL_API void ipex_k_rms_norm_quant_##suffix(const ipex::NormQuant* work, T* row,   \
                                                      int64_t begin, int64_t end);           \
  IPEX_KERNEL_API void ipex_k_layer_norm_quant_##suffix(const ipex::NormQuant* work, T* row, \
                                                        int64_t begin, int64_t end);
IPEX_DECLARE_NORM_QUANT(f32, float)
IPEX_DECLARE_NORM_QUANT(bf16, ipex::BFloat16)
IPEX_DECLARE_NORM_QUANT(f16, ipex::Half)
#undef IPEX_DECLARE_NORM_QUANT
