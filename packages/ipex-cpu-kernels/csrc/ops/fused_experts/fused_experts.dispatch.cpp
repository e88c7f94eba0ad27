// SPDX-License-Identifier: Apache-2.0
#include "fused_experts.h"

#include "ipex/kernel/gemm.h"
#include "ipex/kernel/vec_math.h"

namespace ipex {
namespace {

// The bias of up to 32 columns as float, zero without a bias.
template <class T>
void load_bias(const void* bias, bool is_f32, int64_t column, int64_t count, float* to) {
  for (int64_t i = 0; i < kPanel; i += kLanes) {
    const int64_t n = count - i < kLanes ? count - i : kLanes;
    f32v v = zero();
    if (bias && n > 0)
      v = is_f32 ? load_n(static_cast<const float*>(bias) + column + i, n)
                 : load_n(static_cast<const T*>(bias) + column + i, n);
    store(to + i, v);
  }
}

// C[rows][64] = A[rows][k] * panels. Sums of float are made in blocks along k: the rounding error
// of one long sum grows with its length.
template <class T>
IPEX_INLINE void product(TileScope& scope, const T* a, int64_t lda, int64_t rows, const T* p0,
                         const T* p1, int64_t k, float* c) {
  constexpr int64_t ldc = 2 * kPanel;
  if constexpr (kReducedPrecision<T>) {
    multiply(scope, a, lda, rows, p0, p1, k, c, ldc, false);
  } else {
    alignas(64) float part[kRowStep<T> * ldc];
    multiply(scope, a, lda, rows, p0, p1, k < kDepth ? k : kDepth, c, ldc, false);
    for (int64_t d = kDepth; d < k; d += kDepth) {
      const int64_t depth = k - d < kDepth ? k - d : kDepth;
      const T* q1 = p1 ? p1 + d * kPanel : nullptr;
      multiply(scope, a + d, lda, rows, p0 + d * kPanel, q1, depth, part, ldc, false);
      const int64_t width = p1 ? ldc : kPanel;
      for (int64_t r = 0; r < rows; ++r)
        for (int64_t i = 0; i < width; i += kLanes)
          store(c + r * ldc + i, load(c + r * ldc + i) + load(part + r * ldc + i));
    }
  }
}

// The gate's activation times the other half, for 32 features of each row of c.
template <class T>
IPEX_INLINE void finish_pair(const ExpertsArgs& args, const float* c, int64_t ldc, int64_t rows,
                             const float* gate_bias, const float* up_bias, T* to, int64_t stride) {
  constexpr bool kFast = kReducedPrecision<T>;
  const auto each = [&](const auto& f) IPEX_LAMBDA {
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t i = 0; i < kPanel; i += kLanes)
        store(to + r * stride + i, f(load(c + r * ldc + i) + load(gate_bias + i),
                                     load(c + r * ldc + kPanel + i) + load(up_bias + i)));
  };
  switch (args.activation) {
    case ExpertActivation::kSilu:
      return each([](f32v g, f32v u) IPEX_LAMBDA { return silu<kFast>(g) * u; });
    case ExpertActivation::kGelu:
      return each([](f32v g, f32v u) IPEX_LAMBDA { return gelu<kFast>(g) * u; });
    case ExpertActivation::kGeluTanh:
      return each([](f32v g, f32v u) IPEX_LAMBDA { return gelu_tanh<kFast>(g) * u; });
    case ExpertActivation::kSwigluOai: {
      const f32v alpha = set1(args.alpha), limit = set1(args.limit), low = set1(-args.limit);
      return each([&](f32v g, f32v u) IPEX_LAMBDA {
        // The value last: min and max keep the NaN of their second operand.
        g = min(limit, g);
        u = max(low, min(limit, u));
        const f32v s = kFast ? sigmoid_fast(g * alpha) : sigmoid(g * alpha);
        return (u + set1(1.0f)) * (g * s);
      });
    }
    case ExpertActivation::kRelu2:
      return;  // has no pairs
  }
}

IPEX_INLINE f32v relu2(f32v x) {
  x = max(zero(), x);
  return x * x;
}

// Up to two panels of features without gates.
template <class T>
IPEX_INLINE void up_ungated(const ExpertsArgs& args, const ExpertJob& job, const T* a, int64_t lda,
                            int64_t row, int64_t rows, int64_t begin, int64_t end) {
  alignas(64) float c[kRowStep<T> * 2 * kPanel];
  alignas(64) float bias[2 * kPanel];
  constexpr int64_t ldc = 2 * kPanel;
  const int64_t size = panel_size<T>(args.hidden);
  TileScope scope;
  for (int64_t p = begin; p < end; p += 2) {
    const bool two = p + 1 < end;
    const T* panel = static_cast<const T*>(job.w13) + p * size;
    const int64_t column = p * kPanel, width = two ? 2 * kPanel : kPanel;
    for (int64_t i = 0; i < width; i += kPanel) {
      const int64_t left = job.inner - column - i;
      load_bias<T>(job.w13_bias, args.w13_bias_is_f32, column + i, left < kPanel ? left : kPanel,
                   bias + i);
    }
    for (int64_t r = 0; r < rows; r += kRowStep<T>) {
      const int64_t n = rows - r < kRowStep<T> ? rows - r : kRowStep<T>;
      product(scope, a + r * lda, lda, n, panel, two ? panel + size : nullptr, args.hidden, c);
      T* to = static_cast<T*>(job.middle) + (row + r) * job.middle_stride + column;
      for (int64_t i = 0; i < n; ++i)
        for (int64_t k = 0; k < width; k += kLanes)
          store(to + i * job.middle_stride + k, relu2(load(c + i * ldc + k) + load(bias + k)));
    }
  }
}

template <class T>
void square(T* y, int64_t rows, int64_t columns, int64_t stride) {
  for (int64_t r = 0; r < rows; ++r, y += stride)
    for (int64_t i = 0; i < columns; i += kLanes) {
      const int64_t n = columns - i < kLanes ? columns - i : kLanes;
      const f32v v = load_n(y + i, n);
      store_n(y + i, v * v, n);
    }
}

template <class T>
IPEX_INLINE void up(const ExpertsArgs& args, const ExpertJob& job, const T* a, int64_t lda,
                    int64_t row, int64_t rows, int64_t pair_begin, int64_t pair_end) {
  if (!is_gated(args.activation))
    return up_ungated(args, job, a, lda, row, rows, pair_begin, pair_end);
  alignas(64) float c[kRowStep<T> * 2 * kPanel];
  alignas(64) float gate_bias[kPanel], up_bias[kPanel];
  constexpr int64_t ldc = 2 * kPanel;
  const int64_t size = panel_size<T>(args.hidden);
  TileScope scope;
  for (int64_t p = pair_begin; p < pair_end; ++p) {
    const T* panel = static_cast<const T*>(job.w13) + 2 * p * size;
    const int64_t column = p * kPanel;
    const int64_t count = job.inner - column < kPanel ? job.inner - column : kPanel;
    load_bias<T>(job.w13_bias, args.w13_bias_is_f32, column, count, gate_bias);
    load_bias<T>(job.w13_bias, args.w13_bias_is_f32, job.inner + column, count, up_bias);
    for (int64_t r = 0; r < rows; r += kRowStep<T>) {
      const int64_t n = rows - r < kRowStep<T> ? rows - r : kRowStep<T>;
      product(scope, a + r * lda, lda, n, panel, panel + size, args.hidden, c);
      T* to = static_cast<T*>(job.middle) + (row + r) * job.middle_stride + column;
      finish_pair(args, c, ldc, n, gate_bias, up_bias, to, job.middle_stride);
    }
  }
}

// The first row of a job whose token is not below `token`.
IPEX_INLINE int64_t first_row(const ExpertJob& job, int64_t token) {
  if (!job.tokens) return token < job.rows ? token : job.rows;
  int64_t low = 0, high = job.rows;
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (job.tokens[middle] < token)
      low = middle + 1;
    else
      high = middle;
  }
  return low;
}

