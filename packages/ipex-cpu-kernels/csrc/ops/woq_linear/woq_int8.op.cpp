// SPDX-License-Identifier: Apache-2.0
#include "woq_linear/woq_int8.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <vector>

#include "ipex/glue/gemm_schedule.h"
#include "ipex/glue/op_loops.h"
#include "linear/epilogue_check.h"
#include "runtime/scratch.h"
#include "woq_linear/woq_int8_kernel.h"

namespace ipex {
namespace {

constexpr const char* kOp = "woq_linear";

const auto range_kernels = IPEX_KERNELS(kOp, woq_int8_range);
const auto prepare_kernels = IPEX_KERNELS(kOp, woq_int8_prepare);
const auto few_kernels = IPEX_KERNELS(kOp, woq_int8_few);
const auto many_kernels = IPEX_KERNELS(kOp, woq_int8_many);

// Elements of K for which no int32 sum overflows.
constexpr int64_t kMaxChunk = 32768;

// Copies x in packed order of K.
template <class T>
Tensor gather(const Rows& x, ScalarType dtype, const int32_t* places) {
  const int64_t sizes[2] = {x.rows, x.columns};
  Tensor ordered = new_contiguous(sizes, 2, dtype);
  const auto* from = static_cast<const T*>(x.data);
  auto* to = static_cast<T*>(ordered.mutable_data_ptr());
  parallel_for(x.rows, row_grain<T>(x.columns), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r)
      for (int64_t i = 0; i < x.columns; ++i)
        to[r * x.columns + i] = from[r * x.stride + places[i]];
  });
  return ordered;
}

// Ranges that all rows share, from the ranges of the rows; NaN stays.
std::vector<float> join_ranges(const std::vector<float>& ends, int64_t rows, int64_t blocks) {
  std::vector<float> joined(static_cast<size_t>(2 * blocks), 0.0f);
  for (int64_t i = 0; i < rows * blocks; ++i) {
    const float low = ends[static_cast<size_t>(2 * i)], high = ends[static_cast<size_t>(2 * i + 1)];
    float& to_low = joined[static_cast<size_t>(2 * (i % blocks))];
    float& to_high = joined[static_cast<size_t>(2 * (i % blocks) + 1)];
    if (std::isnan(low) || std::isnan(high)) to_low = to_high = NAN;
    if (low < to_low) to_low = low;
    if (high > to_high) to_high = high;
  }
  return joined;
}

int64_t chunk_of(const PackedHeader& header, int64_t groups, bool by_chunk) {
  if (groups > 1) return header.group;
  return std::min<int64_t>(header.k, by_chunk ? 128 : kMaxChunk);
}

