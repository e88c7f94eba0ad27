// SPDX-License-Identifier: Apache-2.0
// What glue and kernels of ops with dropout exchange; see keep_mask.h.
#pragma once

#include <cstdint>

namespace ipex {

struct Drop {
  uint64_t key;
  uint32_t threshold;  // 0: everything is kept
  float factor;
};

}  // namespace ipex