template <class T>
IPEX_INLINE void store_sums(const float* sums, int64_t rows, int64_t columns, T* y,
                            int64_t y_stride) {
  for (int64_t r = 0; r < rows; ++r, sums += 2 * kPanel, y += y_stride) {
    int64_t i = 0;
    for (; i + kLanes <= columns; i += kLanes) store(y + i, load(sums + i));
    if (i < columns) store_n(y + i, load(sums + i), columns - i);
  }
}

template <class T>
IPEX_INLINE void down(const ExpertsArgs& args, int64_t token_begin, int64_t token_end,
                      int64_t panel_begin, int64_t panel_end, float* sums) {
  alignas(64) float c[kRowStep<T> * 2 * kPanel];
  alignas(64) float bias[2 * kPanel];
  constexpr int64_t ldc = 2 * kPanel;
  TileScope scope;
  for (int64_t p = panel_begin; p < panel_end; p += 2) {
    const bool two = p + 1 < panel_end;
    const int64_t column = p * kPanel, width = two ? 2 * kPanel : kPanel;
    const int64_t count = args.hidden - column < width ? args.hidden - column : width;
    for (int64_t i = 0; i < (token_end - token_begin) * ldc; i += kLanes) store(sums + i, zero());
    for (int64_t j = 0; j < args.job_count; ++j) {
      const ExpertJob& job = args.jobs[j];
      const int64_t begin = first_row(job, token_begin), end = first_row(job, token_end);
      if (begin == end) continue;
      const int64_t size = panel_size<T>(job.inner);
      const T* panel = static_cast<const T*>(job.w2) + p * size;
      load_bias<T>(job.w2_bias, args.w2_bias_is_f32, column, count, bias);
      load_bias<T>(job.w2_bias, args.w2_bias_is_f32, column + kPanel, count - kPanel,
                   bias + kPanel);
      for (int64_t r = begin; r < end; r += kRowStep<T>) {
        const int64_t n = end - r < kRowStep<T> ? end - r : kRowStep<T>;
        const T* a = static_cast<const T*>(job.middle) + r * job.middle_stride;
        product(scope, a, job.middle_stride, n, panel, two ? panel + size : nullptr, job.inner, c);
        for (int64_t i = 0; i < n; ++i) {
          const int64_t token = job.tokens ? job.tokens[r + i] : r + i;
          const f32v weight = set1(job.weights ? job.weights[r + i] : 1.0f);
          float* sum = sums + (token - token_begin) * ldc;
          for (int64_t k = 0; k < width; k += kLanes)
            store(sum + k, fma(weight, load(c + i * ldc + k) + load(bias + k), load(sum + k)));
        }
      }
    }
    store_sums(sums, token_end - token_begin, count,
               static_cast<T*>(args.y) + token_begin * args.hidden + column, args.hidden);
  }
}

}  // namespace
}  // namespace ipex

