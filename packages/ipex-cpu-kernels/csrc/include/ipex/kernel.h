// SPDX-License-Identifier: Apache-2.0
// Shared by kernels (compiled once per ISA level) and by the glue that calls them.
#pragma once

#include <cstdint>

// C symbols: their names carry no ISA, so a kernel of one level can stand in for another.
#define IPEX_KERNEL_API extern "C" __attribute__((visibility("default")))

namespace ipex {

// Storage types: kernels compute in float and only load and store these.
struct BFloat16 {
  uint16_t bits;
};
struct Half {
  uint16_t bits;
};

}  // namespace ipex
