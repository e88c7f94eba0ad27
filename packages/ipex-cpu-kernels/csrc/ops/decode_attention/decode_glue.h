// SPDX-License-Identifier: Apache-2.0
// Glue shared by the decode ops: optional arguments, the cut into items, the two parallel loops.
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <vector>

#include "decode_attention/decode.h"
#include "ipex/glue/kv_glue.h"
#include "runtime/scratch.h"

namespace ipex {

struct DecodeKernels {
  Kernels<decltype(ipex_k_decode_attention_f32), decltype(ipex_k_decode_attention_bf16),
          decltype(ipex_k_decode_attention_f16)>
      run;
  Kernels<decltype(ipex_k_decode_combine_f32), decltype(ipex_k_decode_combine_bf16),
          decltype(ipex_k_decode_combine_f16)>
      combine;
};
#define IPEX_DECODE_KERNELS(op) \
  ::ipex::DecodeKernels { IPEX_KERNELS(op, decode_attention), IPEX_KERNELS(op, decode_combine) }

struct DecodeOptions {
  const OptionalTensor& mask;
  const OptionalTensor& alibi;
  const OptionalTensor& sinks;
  const OptionalTensor& key_scales;
  const OptionalTensor& value_scales;
  double scale, softcap;
  int64_t window;
};

inline void check_head_vector(const char* op, const char* name, const OptionalTensor& value,
                              int64_t heads) {
  if (!value) return;
  IPEX_CHECK(value->is_cpu(), op, ": ", name, " must be on the device of query = cpu");
  IPEX_CHECK(value->scalar_type() == ScalarType::Float, op, ": ", name,
             " must have dtype float32, got ", dtype_name(value->scalar_type()));
  IPEX_CHECK(value->dim() == 1 && value->size(0) == heads, op, ": ", name,
             " must be 1-D of size heads = ", heads, ", got ", shape_text(*value));
}

inline void check_head_groups(const char* op, int64_t heads, int64_t kv_heads) {
  IPEX_CHECK(kv_heads > 0 && heads % kv_heads == 0, op,
             ": key_cache must have a number of heads that divides the ", heads,
             " heads of query, got ", kv_heads);
}

inline void check_head_size(const char* op, int64_t size) {
  IPEX_CHECK(size > 0 && size <= 1024, op, ": query must have a head size between 1 and 1024, got ",
             size);
}

inline void check_window(const char* op, int64_t window) {
  IPEX_CHECK(window == -1 || window > 0, op, ": window_size must be -1 or positive, got ", window);
}

// A mask over the scores [sequences, heads, queries, keys].
inline void check_decode_mask(const char* op, const OptionalTensor& mask, const Tensor& query,
                              const int64_t (&scores)[4]) {
  if (!mask) return;
  IPEX_CHECK(mask->is_cpu(), op, ": mask must be on the device of query = cpu");
  const ScalarType dtype = mask->scalar_type();
  IPEX_CHECK(
      dtype == ScalarType::Bool || dtype == ScalarType::Float || dtype == query.scalar_type(), op,
      ": mask must have dtype bool, float32 or the dtype of query = ",
      dtype_name(query.scalar_type()), ", got ", dtype_name(dtype));
  bool fits = mask->dim() <= 4;
  for (int64_t i = 0; fits && i < mask->dim(); ++i) {
    const int64_t size = mask->size(mask->dim() - 1 - i);
    fits = size == 1 || size == scores[3 - i];
  }
  IPEX_CHECK(fits, op, ": mask must be broadcastable to the scores of shape [", scores[0], ", ",
             scores[1], ", ", scores[2], ", ", scores[3], "], got ", shape_text(*mask));
}

// Distance along dimension `from_last` (0: last) of a mask, 0 where it is broadcast.
inline int64_t decode_mask_stride(const Tensor& mask, int64_t from_last) {
  const int64_t i = mask.dim() - 1 - from_last;
  return i < 0 || mask.size(i) == 1 ? 0 : mask.stride(i);
}

// Keeps alive what the arguments point to.
struct DecodeMemory {
  OptionalTensor mask, alibi, sinks;
  std::vector<DecodeItem> items;
  std::vector<int32_t> first;
};

inline void set_options(DecodeArgs& args, DecodeMemory& memory, const DecodeOptions& options,
                        ScalarType dtype) {
  args.scale = static_cast<float>(
      options.scale != 0.0 ? options.scale : 1.0 / std::sqrt(static_cast<double>(args.size)));
  args.softcap = options.softcap > 0.0 ? static_cast<float>(options.softcap) : 0.0f;
  args.window = options.window > 0 ? options.window : 0;
  if (options.alibi) {
    memory.alibi = as_contiguous(*options.alibi);
    args.alibi = static_cast<const float*>(memory.alibi->const_data_ptr());
  }
  if (options.sinks) {
    memory.sinks = as_contiguous(*options.sinks);
    args.sinks = static_cast<const float*>(memory.sinks->const_data_ptr());
  }
  if (!options.mask) return;
  const int64_t step = decode_mask_stride(*options.mask, 0);
  memory.mask = step == 0 || step == 1 ? *options.mask : torch::stable::contiguous(*options.mask);
  const Tensor& mask = *memory.mask;
  args.mask = mask.const_data_ptr();
  args.mask_kind = mask.scalar_type() == ScalarType::Bool    ? DecodeMask::kBool
                   : mask.scalar_type() == ScalarType::Float ? DecodeMask::kFloat
                                                             : DecodeMask::kSame;
  if (dtype == ScalarType::Float && args.mask_kind == DecodeMask::kSame)
    args.mask_kind = DecodeMask::kFloat;
  args.mask_strides = {decode_mask_stride(mask, 3), decode_mask_stride(mask, 2),
                       decode_mask_stride(mask, 1)};
  args.mask_key_stride = decode_mask_stride(mask, 0);
}

// How many key-value heads an item reads: where the heads of a position lie next to each other,
// enough of them for a piece of memory that is worth a jump.
inline int64_t heads_per_item(const DecodeArgs& args, int64_t element_size) {
  if (args.kv_heads == 1 || args.kv.key.strides.head >= args.kv.key.strides.row) return 1;
  int64_t heads = 1;
  for (int64_t h = 2; h <= args.kv_heads; ++h)
    if (args.kv_heads % h == 0 && h * args.size * element_size <= 1024) heads = h;
  return heads;
}

// Cuts the keys of each unit and head into items. The cut depends on shapes and lengths only, never
// on the number of threads: so the results do not either.
inline void make_items(DecodeArgs& args, DecodeMemory& memory, int64_t units) {
  const int64_t head_steps = args.kv_heads / args.item_heads;
  const auto range = [&](int64_t unit) {
    const int64_t last = args.lengths[unit * args.beams];
    int64_t first = 0;
    if (args.window > 0) first = std::max<int64_t>(0, last - args.queries + 1 - args.window);
    return std::pair<int64_t, int64_t>{first / kDecodeBlock * kDecodeBlock, last};
  };
  int64_t keys = 0;
  for (int64_t u = 0; u < units; ++u) {
    const auto [first, last] = range(u);
    keys += (last - first) * args.kv_heads;
  }
  // Some 64 items of all: enough for many threads, few enough that combining costs nothing.
  const int64_t split = std::clamp<int64_t>(decode_round_up(keys / 64, kDecodeBlock), 256, 4096);
  for (int64_t u = 0; u < units; ++u) {
    const auto [first, last] = range(u);
    const int64_t parts = std::max<int64_t>(1, (last - first + split - 1) / split);
    const int64_t step =
        decode_round_up(std::max<int64_t>(1, (last - first + parts - 1) / parts), kDecodeBlock);
    for (int64_t h = 0; h < head_steps; ++h) {
      memory.first.push_back(static_cast<int32_t>(memory.items.size()));
      for (int64_t p = 0; p < parts; ++p) {
        const int64_t begin = std::min(last, first + p * step);
        memory.items.push_back({static_cast<int32_t>(u), static_cast<int32_t>(h * args.item_heads),
                                begin, std::min(last, begin + step), static_cast<int32_t>(p),
                                static_cast<int32_t>(parts)});
      }
    }
  }
  args.items = memory.items.data();
}

// Runs a call whose arguments are complete but for the items.
inline void run_decode(const char* op, const DecodeKernels& kernels, DecodeArgs& args,
                       DecodeMemory& memory, int64_t sequences, ScalarType dtype,
                       int64_t element_size) {
  const int64_t units = sequences / args.beams;
  args.item_heads = heads_per_item(args, element_size);
  make_items(args, memory, units);
  const auto count = static_cast<int64_t>(memory.items.size());
  const auto heads = static_cast<int64_t>(memory.first.size());
  if (count == 0) return;
  if (count > heads) {
    const int64_t rows = decode_head_rows(args) * args.item_heads;
    args.partial = reinterpret_cast<float*>(
        Scratch<Area::kDecodePartial>::get(count * rows * decode_partial_stride(args) * 4));
    IPEX_CHECK(args.partial, op, ": not enough memory for the partial results");
  }
  int64_t keys = 0;
  for (const DecodeItem& item : memory.items) keys += item.last - item.first;
  // A task should read some 64 KiB, or a region costs more than it brings.
  const int64_t bytes = 2 * keys * args.item_heads * args.size * element_size;
  const int64_t grain = std::max<int64_t>(1, count * (64 << 10) / std::max<int64_t>(1, bytes));
  const int64_t scratch = decode_scratch_bytes(args);
  std::atomic<bool> no_memory{false};
  const auto each = [&](int64_t n, int64_t step, const auto& call) {
    parallel_for(n, step, [&](int64_t begin, int64_t end) {
      if (char* room = Scratch<Area::kDecodeTask>::get(scratch))
        call(begin, end, room);
      else
        no_memory = true;
    });
    IPEX_CHECK(!no_memory, op, ": not enough memory for the scores of a block of keys");
  };
  kernels.run.visit(dtype, [&]<class T>(auto* kernel) {
    each(count, grain,
         [&](int64_t begin, int64_t end, char* room) { kernel(&args, begin, end, room); });
  });
  if (count == heads) return;
  kernels.combine.visit(dtype, [&]<class T>(auto* kernel) {
    each(heads, std::max<int64_t>(1, heads * 16 / count),
         [&](int64_t begin, int64_t end, char* room) {
           kernel(&args, memory.first.data(), begin, end, room);
         });
  });
}

}  // namespace ipex
