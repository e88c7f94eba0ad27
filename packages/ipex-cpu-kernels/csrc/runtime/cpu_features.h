// SPDX-License-Identifier: Apache-2.0
// CPU features as a bit set. Levels are sets of features, not numbers: two of them need not be
// ordered.
#pragma once

#include <cstdint>
#include <string>

namespace ipex::cpu {

enum Feature : uint64_t {
  kAvx2 = 1u << 0,     // AVX2, FMA, F16C
  kAvxVnni = 1u << 1,  // AVX-VNNI (256 bit)
  kAvx512 = 1u << 2,   // AVX-512 F, BW, VL, DQ, CD
  kAvx512Vnni = 1u << 3,
  kAvx512Bf16 = 1u << 4,
  kAmx = 1u << 5,  // AMX-TILE, AMX-INT8, AMX-BF16
  kAvx512Fp16 = 1u << 6,
};

// Features this process may use: reported by the CPU, saved by the operating system and, for AMX,
// granted by it.
uint64_t usable_features();

// Why `feature` cannot be used: "" if it can, else "the CPU lacks ..." or "the operating system
// ...".
std::string why_unusable(Feature feature);

// Name of a feature as in /proc/cpuinfo ("avx512_bf16").
const char* feature_name(Feature feature);

}  // namespace ipex::cpu