template <class T>
void run(WoqInt8Args& args, int64_t rows, bool shared, ScalarType dtype) {
  decltype(ipex_k_woq_int8_range_f32)* range = nullptr;
  decltype(ipex_k_woq_int8_prepare_f32)* prepare = nullptr;
  decltype(ipex_k_woq_int8_few_f32)* few = nullptr;
  decltype(ipex_k_woq_int8_many_f32)* many = nullptr;
  range_kernels.visit(dtype, [&]<class>(auto* kernel) { range = kernel; });
  prepare_kernels.visit(dtype, [&]<class>(auto* kernel) { prepare = kernel; });
  few_kernels.visit(dtype, [&]<class>(auto* kernel) { few = kernel; });
  many_kernels.visit(dtype, [&]<class>(auto* kernel) { many = kernel; });

  const bool tiles = uses_tiles(ScalarType::Char);
  args.few = rows <= (tiles ? 8 : kWoqInt8FewRows) && (args.symmetric || args.stored_sums);
  const int64_t numbers = woq_round_up(rows * args.chunks * 4, 64);
  char* memory = Scratch<Area::kWoqInt8Codes>::get(rows * args.codes_stride + 3 * numbers);
  IPEX_CHECK(memory, kOp, ": not enough memory for the activations");
  args.scales = reinterpret_cast<float*>(memory);
  args.zeros = reinterpret_cast<int32_t*>(memory + numbers);
  args.sums = reinterpret_cast<int32_t*>(memory + 2 * numbers);
  args.codes = reinterpret_cast<uint8_t*>(memory + 3 * numbers);

  const int64_t grain = row_grain<T>(args.k);
  std::vector<float> ends;
  if (shared) {
    const int64_t blocks = args.by_chunk ? args.chunks : 1;
    ends.resize(static_cast<size_t>(2 * rows * blocks));
    parallel_for(rows, grain,
                 [&](int64_t begin, int64_t end) { range(&args, begin, end, ends.data()); });
    ends = join_ranges(ends, rows, blocks);
    args.ends = ends.data();
  }
  parallel_for(rows, grain, [&](int64_t begin, int64_t end) { prepare(&args, begin, end); });

  const GemmShape shape{rows, args.at.strips / 2, args.k, args.epilogue.gated ? 2 : 1, tiles};
  if (args.few) {
    run_gemm(shape, kWoqInt8FewRows + 1, 1 << 20,
             [&](int64_t, int64_t, int64_t panel_begin, int64_t panel_end) {
               few(&args, rows, panel_begin, panel_end);
             });
    return;
  }
  // A block of rows shares panels: as many rows as fit beside them into the cache.
  constexpr int64_t kRows = 384;
  std::atomic<bool> no_memory{false};
  run_gemm(shape, kRows, 1 << 20,
           [&](int64_t row_begin, int64_t row_end, int64_t panel_begin, int64_t panel_end) {
             char* panels =
                 Scratch<Area::kWoqInt8Panels>::get(woq_int8_scratch(row_end - row_begin));
             if (panels)
               many(&args, panels, row_begin, row_end, panel_begin, panel_end);
             else
               no_memory = true;
           });
  IPEX_CHECK(!no_memory, kOp, ": not enough memory for the weights");
}

}  // namespace

Tensor woq_linear_int8(const Tensor& x, const Tensor& packed, const PackedHeader& header,
                       int64_t out_features, const Epilogue& epilogue,
                       const std::string& act_quant_mode) {
  WoqInt8Args args{};
  args.packed = static_cast<const char*>(packed.const_data_ptr());
  args.header = header;
  args.at = woq_layout(header);
  IPEX_CHECK(args.at.groups == 1 || header.group <= 2 * kMaxChunk, kOp,
             ": packed_weight must have groups of at most ", 2 * kMaxChunk,
             " features for lowp_mode int8, got ", header.group);
  Tensor y = new_like(x, out_features);
  Rows rows = as_rows(x);
  if (rows.rows == 0) return y;
  const ScalarType dtype = x.scalar_type();
  Tensor ordered;  // keeps the memory alive
  if (args.at.permutation) {
    const auto* places = reinterpret_cast<const int32_t*>(args.packed + args.at.permutation);
    ordered = dtype == ScalarType::Float ? gather<uint32_t>(rows, dtype, places)
                                         : gather<uint16_t>(rows, dtype, places);
    rows.data = ordered.const_data_ptr();
    rows.stride = rows.columns;
  }
  args.x = rows.data;
  args.x_stride = rows.stride;
  args.y = y.mutable_data_ptr();
  args.n = out_features;
  args.k = header.k;
  args.epilogue = epilogue;
  const auto has = [&](const char* part) { return act_quant_mode.find(part) != std::string::npos; };
  args.symmetric = has("_sym");
  args.by_chunk = has("ic_block");
  args.chunk = chunk_of(header, args.at.groups, args.by_chunk);
  args.chunks = (header.k + args.chunk - 1) / args.chunk;
  args.stored_sums = args.chunks == args.at.groups;
  // Whole lines, an odd number of them: rows whose distance is a multiple of 4 KiB would fight for
  // few places in L1.
  args.codes_stride = ((args.at.k_padded + 63) / 64 | 1) * 64;
  if (dtype == ScalarType::Float)
    run<uint32_t>(args, rows.rows, !has("per_batch"), dtype);
  else
    run<uint16_t>(args, rows.rows, !has("per_batch"), dtype);
  return y;
}

}  // namespace ipex
