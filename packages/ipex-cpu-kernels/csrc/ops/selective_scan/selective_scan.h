// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "ipex/kernel.h"

namespace ipex {

// Distances in elements of [B, D, L]. Of the last two at least one is 1.
struct SequenceStrides {
  int64_t batch, channel, step;
};

struct SelectiveScanArgs {
  const void* u;
  const void* delta;
  const void* z;  // or nullptr
  void* y;
  SequenceStrides u_strides, delta_strides, z_strides, y_strides;
  const float* a;        // [D][N]
  const float* b;        // [B][G][L][N], or [D][N] if it does not vary
  const float* c;        // likewise
  const float* d;        // [D], or nullptr
  const float* bias;     // [D], or nullptr
  const float* initial;  // [B][D][N], or nullptr
  float* last;           // [B][D][N]
  int64_t batch, channels, steps, size;
  int64_t b_groups, c_groups;  // 0: does not vary
  bool softplus;
};

// Channels of one task, and steps that it takes at a time.
inline constexpr int64_t kScanChannels = 16;
inline constexpr int64_t kScanSteps = 64;

// Bytes of working memory of one task.
inline int64_t selective_scan_scratch_bytes(int64_t size) {
  return static_cast<int64_t>(sizeof(float)) * kScanChannels * (4 * size + 4 * kScanSteps);
}

}  // namespace ipex

// Tasks [begin, end), counted through the batches: kScanChannels neighboring channels each.
#define IPEX_DECLARE_SELECTIVE_SCAN(suffix)                                                \
  IPEX_KERNEL_API void ipex_k_selective_scan_##suffix(const ipex::SelectiveScanArgs* args, \
                                                      int64_t begin, int64_t end, char* scratch)
IPEX_DECLARE_SELECTIVE_SCAN(f32);
IPEX_DECLARE_SELECTIVE_SCAN(bf16);
IPEX_DECLARE_SELECTIVE_SCAN(f16);
#undef IPEX_DECLARE_SELECTIVE_SCAN
