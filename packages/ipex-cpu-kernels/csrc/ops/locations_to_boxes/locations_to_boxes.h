// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "ipex/kernel.h"

// The boxes [begin, end) of four consecutive numbers each. Box i belongs to prior i % priors.
struct LocationsArgs {
  const void* locations;
  const void* prior;  // of the type of the locations, or float if prior_is_f32
  void* boxes;
  int64_t priors;
  float center_variance, size_variance;
  bool prior_is_f32;
};

IPEX_KERNEL_API void ipex_k_locations_to_boxes_f32(const LocationsArgs* args, int64_t begin,
                                                   int64_t end);
IPEX_KERNEL_API void ipex_k_locations_to_boxes_bf16(const LocationsArgs* args, int64_t begin,
                                                    int64_t end);
IPEX_KERNEL_API void ipex_k_locations_to_boxes_f16(const LocationsArgs* args, int64_t begin,
                                                   int64_t end);
