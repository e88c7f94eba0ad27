// SPDX-License-Identifier: Apache-2.0
// What the attention ops share in their glue: optional arguments, and how the work of a call is cut
// and spread over threads.
#pragma once

#include <cmath>
#include <vector>

#include "attention.h"
#include "ipex/glue/dispatch.h"
#include "ipex/glue/kv_glue.h"

namespace ipex {

using AttentionKernels = Kernels<decltype(ipex_k_attention_f32), decltype(ipex_k_attention_bf16),
                                 decltype(ipex_k_attention_f16)>;
using AttentionPackKernels =
    Kernels<decltype(ipex_k_attention_pack_f32), decltype(ipex_k_attention_pack_bf16),
            decltype(ipex_k_attention_pack_f16)>;
using AttentionRowsKernels =
    Kernels<decltype(ipex_k_attention_rows_f32), decltype(ipex_k_attention_rows_bf16),
            decltype(ipex_k_attention_rows_f16)>;

// The kernels as an op knows them.
struct AttentionHandles {
  explicit AttentionHandles(const char* op);
  const char* op;
  AttentionKernels run;
  AttentionPackKernels pack;
  AttentionRowsKernels rows;
};

// Alibi slopes, sinks and a window, checked; the numbers as float.
struct AttentionOptions {
  std::vector<float> alibi, sinks;
  int64_t alibi_sequence = 0;  // distance of the slopes of two sequences
};

// alibi_slopes: [heads] or [sequences, heads]; sinks: [heads]; both float32 or in the dtype of the
// query. Fills the fields of args that depend on them.
AttentionOptions attention_options(const char* op, const Tensor& query, int64_t sequences,
                                   int64_t heads, const OptionalTensor& alibi,
                                   const OptionalTensor& sinks, int64_t window_left,
                                   int64_t window_right, double softcap, bool is_causal,
                                   AttentionArgs& args);

// The packed queries [tokens, heads, head_size] and the output like them.
void check_rows(const char* op, const Tensor& query, const Tensor& out);

// Offsets of sequences, [sequences + 1]: their type and size (0: any), and what they hold.
void check_offset_tensor(const char* op, const char* name, const Tensor& offsets, int64_t size);
void check_offsets(const char* op, const char* name, const Indices& offsets, int64_t count,
                   int64_t limit);

// The tensor, or a copy whose last dimension is contiguous, which kernels need.
Tensor rows_contiguous(const Tensor& x);

inline float attention_scale(double scale, int64_t size) {
  return static_cast<float>(scale != 0.0 ? scale : 1.0 / std::sqrt(static_cast<double>(size)));
}

// Runs the op. Everything but begin and end of the sequences is set.
void run_attention(const AttentionHandles& kernels, ScalarType dtype, AttentionArgs& args,
                   std::vector<AttentionSequence>& sequences);

}  // namespace ipex
