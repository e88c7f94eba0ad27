// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "ipex/kernel.h"

struct NmsArgs {
  const void* boxes;      // of one group
  int64_t stride;         // elements from one box to the next; the four coordinates are consecutive
  const uint32_t* order;  // boxes from the best to the worst
  int64_t count;          // of them
  float threshold, offset;
  int64_t max_output;
};

// Working memory in floats: boxes that stay, as five arrays (four sides and the area), padded.
inline int64_t nms_scratch(int64_t count) { return 5 * ((count + 15) / 16 * 16); }

// Sets keep[box] to true for the boxes that stay.
IPEX_KERNEL_API void ipex_k_nms_f32(const NmsArgs* args, bool* keep, float* scratch);
IPEX_KERNEL_API void ipex_k_nms_bf16(const NmsArgs* args, bool* keep, float* scratch);
IPEX_KERNEL_API void ipex_k_nms_f16(const NmsArgs* args, bool* keep, float* scratch);
