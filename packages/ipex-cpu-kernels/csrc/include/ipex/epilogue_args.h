// SPDX-License-Identifier: Apache-2.0
// What follows a matrix product before its result is stored; shared by kernels and glue.
//
//   y = activation(alpha * c + bias) * mul + add + add2
// or, if gated (C has pairs of 32 gate columns and 32 up columns, so 64 of C give 32 of y):
//   y = (activation(gate + bias_gate) * (up + bias_up)) * mul + add + add2,
// gate and up times alpha.
//
// Everything is in float and rounded once. Operands that are null are left out.
#pragma once

#include <cstdint>

namespace ipex {

// kSwigluOai only if gated, with swiglu_alpha and swiglu_limit:
// (clamp(up, -limit, limit) + 1) * g * sigmoid(alpha * g), g = min(gate, limit)
enum class Activation : int32_t { kNone, kRelu, kGelu, kGeluTanh, kSilu, kSwigluOai };

struct Epilogue {
  const void* bias;  // one per column of C (gated: gate and up alternate in blocks of 32 as in C)
  const void* mul;   // [rows of y][columns of y] in the dtype of y, rows mul_stride elements apart
  const void* add;
  const void* add2;
  int64_t mul_stride, add_stride, add2_stride;
  bool bias_is_f32;  // else the dtype of y
  bool gated;
  Activation activation;  // if gated, of the gate
  float alpha = 1.0f;
  float swiglu_alpha = 0.0f, swiglu_limit = 0.0f;  // of kSwigluOai
};

}  // namespace ipex
