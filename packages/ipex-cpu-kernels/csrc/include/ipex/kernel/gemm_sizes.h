// SPDX-License-Identifier: Apache-2.0
// Sizes of the blocks in which AMX tiles multiply, and of the memory of a block of any product;
// known to kernels and to the glue that cuts the tasks and provides the memory. See gemm_tiles.h
// for the reasons.
#pragma once

#include <cstdint>

namespace ipex {

inline constexpr int64_t kTileRowsMost = 256;
inline constexpr int64_t kTilePanelsMost = 32;
inline constexpr int64_t kTileDepth = 512;     // elements along K in a piece, at most
inline constexpr int64_t kTileStep = 32 * 32;  // elements of x (and of W) that a step multiplies
inline constexpr int64_t kTileLdc = 64;        // C lies as [32][64], for two panels

inline constexpr int64_t kTileScratchX = kTileRowsMost * kTileDepth * 2;
inline constexpr int64_t kTileScratchC = kTileRowsMost * kTilePanelsMost * 32 * 4;
inline constexpr int64_t kGemmScratch = kTileScratchX + kTileScratchC;

// Rows from which 16-bit numbers are converted before they are multiplied as floats.
inline constexpr int64_t kWideRows = 12;

}  // namespace ipex
