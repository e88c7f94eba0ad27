// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "ipex/kernel.h"

namespace ipex {

// One parameter and what its optimizer keeps for it; all arrays have the same order of elements.
// The parameter is
//   float32                  param; param2 may be a copy of it in the dtype of the gradient
//   split (`split`)          param has the upper 16 bits of each number, param2 the lower ones
struct StepArrays {
  void* param = nullptr;
  void* param2 = nullptr;
  const void* grad = nullptr;
  float* state[3] = {nullptr, nullptr, nullptr};
  bool split = false;

  // The same arrays from element i on; `bytes` is the size of an element of the gradient.
  StepArrays from(int64_t i, int64_t bytes) const {
    StepArrays part = *this;
    part.param = static_cast<char*>(param) + i * (split ? 2 : 4);
    if (param2) part.param2 = static_cast<char*>(param2) + i * (split ? 2 : bytes);
    part.grad = static_cast<const char*>(grad) + i * bytes;
    for (float*& one : part.state)
      if (one) one += i;
    return part;
  }
};

// g = sign * factor * grad + weight_decay * w. `sign` is -1 to maximize.
struct SgdStep {                                         // state: momentum buffer, if there is one
  float sign, factor, weight_decay, momentum, keep, lr;  // keep = 1 - dampening
  bool nesterov, first;
};
struct AdagradStep {  // state: sum of squares
  float sign, weight_decay, lr, eps;
};
struct AdamStep {  // state: means of gradients and squares; largest mean of squares, if asked for
  float sign, weight_decay, shrink;  // shrink = 1 - lr * weight_decay, or 1
  float beta1, rest1, beta2, rest2;  // rest = 1 - beta
  float root2, eps, lr;              // root2 = sqrt(1 - beta2^step); lr by 1 - beta1^step
};
struct LambStep {  // state: as Adam
  float weight_decay, beta1, rest1, beta2, rest2, correction1, correction2, eps, lr;
};

}  // namespace ipex

// n elements. T of the name is the dtype of the gradient.
#define IPEX_STEP_KERNELS(T)                                                                       \
  IPEX_KERNEL_API void ipex_k_sgd_step_##T(const ipex::StepArrays& arrays, int64_t n,              \
                                           const ipex::SgdStep& step);                             \
  IPEX_KERNEL_API void ipex_k_adagrad_step_##T(const ipex::StepArrays& arrays, int64_t n,          \
                                               const ipex::AdagradStep& step);                     \
  IPEX_KERNEL_API void ipex_k_adam_step_##T(const ipex::StepArrays& arrays, int64_t n,             \
                                            const ipex::AdamStep& step);                           \
  /* Updates the state; adds the squares of the parameter and of its direction to sums[0 .. 1]. */ \
  IPEX_KERNEL_API void ipex_k_lamb_state_##T(const ipex::StepArrays& arrays, int64_t n,            \
                                             const ipex::LambStep& step, double* sums);            \
  /* Moves the parameter by step.lr in its direction. */                                           \
  IPEX_KERNEL_API void ipex_k_lamb_apply_##T(const ipex::StepArrays& arrays, int64_t n,            \
                                             const ipex::LambStep& step);                          \
  /* Adds the squares of the parameter and of the gradient to sums[0 .. 1]. */                     \
  IPEX_KERNEL_API void ipex_k_lars_sums_##T(const ipex::StepArrays& arrays, int64_t n,             \
                                            double* sums);

IPEX_STEP_KERNELS(f32)
IPEX_STEP_KERNELS(bf16)
IPEX_STEP_KERNELS(f16)
#undef IPEX_STEP_KERNELS

// x[i] as top[i] (upper 16 bits) and low[i], and back.
IPEX_KERNEL_API void ipex_k_split_bits_f32(const float* x, uint16_t* top, uint16_t* low, int64_t n);
IPEX_KERNEL_API void ipex_k_join_bits_bf16(const uint16_t* top, const uint16_t* low, float* y,
                                           int64_t n);
