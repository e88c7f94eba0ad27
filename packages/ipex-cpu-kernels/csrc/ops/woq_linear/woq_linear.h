// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "ipex/epilogue_args.h"
#include "ipex/kernel.h"
#include "woq_linear/woq_format.h"

namespace ipex {

// What activations are prepared as, and with it the kernel.
enum class WoqCompute : int32_t {
  kFloat,     // float products
  kHalf,      // activations rounded to Half; panels in Half
  kBFloat16,  // activations rounded to BFloat16; panels in BFloat16
};

// How the prepared activations of few rows are stored.
enum class WoqOperand : int32_t {
  kFloat,     // [rows][k_padded] float
  kBFloat16,  // [rows][k_padded] BFloat16
  kInt16,     // [rows][k_padded] int16 with a scale per chunk
  kPlanes,    // the same as two bytes, in steps: see woq_few_planes.h
};

// y = epilogue(x * W)
struct WoqLinearArgs {
  const char* packed;  // the whole tensor
  const void* x;       // [rows, k] of the dtype of y, rows x_stride elements apart
  void* y;             // [rows, n], contiguous
  int64_t x_stride;
  int64_t n, k;  // columns of y; of x
  PackedHeader header;
  WoqLayout at;
  Epilogue epilogue;
  WoqCompute compute;
  // Filled in by the prepare kernels.
  void* operand;  // few rows: see WoqOperand; many rows: [rows][k] of the type of `compute`
  int64_t operand_stride;  // elements between two rows
  // kBFloat16: elements from 32 of K to the next 32 of a row. 32, or more where the rows lie in the
  // order of tiles. kPlanes: bytes of a step.
  int64_t operand_step = 32;
  float* sums;          // few rows: [rows][groups] sums of the activations
  float* chunk_scales;  // kInt16, kPlanes: [rows][chunks]
  float* chunk_sums;    // the same: [rows][chunks] sums of the integers
  int64_t chunk;        // the same: elements that share a scale
  int64_t chunks;
  WoqOperand kind;
};

// Elements of K in int16 that share a scale: a group, or this many where it is longer. Sums of
// products of 8-bit codes fit int32.
inline constexpr int64_t kWoqChunk = 256;

// What the largest number of nf4 is as an integer, for kInt16.
inline constexpr int64_t kWoqNf4Most = 2047;

// What the largest activation of a chunk becomes in kInt16: sums of products fit int32.
inline int64_t woq_int16_most(uint32_t format, int64_t chunk) {
  const int64_t most = format == kFormatNf4 ? INT32_MAX / (kWoqNf4Most * chunk) : INT16_MAX;
  return most < INT16_MAX ? most : INT16_MAX;
}

// What the integers of a format are multiples of, beside the scales.
inline float woq_int16_unit(uint32_t format) {
  if (format == kFormatNf4) return 1.0f / static_cast<float>(kWoqNf4Most);
  return format == kFormatFp4 ? 0.5f : 1.0f;
}

// Rows up to which weights are decoded as they are read; more rows share decoded panels.
inline constexpr int64_t kWoqFewRows = 32;

// Elements of K in a step of WoqOperand::kPlanes.
inline constexpr int64_t kWoqPlaneStep = 64;

// Whether few rows can use AMX tiles: groups are whole tiles along K. A single row is faster
// without.
inline bool woq_takes_tiles(const WoqLinearArgs& args, int64_t rows) {
  const bool planes = args.kind == WoqOperand::kPlanes && args.header.format != kFormatFp4;
  const int64_t step = planes ? kWoqPlaneStep : 32;
  return (planes || args.kind == WoqOperand::kBFloat16) && rows > 1 &&
         args.at.k_padded % step == 0 && (args.at.groups == 1 || args.header.group % step == 0);
}

// Takes bfloat16 in place of bytes where tiles take only that: bytes need longer groups, and
// nibbles as bytes gain with a few rows only.
inline void woq_choose_operand(WoqLinearArgs& args, int64_t rows, bool tiles) {
  if (!tiles || args.kind != WoqOperand::kPlanes || args.compute != WoqCompute::kBFloat16) return;
  const bool nibbles = args.header.format != kFormatInt8;
  if (rows > 1 && (!woq_takes_tiles(args, rows) || (nibbles && rows > 4)))
    args.kind = WoqOperand::kBFloat16;
}

// Lays out the activations of `few` from args.operand on. Returns the bytes they take.
inline int64_t woq_few_layout(WoqLinearArgs& args, int64_t rows, bool tiles) {
  args.operand_stride = args.at.k_padded;
  if (args.kind == WoqOperand::kPlanes) {
    args.operand_stride = kWoqPlaneStep;
    args.operand_step = 2 * rows * kWoqPlaneStep;
    return woq_round_up(args.at.k_padded, kWoqPlaneStep) / kWoqPlaneStep * args.operand_step;
  }
  const int64_t element = args.kind == WoqOperand::kFloat ? 4 : 2;
  // An odd number of lines: rows whose distance is a multiple of 4 KiB fight for few places in L1.
  if (args.kind != WoqOperand::kBFloat16)
    args.operand_stride = (woq_round_up(args.at.k_padded * element, 64) / 64 | 1) * 64 / element;
  if (args.kind == WoqOperand::kBFloat16 && tiles && woq_takes_tiles(args, rows)) {
    // In the order of tiles: rows whose distance is a multiple of 4 KiB fight for few places in L1.
    args.operand_stride = 32;
    args.operand_step = rows * 32;
  }
  const int64_t row = args.kind == WoqOperand::kBFloat16 ? args.at.k_padded : args.operand_stride;
  return woq_round_up(rows * row * element, 64);
}

// Elements of K that are decoded at a time for many rows: two panels of them stay in L2.
inline constexpr int64_t kWoqDepth = 2048;

// Bytes of scratch for each thread of the kernel for many rows, for up to `rows` rows.
inline int64_t woq_panel_scratch(int64_t rows) {
  return 2 * kPackedPanel * (kWoqDepth * 4 + rows * 4);
}

}  // namespace ipex

