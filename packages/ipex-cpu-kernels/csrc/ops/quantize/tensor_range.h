// SPDX-License-Identifier: Apache-2.0
// The scale of a whole tensor, found in parallel; for the glue of ops that quantize per tensor.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "ipex/glue/op_loops.h"
#include "quantize/quantize.h"

namespace ipex {

// Scales below have a reciprocal near infinity; quant.h has the same constant for kernels.
inline constexpr float kSmallestScale = 0x1p-120f;

struct TensorScale {
  float scale = 1.0f;
  int32_t zero = 0;  // of asymmetric codes
};

// `kernels` are handles of ipex_k_quantize_range_*. What the result is does not depend on the cut.
template <class Kernels>
TensorScale find_tensor_scale(const Kernels& kernels, const Rows& x, ScalarType dtype,
                              bool symmetric) {
  float low = 0.0f, high = 0.0f;
  kernels.visit(dtype, [&]<class T>(auto* kernel) {
    const T* from = static_cast<const T*>(x.data);
    const bool flat = x.rows <= 1 || x.stride == x.columns;
    const int64_t n = flat ? x.rows * x.columns : x.columns;
    constexpr int64_t kPiece = kPieceBytes / static_cast<int64_t>(sizeof(T));
    const int64_t piece = flat ? kPiece : x.stride;
    const int64_t count = flat ? (n + piece - 1) / piece : x.rows;
    std::vector<float> ends(static_cast<size_t>(2 * count));
    float* to = ends.data();
    parallel_for(count, flat ? 1 : row_grain<T>(std::max<int64_t>(x.columns, 1)),
                 [=](int64_t begin, int64_t end) {
                   for (int64_t i = begin; i < end; ++i)
                     kernel(from + i * piece, flat ? std::min(piece, n - i * piece) : n, symmetric,
                            to + 2 * i);
                 });
    for (int64_t i = 0; i < count; ++i) {
      // Once NaN, the ends stay NaN: a comparison with NaN is false.
      if (std::isnan(to[2 * i]) || std::isnan(to[2 * i + 1])) low = high = NAN;
      if (to[2 * i] < low) low = to[2 * i];
      if (to[2 * i + 1] > high) high = to[2 * i + 1];
    }
  });
  TensorScale found;
  found.scale = symmetric ? high / 127.0f : high / 255.0f - low / 255.0f;
  if (found.scale < kSmallestScale) found.scale = kSmallestScale;
  if (!symmetric && std::isfinite(low) && std::isfinite(high))
    found.zero = static_cast<int32_t>(std::nearbyint(-low * (1.0f / found.scale)));
  return found;
}

// Raises unless a given scale can be used.
inline void check_given_scale(const char* op, const char* name, float scale) {
  IPEX_CHECK(scale >= kSmallestScale && std::isfinite(scale), op, ": ", name,
             " must be finite and at least 2^-120, got ", scale);
}

}  // namespace ipex
