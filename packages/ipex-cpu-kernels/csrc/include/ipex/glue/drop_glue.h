// SPDX-License-Identifier: Apache-2.0
// The arguments p, seed and stream of ops with dropout.
#pragma once

#include "ipex/drop.h"
#include "ipex/glue/dispatch.h"

namespace ipex {

inline Drop read_drop(const char* op, double p, const Tensor& seed, int64_t stream) {
  IPEX_CHECK(p >= 0.0 && p < 1.0, op, ": p must be in [0, 1), got ", p);
  IPEX_CHECK(seed.is_cpu() && seed.scalar_type() == ScalarType::Long, op,
             ": seed must have dtype int64, got ", dtype_name(seed.scalar_type()));
  IPEX_CHECK(seed.numel() == 1, op, ": seed must have one element, got ", seed.numel());
  IPEX_CHECK(stream >= 0 && stream < (int64_t{1} << 31), op, ": stream must be in [0, 2^31), got ",
             stream);
  const uint64_t value = static_cast<uint64_t>(*static_cast<const int64_t*>(seed.const_data_ptr()));
  uint64_t z = value + 0x9E3779B97F4A7C15u * (static_cast<uint64_t>(stream) + 1);
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  z ^= z >> 31;
  return {z, static_cast<uint32_t>(p * 4294967296.0), static_cast<float>(1.0 / (1.0 - p))};
}

}  // namespace ipex
