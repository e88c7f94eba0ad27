// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "ipex/kernel.h"

namespace ipex {

// Most taps of a filter.
inline constexpr int64_t kMaxTaps = 64;

// A filter per channel: weight [D][W], bias [D] or nullptr; in the dtype of the kernel or float.
struct Filter {
  const void* weight;
  const void* bias;
  int64_t width;
  bool weight_is_f32, bias_is_f32;
  bool silu;
};

struct CausalConvArgs {
  Filter filter;
  const void* x;
  void* y;
  const void* initial;  // [B][D][W - 1], or nullptr
  // Distances in elements of [B, D, L]; the distance of channels or of steps is 1, the same
  // for x and y.
  int64_t x_batch, x_channel, x_step, y_batch, y_channel, y_step;
  int64_t batch, channels, steps;
};

struct ConvUpdateArgs {
  Filter filter;
  const void* x;  // [B, D]
  int64_t x_batch, x_channel;
  void* y;  // [B][D]
  void* state;
  int64_t state_batch, state_channel, state_place;  // of the last two, one is 1
  int64_t places;
  const int64_t* lengths;  // [B], or nullptr: not circular
  int64_t batch, channels;
};

// Steps of one task where channels lie side by side, and channels of one task of an update.
inline constexpr int64_t kConvSteps = 64;
inline constexpr int64_t kConvChannels = 64;

// Bytes of working memory: of a sequence, and of an update.
inline int64_t causal_conv_scratch_bytes(int64_t width) {
  return static_cast<int64_t>(sizeof(float)) * kConvChannels * 2 * (width + 1);
}
inline int64_t conv_update_scratch_bytes(int64_t width, int64_t places) {
  return static_cast<int64_t>(sizeof(float)) * 16 * (width + places + 2);
}

}  // namespace ipex

// rows: channels [begin, end), counted through the batches; the steps of a channel lie together.
// columns: blocks of kConvSteps steps [begin, end), counted likewise; the channels lie together.
// update: blocks of kConvChannels channels [begin, end), counted likewise.
#define IPEX_DECLARE_CAUSAL_CONV(suffix)                                                    \
  IPEX_KERNEL_API void ipex_k_causal_conv1d_rows_##suffix(const ipex::CausalConvArgs* args, \
                                                          int64_t begin, int64_t end);      \
  IPEX_KERNEL_API void ipex_k_causal_conv1d_columns_##suffix(                               \
      const ipex::CausalConvArgs* args, int64_t begin, int64_t end, char* scratch);         \
  IPEX_KERNEL_API void ipex_k_causal_conv1d_update_##suffix(                                \
      const ipex::ConvUpdateArgs* args, int64_t begin, int64_t end, char* scratch)
IPEX_DECLARE_CAUSAL_CONV(f32);
IPEX_DECLARE_CAUSAL_CONV(bf16);
IPEX_DECLARE_CAUSAL_CONV(f16);
#undef IPEX_DECLARE_CAUSAL_CONV
