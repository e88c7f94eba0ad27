// SPDX-License-Identifier: Apache-2.0
// Which token goes to which expert: the pairs sorted by expert, and a job for each expert that has
// any. For glue only.
#pragma once

#include <torch/headeronly/util/Half.h>

#include <cstring>
#include <vector>

#include "fused_experts/fused_experts.h"
#include "ipex/glue/dispatch.h"

namespace ipex {

// A weight of a token as float, whatever dtype it is stored in.
inline float weight_at(const void* data, ScalarType dtype, int64_t i) {
  if (dtype == ScalarType::Float) return static_cast<const float*>(data)[i];
  const uint16_t bits = static_cast<const uint16_t*>(data)[i];
  if (dtype == ScalarType::BFloat16) {
    const uint32_t wide = static_cast<uint32_t>(bits) << 16;
    float value;
    std::memcpy(&value, &wide, sizeof(value));
    return value;
  }
  return torch::headeronly::detail::fp16_ieee_to_fp32_value(bits);
}

// The ids of the chosen experts. Valid are -1 and [0, total); of these the experts [start,
// start + local) are here and the others are skipped.
struct ExpertIds {
  const void* data;
  bool is_long;
  int64_t start, local, total;

  int64_t raw(int64_t i) const {
    return is_long ? static_cast<const int64_t*>(data)[i] : static_cast<const int32_t*>(data)[i];
  }
  bool valid(int64_t id) const { return id >= -1 && id < total; }
  // The expert among those here, or -1.
  int64_t expert(int64_t i) const {
    const int64_t id = raw(i) - start;
    return id >= 0 && id < local ? id : -1;
  }
};

// Counting sort; within an expert tokens stay in their order. `experts` lists the experts that have
// rows and `first` the row where each starts, with the total at the end.
struct SortedPairs {
  std::vector<int64_t> experts, first;
  std::vector<int32_t> tokens;
  std::vector<float> weights;

  // `ids` have been checked. Without values all weights are 1.
  SortedPairs(const ExpertIds& ids, const void* values, ScalarType dtype, int64_t count,
              int64_t top_k) {
    std::vector<int64_t> place(static_cast<size_t>(ids.local) + 1, 0);
    for (int64_t i = 0; i < count; ++i) ++place[static_cast<size_t>(ids.expert(i) + 1)];
    int64_t total = 0;
    for (int64_t e = 0; e < ids.local; ++e) {
      auto& slot = place[static_cast<size_t>(e) + 1];
      if (slot > 0) {
        experts.push_back(e);
        first.push_back(total);
      }
      total += slot;
      slot = total - slot;
    }
    first.push_back(total);
    tokens.resize(static_cast<size_t>(total));
    weights.resize(static_cast<size_t>(total));
    for (int64_t i = 0; i < count; ++i) {
      const int64_t e = ids.expert(i);
      if (e < 0) continue;
      const auto at = static_cast<size_t>(place[static_cast<size_t>(e) + 1]++);
      tokens[at] = static_cast<int32_t>(i / top_k);
      weights[at] = values ? weight_at(values, dtype, i) : 1.0f;
    }
  }
};

}  // namespace ipex
