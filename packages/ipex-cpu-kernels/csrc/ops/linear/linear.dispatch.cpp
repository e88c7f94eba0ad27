// SPDX-License-Identifier: Apache-2.0
#include "linear.h"

#include "ipex/gemm.h"
#include "ipex/vec_math.h"

namespace ipex {
namespace {

// The bias of up to 64 columns as float, zero where there is none.
template <class T>
void load_bias(const LinearArgs& args, int64_t column, int64_t count, float* to) {
  for (int64_t i = 0; i < count; i += kLanes) {
    const int64_t at = column + i, n = count - i;
    f32v v = zero();
    if (args.bias && args.bias_is_f32) {
      const auto* bias = static_cast<const float*>(args.bias) + at;
      v = n >= kLanes ? load(bias) : load_n(bias, n);
    } else if (args.bias) {
      const auto* bias = static_cast<const T*>(args.bias) + at;
      v = n >= kLanes ? load(bias) : load_n(bias, n);
    }
    store(to + i, v);
  }
}

// Activation, residual and rounding of `count` sums of one row.
template <bool kResidual, class T, class F>
IPEX_INLINE void finish_row(const float* c, const float* bias, const T* residual, T* y,
                            int64_t count, const F& activate) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    f32v v = activate(load(c + i) + load(bias + i));
    if constexpr (kResidual) v = v + load(residual + i);
    store(y + i, v);
  }
  if (i < count) {
    f32v v = activate(load(c + i) + load(bias + i));
    if constexpr (kResidual) v = v + load_n(residual + i, count - i);
    store_n(y + i, v, count - i);
  }
}

// Bias, activation, residual and rounding for a block of C that lies in L1.
template <class T>
void finish(const LinearArgs& args, const float* c, int64_t ldc, const float* bias, int64_t row,
            int64_t rows, int64_t column, int64_t count) {
  constexpr bool kFast = kReducedPrecision<T>;
  T* y = static_cast<T*>(args.y) + row * args.n + column;
  const T* residual =
      args.residual ? static_cast<const T*>(args.residual) + row * args.residual_stride + column
                    : nullptr;
  const auto each = [&](const auto& activate) IPEX_LAMBDA {
    if (residual) {
      for (int64_t r = 0; r < rows; ++r)
        finish_row<true>(c + r * ldc, bias, residual + r * args.residual_stride, y + r * args.n,
                         count, activate);
    } else {
      for (int64_t r = 0; r < rows; ++r)
        finish_row<false>(c + r * ldc, bias, static_cast<const T*>(nullptr), y + r * args.n, count,
                          activate);
    }
  };
  switch (args.activation) {
    case Activation::kNone:
      return each([](f32v v) IPEX_LAMBDA { return v; });
    case Activation::kRelu:
      // The value last: max keeps the NaN of its second operand.
      return each([](f32v v) IPEX_LAMBDA { return max(zero(), v); });
    case Activation::kGelu:
      return each([](f32v v) IPEX_LAMBDA { return gelu<kFast>(v); });
    case Activation::kGeluTanh:
      return each([](f32v v) IPEX_LAMBDA { return gelu_tanh<kFast>(v); });
    case Activation::kSilu:
      return each([](f32v v) IPEX_LAMBDA { return silu<kFast>(v); });
  }
}

template <class T>
IPEX_INLINE void run(const LinearArgs& args, int64_t row_begin, int64_t row_end,
                     int64_t panel_begin, int64_t panel_end) {
  alignas(64) float c[kRowStep<T> * 2 * kPanel];
  alignas(64) float bias[2 * kPanel];
  constexpr int64_t ldc = 2 * kPanel;
  const T* x = static_cast<const T*>(args.x);
  const T* w = static_cast<const T*>(args.weight);
  const int64_t size = panel_size<T>(args.k);
  TileScope scope;
  for (int64_t p = panel_begin; p < panel_end; p += 2) {
    const T* p0 = w + p * size;
    const T* p1 = p + 1 < panel_end ? p0 + size : nullptr;
    const int64_t column = p * kPanel;
    const int64_t width = (p1 ? 2 : 1) * kPanel;
    const int64_t count = args.n - column < width ? args.n - column : width;
    load_bias<T>(args, column, count, bias);
    for (int64_t r = row_begin; r < row_end; r += kRowStep<T>) {
      const int64_t rows = row_end - r < kRowStep<T> ? row_end - r : kRowStep<T>;
      multiply(scope, x + r * args.x_stride, args.x_stride, rows, p0, p1, args.k, c, ldc, false);
      finish<T>(args, c, ldc, bias, r, rows, column, count);
    }
  }
}

}  // namespace
}  // namespace ipex

void ipex_k_linear_f32(const ipex::LinearArgs* args, int64_t row_begin, int64_t row_end,
                       int64_t panel_begin, int64_t panel_end) {
  ipex::run<float>(*args, row_begin, row_end, panel_begin, panel_end);
}

void ipex_k_linear_bf16(const ipex::LinearArgs* args, int64_t row_begin, int64_t row_end,
                        int64_t panel_begin, int64_t panel_end) {
  ipex::run<ipex::BFloat16>(*args, row_begin, row_end, panel_begin, panel_end);
}

void ipex_k_linear_f16(const ipex::LinearArgs* args, int64_t row_begin, int64_t row_end,
                       int64_t panel_begin, int64_t panel_end) {
  ipex::run<ipex::Half>(*args, row_begin, row_end, panel_begin, panel_end);
}
