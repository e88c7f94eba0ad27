// SPDX-License-Identifier: Apache-2.0
#include "linear.h"

#include "ipex/gemm.h"
#include "ipex/vec_math.h"

namespace ipex {
namespace {

template <class T, class F>
IPEX_INLINE void finish_row(const LinearArgs& args, const float* c, int64_t row, int64_t column,
                            int64_t count, const F& activate) {
  const auto* bias = static_cast<const T*>(args.bias);
  const auto* bias_f32 = static_cast<const float*>(args.bias);
  const auto* residual = static_cast<const T*>(args.residual);
  T* y = static_cast<T*>(args.y) + row * args.n + column;
  for (int64_t i = 0; i < count; i += kLanes) {
    const int64_t n = count - i;
    const bool full = n >= kLanes;
    f32v v = load(c + i);
    if (bias) {
      const int64_t at = column + i;
      if (args.bias_is_f32)
        v = v + (full ? load(bias_f32 + at) : load_n(bias_f32 + at, n));
      else
        v = v + (full ? load(bias + at) : load_n(bias + at, n));
    }
    v = activate(v);
    if (residual) {
      const T* r = residual + row * args.residual_stride + column + i;
      v = v + (full ? load(r) : load_n(r, n));
    }
    if (full)
      store(y + i, v);
    else
      store_n(y + i, v, n);
  }
}

// Bias, activation, residual and rounding for a block of C that lies in L1.
template <class T>
void finish(const LinearArgs& args, const float* c, int64_t ldc, int64_t row, int64_t rows,
            int64_t column, int64_t count) {
  constexpr bool kFast = kReducedPrecision<T>;
  const auto each = [&](const auto& activate) IPEX_LAMBDA {
    for (int64_t r = 0; r < rows; ++r)
      finish_row<T>(args, c + r * ldc, row + r, column, count, activate);
  };
  switch (args.activation) {
    case Activation::kNone:
      return each([](f32v v) IPEX_LAMBDA { return v; });
    // The value last: max keeps the NaN of its second operand.
    case Activation::kRelu:
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
  alignas(64) float c[kRowStep * 2 * kPanel];
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
    for (int64_t r = row_begin; r < row_end; r += kRowStep) {
      const int64_t rows = row_end - r < kRowStep ? row_end - r : kRowStep;
      multiply(scope, x + r * args.x_stride, args.x_stride, rows, p0, p1, args.k, c, ldc, false);
      finish<T>(args, c, ldc, r, rows, column, count);
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
