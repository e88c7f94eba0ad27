// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "ipex/kernel.h"

namespace ipex {

struct RoutingArgs {
  const void* logits;  // [tokens, experts], rows `stride` elements apart
  const float* bias;   // [experts] or null
  float* weights;      // [tokens, top_k]
  int32_t* ids;        // [tokens, top_k]
  int64_t stride;
  int64_t experts, top_k;
  int64_t groups, top_groups;  // groups == 1: none
  float factor, jitter;        // the latter of sparsemixer
  bool sigmoid, sparsemixer, renormalize;
};

inline int64_t routing_padded(int64_t experts) { return (experts + 15) / 16 * 16; }

// Words of scratch that a call needs.
inline int64_t routing_scratch(const RoutingArgs& args) {
  return 3 * routing_padded(args.experts) + args.groups;
}

}  // namespace ipex

// The tokens [begin, end). `scratch` has room for routing_scratch() words, 64-byte aligned.
#define IPEX_DECLARE_ROUTING(suffix)                                                             \
  IPEX_KERNEL_API void ipex_k_moe_routing_##suffix(const ipex::RoutingArgs* args, int64_t begin, \
                                                   int64_t end, float* scratch)
IPEX_DECLARE_ROUTING(f32);
IPEX_DECLARE_ROUTING(bf16);
IPEX_DECLARE_ROUTING(f16);
#undef IPEX_DECLARE_ROUTING
