// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "ipex/kernel.h"

namespace ipex {

// Texts back to back: where each begins in the rows, what it has had with the new rows, and its row
// of the state.
struct Texts {
  const int32_t* starts;
  const int32_t* lengths;
  const int32_t* slots;
  int64_t batch;
};

// Rows [T, heads, width] in the dtype of the kernel; distances in elements, the last one is 1.
struct HeadRows {
  const void* data;
  int64_t row, head;
};

// One number for each row and head, in the dtype of the kernel or float.
struct HeadNumbers {
  const void* data;
  int64_t row, head;
  bool is_f32;
};

// The gated delta rule, or the scan of Mamba-2: there `query`, `key` and `value` are C, B and x.
struct RecurrenceArgs {
  Texts texts;
  HeadRows query, key, value;
  HeadNumbers step, strength;  // dt, or a and b of the delta rule
  const float* a;
  const float* bias;  // [H], or [H][K] if each key has a step of its own
  const float* skip;  // D, of Mamba-2
  float* state;       // [S][H][K][V]
  void* y;            // [T][H][V]
  int64_t heads, groups, width, size;
  float scale, least, most;
  float lowest;  // below zero: logarithms of decays are this times a sigmoid
  bool delta, normalize;
  bool each;      // `step` has K numbers for each row and head, side by side
  float* decays;  // [T][H][K], with `each`: what the kernel of decays gives
};

// The selective scan of Mamba: channels decay at rates of their own.
struct SelectiveArgs {
  Texts texts;
  const void* x;  // [T, E], rows x_row elements apart
  const void* b;  // [T, N]
  const void* c;
  int64_t x_row, b_row, c_row;
  HeadNumbers step;   // a head is a channel
  const float* a;     // [N][E]
  const float* bias;  // [E]
  const float* skip;  // [E]
  float* state;       // [S][N][E]
  void* y;            // [T][E]
  int64_t channels, width;
};

// The recurrence of RWKV: weighted means of the values so far, channel by channel.
struct WkvArgs {
  Texts texts;
  const void* x;  // [T, E], rows x_row elements apart
  int64_t x_row;
  HeadNumbers key;     // a head is a channel
  const float* decay;  // [E]
  const float* first;  // [E]
  float* state;        // [S][3][E]: sum of values, sum of weights, logarithm of what both lack
  void* y;             // [T][E]
  int64_t channels;
};

struct VarlenConvArgs {
  Texts texts;
  const void* x;  // [T, D]
  int64_t x_row;
  void* y;             // [T][D]
  void* state;         // [S][W - 1][D]
  const void* weight;  // [W][D]
  const void* bias;    // [D], or nullptr
  int64_t channels, taps;
  bool weight_is_f32, bias_is_f32, silu;
};

// Values of one task, and channels of one task of the convolution.
inline constexpr int64_t kRecurrenceColumns = 64;
inline constexpr int64_t kVarlenChannels = 64;
inline constexpr int64_t kVarlenMaxTaps = 64;

// Bytes of working memory of a task: a block of the state, a query, two keys and a key times
// decays; a history.
inline int64_t recurrence_scratch_bytes(int64_t width) {
  const int64_t rows = (width + 15) / 16 * 16;
  return static_cast<int64_t>(sizeof(float)) * (rows * kRecurrenceColumns + 4 * rows);
}
// A block of the state and of A, and rows of B and C.
inline int64_t selective_scratch_bytes(int64_t width) {
  const int64_t rows = (width + 15) / 16 * 16;
  return static_cast<int64_t>(sizeof(float)) * (2 * width * kRecurrenceColumns + 2 * rows);
}
inline int64_t varlen_conv_scratch_bytes(int64_t taps) {
  return static_cast<int64_t>(sizeof(float)) * 16 * (2 * taps + 1);
}

}  // namespace ipex

// decays: rows and their heads [begin, end), counted through rows.
// recurrence: blocks of kRecurrenceColumns values [begin, end), counted through texts and heads.
// selective: blocks of kRecurrenceColumns channels [begin, end), counted through texts.
// wkv: blocks of kRecurrenceColumns channels [begin, end), counted through texts.
// conv: blocks of kVarlenChannels channels [begin, end), counted through texts.
#define IPEX_DECLARE_LINEAR_ATTENTION(suffix)                                                      \
  IPEX_KERNEL_API void ipex_k_decays_##suffix(const ipex::RecurrenceArgs* args, int64_t begin,     \
                                              int64_t end);                                        \
  IPEX_KERNEL_API void ipex_k_recurrence_##suffix(const ipex::RecurrenceArgs* args, int64_t begin, \
                                                  int64_t end, char* scratch);                     \
  IPEX_KERNEL_API void ipex_k_selective_varlen_##suffix(                                           \
      const ipex::SelectiveArgs* args, int64_t begin, int64_t end, char* scratch);                 \
  IPEX_KERNEL_API void ipex_k_wkv_scan_##suffix(const ipex::WkvArgs* args, int64_t begin,          \
                                                int64_t end);                                      \
  IPEX_KERNEL_API void ipex_k_causal_conv1d_varlen_##suffix(                                       \
      const ipex::VarlenConvArgs* args, int64_t begin, int64_t end, char* scratch)
IPEX_DECLARE_LINEAR_ATTENTION(f32);
IPEX_DECLARE_LINEAR_ATTENTION(bf16);
IPEX_DECLARE_LINEAR_ATTENTION(f16);
#undef IPEX_DECLARE_LINEAR_ATTENTION
