// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "ipex/kernel.h"

namespace ipex {

struct Int8InteractionArgs {
  const void* const* inputs;  // [count]: rows of dim numbers or codes, one per sample
  const int64_t* strides;     // [count]: between rows, in elements
  const float* scales;        // [count]
  void* out;                  // [batch][dim + count * (count - 1) / 2]
  int64_t count, dim;
  bool codes;      // inputs are int8
  bool to_codes;   // the result is uint8 or, is_signed, int8
  bool is_signed;  // and has this scale and zero point
  float out_scale;
  int32_t out_zero;
};

inline int64_t int8_interaction_stride(int64_t dim) { return ((dim + 63) / 64 | 1) * 64; }

// Elements of a vector as the product reads them, at least one step of it: without any there would
// be no sum to write.
inline int64_t int8_interaction_depth(int64_t dim) { return dim > 0 ? (dim + 3) / 4 * 4 : 4; }

// Bytes of working memory of one thread: codes, panels, sums of the rows, and a row of the result.
inline int64_t int8_interaction_scratch(int64_t count, int64_t dim) {
  const int64_t columns = (count + 31) / 32 * 32, width = dim + count * (count - 1) / 2;
  return count * int8_interaction_stride(dim) + columns * int8_interaction_depth(dim) +
         4 * columns + 4 * ((width + 15) / 16 * 16);
}

}  // namespace ipex

// Samples [begin, end); the type is the one of float inputs and results. `scratch` is aligned to 64
// bytes.
#define IPEX_DECLARE_INT8_INTERACTION(suffix)                                                  \
  IPEX_KERNEL_API void ipex_k_int8_interaction_##suffix(const ipex::Int8InteractionArgs* args, \
                                                        int64_t begin, int64_t end, char* scratch)
IPEX_DECLARE_INT8_INTERACTION(f32);
IPEX_DECLARE_INT8_INTERACTION(bf16);
IPEX_DECLARE_INT8_INTERACTION(f16);
#undef IPEX_DECLARE_INT8_INTERACTION
