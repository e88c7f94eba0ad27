// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "ipex/kernel.h"

namespace ipex {

enum class ExpertActivation : int32_t { kSilu, kGelu, kGeluTanh, kSwigluOai, kRelu2 };

// The others multiply a gate with another factor.
inline bool is_gated(ExpertActivation activation) { return activation != ExpertActivation::kRelu2; }

// One expert with the tokens that go to it: its rows, in rising order of their tokens.
struct ExpertJob {
  const void* w13;        // panels of 32 columns: gate and up in turn, or up; see linear/packed.h
  const void* w2;         // panels of 32 columns
  const void* w13_bias;   // [2 * inner]: all gates, then all ups; [inner] without; or null
  const void* w2_bias;    // [hidden] or null
  const int32_t* tokens;  // [rows]; null: row i is token i
  const float* weights;   // [rows]; null: all 1
  void* middle;           // [rows, middle_stride]: what goes into the second product
  int64_t rows;
  int64_t inner, middle_stride;  // the stride is `inner` rounded up to whole panels
};

struct ExpertsArgs {
  const ExpertJob* jobs;
  int64_t job_count;
  void* y;  // [tokens, hidden], contiguous
  int64_t hidden;
  ExpertActivation activation;
  float alpha, limit;  // of kSwigluOai
  bool w13_bias_is_f32, w2_bias_is_f32;
};

}  // namespace ipex

// Adds rows of products, [rows][columns] and contiguous, to the sums of their tokens:
// sums[tokens[i] - first_token][0..64) += weights[i] * c[i]. Null tokens: row i is token i of the
// sums; null weights: all 1.
IPEX_KERNEL_API void ipex_k_experts_add(const float* c, int64_t rows, int64_t columns,
                                        const int32_t* tokens, int64_t first_token,
                                        const float* weights, float* sums);

// First product: columns of the panel pairs [pair_begin, pair_end) of job.middle for `rows` rows
// from `row` on, without gates of panels. `a` are their inputs, lda elements apart.
//
// Second product: the columns of the panels [panel_begin, panel_end) of y for the tokens
// [token_begin, token_end), summed over the experts in their order. `sums` has room for 64 floats
// per token, 64-byte aligned.
//
// store: rounds [rows][64] sums to `columns` columns of y.
//
// square: of `columns` columns of rows `stride` elements apart, in place.
#define IPEX_DECLARE_EXPERTS(suffix)                                                              \
  IPEX_KERNEL_API void ipex_k_experts_up_##suffix(                                                \
      const ipex::ExpertsArgs* args, const ipex::ExpertJob* job, const void* a, int64_t lda,      \
      int64_t row, int64_t rows, int64_t pair_begin, int64_t pair_end);                           \
  IPEX_KERNEL_API void ipex_k_experts_down_##suffix(                                              \
      const ipex::ExpertsArgs* args, int64_t token_begin, int64_t token_end, int64_t panel_begin, \
      int64_t panel_end, float* sums);                                                            \
  IPEX_KERNEL_API void ipex_k_experts_store_##suffix(const float* sums, int64_t rows,             \
                                                     int64_t columns, void* y, int64_t y_stride); \
  IPEX_KERNEL_API void ipex_k_experts_square_##suffix(void* y, int64_t rows, int64_t columns,     \
                                                      int64_t stride)
IPEX_DECLARE_EXPERTS(f32);
IPEX_DECLARE_EXPERTS(bf16);
IPEX_DECLARE_EXPERTS(f16);
#undef IPEX_DECLARE_EXPERTS