void ipex_k_experts_add(const float* c, int64_t rows, int64_t columns, const int32_t* tokens,
                        int64_t first_token, const float* weights, float* sums) {
  using namespace ipex;
  for (int64_t r = 0; r < rows; ++r, c += columns) {
    const f32v weight = set1(weights ? weights[r] : 1.0f);
    float* sum = sums + (tokens ? tokens[r] - first_token : r) * 2 * kPanel;
    for (int64_t i = 0; i < columns; i += kLanes) {
      const int64_t n = columns - i < kLanes ? columns - i : kLanes;
      store_n(sum + i, fma(weight, load_n(c + i, n), load_n(sum + i, n)), n);
    }
  }
}

#define IPEX_DEFINE_EXPERTS(suffix, T)                                                          \
  void ipex_k_experts_up_##suffix(const ipex::ExpertsArgs* args, const ipex::ExpertJob* job,    \
                                  const void* a, int64_t lda, int64_t row, int64_t rows,        \
                                  int64_t pair_begin, int64_t pair_end) {                       \
    ipex::up(*args, *job, static_cast<const T*>(a), lda, row, rows, pair_begin, pair_end);      \
  }                                                                                             \
  void ipex_k_experts_down_##suffix(const ipex::ExpertsArgs* args, int64_t token_begin,         \
                                    int64_t token_end, int64_t panel_begin, int64_t panel_end,  \
                                    float* sums) {                                              \
    ipex::down<T>(*args, token_begin, token_end, panel_begin, panel_end, sums);                 \
  }                                                                                             \
  void ipex_k_experts_store_##suffix(const float* sums, int64_t rows, int64_t columns, void* y, \
                                     int64_t y_stride) {                                        \
    ipex::store_sums(sums, rows, columns, static_cast<T*>(y), y_stride);                        \
  }                                                                                             \
  void ipex_k_experts_square_##suffix(void* y, int64_t rows, int64_t columns, int64_t stride) { \
    ipex::square(static_cast<T*>(y), rows, columns, stride);                                    \
  }
IPEX_DEFINE_EXPERTS(f32, float)
IPEX_DEFINE_EXPERTS(bf16, ipex::BFloat16)
IPEX_DEFINE_EXPERTS(f16, ipex::Half)
#undef IPEX_DEFINE_EXPERTS