// What `few` and `prepare` use at this level for a weight and a compute type: a WoqOperand.
IPEX_KERNEL_API int32_t ipex_k_woq_operand(const ipex::PackedHeader* header, int32_t compute);

// Rows up to which `few` is faster than `many` with this operand, for products without AMX tiles.
IPEX_KERNEL_API int64_t ipex_k_woq_few_limit(int32_t operand);

// prepare: converts rows of x for `few` (or for `many` if `panels`) to args->operand and friends;
// returns 1 if a number is not finite, which only `many` handles exactly.
// few: the rows of the columns in the panels; all prepared ones but where the operand is kInt16 and
// woq_few_limit says that there may be more than kWoqFewRows.
// many: any number of rows; scratch as woq_panel_scratch says.
// dequantize: writes the float weights of a panel in the dense layout, K rounded up to 8.
#define IPEX_DECLARE_WOQ(suffix)                                                                   \
  IPEX_KERNEL_API int32_t ipex_k_woq_prepare_##suffix(                                             \
      const ipex::WoqLinearArgs* args, bool panels, int64_t row_begin, int64_t row_end);           \
  IPEX_KERNEL_API void ipex_k_woq_few_##suffix(const ipex::WoqLinearArgs* args, int64_t row_begin, \
                                               int64_t row_end, int64_t panel_begin,               \
                                               int64_t panel_end);                                 \
  IPEX_KERNEL_API void ipex_k_woq_many_##suffix(const ipex::WoqLinearArgs* args, char* scratch,    \
                                                int64_t row_begin, int64_t row_end,                \
                                                int64_t panel_begin, int64_t panel_end);           \
  IPEX_KERNEL_API void ipex_k_woq_dequantize_##suffix(const char* packed, int64_t panel, void* to)
IPEX_DECLARE_WOQ(f32);
IPEX_DECLARE_WOQ(bf16);
IPEX_DECLARE_WOQ(f16);
#undef IPEX_DECLARE_WOQ
