// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "ipex/drop.h"
#include "ipex/kernel.h"

// Backward of dropped = dropout(probs), probs = softmax(scale * x) for the rows [begin, end).
//   grad         [rows, cols], gradient of dropped, rows grad_stride elements apart
//   probs        [rows, cols], rows probs_stride elements apart
//   dx, dropped  [rows, cols], row-major; written
IPEX_KERNEL_API void ipex_k_softmax_dropout_backward_f32(const float* grad, int64_t grad_stride,
                                                         const float* probs, int64_t probs_stride,
                                                         float scale, const ipex::Drop* drop,
                                                         float* dx, float* dropped, int64_t cols,
                                                         int64_t begin, int64_t end);
IPEX_KERNEL_API void ipex_k_softmax_dropout_backward_bf16(
    const ipex::BFloat16* grad, int64_t grad_stride, const ipex::BFloat16* probs,
    int64_t probs_stride, float scale, const ipex::Drop* drop, ipex::BFloat16* dx,
    ipex::BFloat16* dropped, int64_t cols, int64_t begin, int64_t end);
IPEX_KERNEL_API void ipex_k_softmax_dropout_backward_f16(
    const ipex::Half* grad, int64_t grad_stride, const ipex::Half* probs, int64_t probs_stride,
    float scale, const ipex::Drop* drop, ipex::Half* dx, ipex::Half* dropped, int64_t cols,
    int64_t begin, int64_t end);
