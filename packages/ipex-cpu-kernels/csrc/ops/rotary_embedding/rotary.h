// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "ipex/kernel.h"
#include "ipex/kv_view.h"

namespace ipex {

inline constexpr int64_t kMaxRotaryDim = 1024;

// A tensor [batch, positions, heads, size] whose heads are contiguous; strides in elements.
struct RotaryHeads {
  const void* data = nullptr;
  int64_t heads = 0;
  int64_t strides[3] = {};  // of batch, position and head
};

// A cache [blocks, heads, block_size, size] in which token t goes to position slots[t].
struct RotaryCache {
  void* data = nullptr;
  int64_t block_size = 1;
  KvStrides strides = {};
  float inverse_scale = 1.0f;  // on the elements of a quantized cache
};

struct RotaryTables {
  const void* cos = nullptr;  // [rows, rotary_dim / 2], or [rows, rotary_dim] if `full`
  const void* sin = nullptr;
  int64_t cos_stride = 0;  // of a row
  int64_t sin_stride = 0;
  bool is_f32 = false;  // else of the type of the heads
  bool full = false;
};

// All that one call does. Token t is position t % positions of batch t / positions; its row of the
// tables is rows[t % row_period], or t % row_period without `rows`.
struct RotaryWork {
  RotaryHeads from[2];  // query and key
  RotaryHeads to[2];    // the same memory for an operation in place
  RotaryTables tables;
  const int64_t* rows = nullptr;
  int64_t row_period = 1;
  int64_t positions = 1;
  int64_t head_dim = 0;
  int64_t rotary_dim = 0;
  bool half_split = true;  // else pairs of neighbors are rotated
  bool inverse = false;    // by the negative angle

  // For a call that fills a cache: the key goes there instead of to[1], and so does the value.
  RotaryCache key_cache;
  RotaryCache value_cache;
  KvType cache_type = KvType::kSame;
  RotaryHeads value;
  int64_t value_dim = 0;
  const int64_t* slots = nullptr;  // of each token; negative: this token is not stored
};

}  // namespace ipex

// Rotates the heads of the tokens [begin, end).
IPEX_KERNEL_API void ipex_k_rotary_f32(const ipex::RotaryWork* work, int64_t begin, int64_t end);
IPEX_KERNEL_API void ipex_k_rotary_bf16(const ipex::RotaryWork* work, int64_t begin, int64_t end);
IPEX_KERNEL_API void ipex_k_rotary_f16(const ipex::RotaryWork* work, int64_t begin, int64_t end);
