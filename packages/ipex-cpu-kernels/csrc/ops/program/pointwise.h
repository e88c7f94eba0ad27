// SPDX-License-Identifier: Apache-2.0
// A chain of element-wise functions, evaluated in blocks that stay in the L1 cache.
#pragma once

#include <cstdint>

#include "ipex/kernel.h"

namespace ipex {

// The functions and their numbers of operands. The order is as in POINTWISE of
// ipex_core.program.builtins.
// clang-format off: it would need one line for each
#define IPEX_POINTWISE_FUNCTIONS(F) \
  F(add, 2) F(sub, 2) F(mul, 2) F(div, 2) F(neg, 1) F(abs, 1) F(exp, 1) F(log, 1) F(sqrt, 1) \
  F(rsqrt, 1) F(reciprocal, 1) F(tanh, 1) F(sigmoid, 1) F(erf, 1) F(relu, 1) F(gelu, 1) \
  F(gelu_tanh, 1) F(silu, 1) F(sin, 1) F(cos, 1) F(floor, 1) F(ceil, 1) F(round, 1) \
  F(trunc, 1) F(maximum, 2) F(minimum, 2) F(pow, 2) F(eq, 2) F(ne, 2) F(lt, 2) F(le, 2) \
  F(gt, 2) F(ge, 2) F(logical_and, 2) F(logical_or, 2) F(logical_not, 1) F(where, 3) \
  F(round_bfloat16, 1) F(round_float16, 1) F(log1p, 1) F(expm1, 1)
// clang-format on

enum class PointwiseCode : int32_t {
#define IPEX_POINTWISE_CODE(name, operands) k_##name,
  IPEX_POINTWISE_FUNCTIONS(IPEX_POINTWISE_CODE)
#undef IPEX_POINTWISE_CODE
};

enum class PointwiseType : int32_t { kFloat, kBFloat16, kHalf, kBool };

// How an input lies beside the result.
enum class PointwiseLayout : int32_t {
  kScalar,  // one element
  kSame,    // element i of the result meets element i
  kRow,     // every row of the result meets the same `columns` elements
  kStrided,
};

struct PointwiseInput {
  const void* data;
  PointwiseType type;
  PointwiseLayout layout;
  const int64_t* strides;  // in elements, of the dimensions of the result
};

// Operands and results are places: of an input, a constant or a buffer, in this order.
struct PointwiseStep {
  PointwiseCode code;
  int32_t operands[3];
  int32_t to;
};

struct PointwiseCall {
  static constexpr int64_t kBlock = 1024;  // elements: 4 KiB as float
  static constexpr int64_t kMaxDim = 16;
  static constexpr int64_t kMaxPlaces = 256;

  const PointwiseInput* inputs;
  const float* constants;
  const PointwiseStep* steps;
  int64_t n_inputs, n_constants, n_steps;
  int64_t places;         // number of places
  int32_t result;         // place of the result
  PointwiseType type;     // of the result
  int64_t dim;            // at least 1
  const int64_t* sizes;   // of the result in the order of its memory
  int64_t rows, columns;  // columns: the last size
  // A block is `group` whole rows, or else the `pieces`-th part of one.
  int64_t group, pieces;
};

}  // namespace ipex

// Computes the blocks [begin, end) of the result y; scratch: places * kBlock floats, aligned.
IPEX_KERNEL_API void ipex_k_pointwise(const ipex::PointwiseCall* call, void* y, float* scratch,
                                      int64_t begin, int64_t end);
