// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "ipex/kernel.h"

namespace ipex {

// Numbers with a batch, a head and a channel each, in the dtype of the kernel or float. Distances
// are in elements, 0 where a dimension is broadcast; B and C have a group instead of a head and a
// number of the state instead of a channel.
struct StepVector {
  const void* data = nullptr;
  int64_t batch = 0, head = 0, channel = 0;
  bool is_f32 = false;
};

struct StateUpdateArgs {
  void* state;
  int64_t state_batch, state_head, state_channel;  // distances; the numbers of a state lie together
  bool state_is_f32;
  const float* a;
  int64_t a_head, a_channel, a_number;  // distances; a_number is 1, or 0 if all are equal
  StepVector x, dt, b, c, d, z, bias;
  void* y;  // [B][H][D]
  int64_t batch, heads, channels, size, b_groups, c_groups;
  bool softplus;
};

// Channels of one task.
inline constexpr int64_t kUpdateChannels = 64;

// Bytes of working memory of one task: the rows of B and C.
inline int64_t state_update_scratch_bytes(int64_t size) {
  return 2 * static_cast<int64_t>(sizeof(float)) * (size + 16);
}

}  // namespace ipex

// Tasks [begin, end), counted through batches and heads: kUpdateChannels channels each.
#define IPEX_DECLARE_STATE_UPDATE(suffix)                      \
  IPEX_KERNEL_API void ipex_k_selective_state_update_##suffix( \
      const ipex::StateUpdateArgs* args, int64_t begin, int64_t end, char* scratch)
IPEX_DECLARE_STATE_UPDATE(f32);
IPEX_DECLARE_STATE_UPDATE(bf16);
IPEX_DECLARE_STATE_UPDATE(f16);
#undef IPEX_DECLARE_STATE_UPDATE
