// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "ipex/kernel.h"

namespace ipex {

enum class Activation : int32_t { kNone, kRelu, kGelu, kGeluTanh, kSilu };

// y = activation(x * W + bias) + residual
struct LinearArgs {
  const void* x;         // [rows, k], rows x_stride elements apart
  const void* weight;    // panels of 32 columns, see packed.h
  const void* bias;      // [n] or null
  const void* residual;  // [rows, n], rows residual_stride elements apart, or null
  void* y;               // [rows, n], contiguous
  int64_t x_stride, residual_stride;
  int64_t n, k;
  bool bias_is_f32;
  Activation activation;
};

}  // namespace ipex

// Computes the rows [row_begin, row_end) of the columns in the panels [panel_begin, panel_end).
#define IPEX_DECLARE_LINEAR(suffix)                                                            \
  IPEX_KERNEL_API void ipex_k_linear_##suffix(const ipex::LinearArgs* args, int64_t row_begin, \
                                              int64_t row_end, int64_t panel_begin,            \
                                              int64_t panel_end)
IPEX_DECLARE_LINEAR(f32);
IPEX_DECLARE_LINEAR(bf16);
IPEX_DECLARE_LINEAR(f16);
#undef IPEX_DECLARE_LINEAR
