// SPDX-License-Identifier: Apache-2.0
#include "program/pointwise.h"

#include "ipex/kernel/vec_functions.h"
#include "ipex/kernel/vec_loops.h"

namespace ipex {
namespace {

constexpr int64_t kBlock = PointwiseCall::kBlock;

// --- memory ------------------------------------------------------------------------------------

template <typename T>
void load_block(const T* from, float* to, int64_t n) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) storeu(to + i, load(from + i));
  if (i < n) storeu_n(to + i, load_n(from + i, n - i), n - i);
}
void load_block(const bool* from, float* to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i] = from[i] ? 1.0f : 0.0f;
}

template <typename T>
void store_block(const float* from, T* to, int64_t n) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(to + i, loadu(from + i));
  if (i < n) store_n(to + i, loadu_n(from + i, n - i), n - i);
}
void store_block(const float* from, bool* to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i] = from[i] != 0.0f;
}

inline float element(const float* p) { return *p; }
inline float element(const bool* p) { return *p ? 1.0f : 0.0f; }
template <typename T>
inline float element(const T* p) {
  return load_n(p, 1)[0];
}

IPEX_INLINE void fill(float* to, float value, int64_t n) {
  const f32v v = set1(value);
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) storeu(to + i, v);
  for (; i < n; ++i) to[i] = value;
}

template <typename T>
void load_strided(const T* from, int64_t stride, float* to, int64_t n) {
  if (stride == 1) return load_block(from, to, n);
  if (stride == 0) return fill(to, element(from), n);
  for (int64_t i = 0; i < n; ++i) to[i] = element(from + i * stride);
}

// Calls f(p) with the input as a pointer to its type.
template <typename F>
IPEX_INLINE void visit(PointwiseType type, const void* data, const F& f) {
  switch (type) {
    case PointwiseType::kFloat:
      return f(static_cast<const float*>(data));
    case PointwiseType::kBFloat16:
      return f(static_cast<const BFloat16*>(data));
    case PointwiseType::kHalf:
      return f(static_cast<const Half*>(data));
    case PointwiseType::kBool:
      return f(static_cast<const bool*>(data));
  }
}

// Where a block lies: n elements from column `column` of row `row` on.
struct Block {
  int64_t row, column, n;
};

// The elements of a strided input that a block of whole rows, or of a part of one, meets.
template <typename T>
void load_rows(const PointwiseCall& call, const T* data, const int64_t* strides, Block block,
               float* to) {
  const int64_t last = call.dim - 1;
  int64_t index[PointwiseCall::kMaxDim];
  int64_t offset = block.column * strides[last];
  for (int64_t d = last - 1, rest = block.row; d >= 0; --d) {
    index[d] = rest % call.sizes[d];
    rest /= call.sizes[d];
    offset += index[d] * strides[d];
  }
  for (int64_t done = 0; done < block.n;) {
    const int64_t n =
        block.n - done < call.columns - block.column ? block.n - done : call.columns - block.column;
    load_strided(data + offset, strides[last], to + done, n);
    done += n;
    for (int64_t d = last - 1; d >= 0; --d) {
      offset += strides[d];
      if (++index[d] < call.sizes[d]) break;
      offset -= strides[d] * call.sizes[d];
      index[d] = 0;
    }
  }
}

// --- functions ---------------------------------------------------------------------------------

template <typename F>
void map3(const float* a, const float* b, const float* c, float* y, int64_t n, const F& f) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) storeu(y + i, f(loadu(a + i), loadu(b + i), loadu(c + i)));
  if (i == n) return;
  const int64_t rest = n - i;
  storeu_n(y + i, f(loadu_n(a + i, rest), loadu_n(b + i, rest), loadu_n(c + i, rest)), rest);
}

// pow with an exponent that is the same everywhere; false if that is of no help.
bool power(const float* a, float exponent, float* y, int64_t n) {
  if (exponent == 2.0f) {
    map(a, y, n, [](f32v x) IPEX_LAMBDA { return x * x; });
  } else if (exponent == 3.0f) {
    map(a, y, n, [](f32v x) IPEX_LAMBDA { return x * x * x; });
  } else if (exponent == 1.0f) {
    map(a, y, n, [](f32v x) IPEX_LAMBDA { return x; });
  } else if (exponent == -1.0f) {
    map(a, y, n, [](f32v x) IPEX_LAMBDA { return set1(1.0f) / x; });
  } else {
    return false;
  }
  return true;
}

#define IPEX_UNARY(name, expression) \
  case PointwiseCode::k_##name:      \
    return map(a, y, n, [](f32v x) IPEX_LAMBDA -> f32v { return expression; })
#define IPEX_BINARY(name, expression) \
  case PointwiseCode::k_##name:       \
    return map(a, b, y, n, [](f32v x, f32v z) IPEX_LAMBDA -> f32v { return expression; })

// kFast: the result of the chain is stored with 16 bits.
template <bool kFast>
void run_step(const PointwiseStep& step, const float* const* places, float* y, int64_t n,
              bool b_is_one_value) {
  const float* a = places[step.operands[0]];
  const float* b = step.operands[1] < 0 ? nullptr : places[step.operands[1]];
  const float* c = step.operands[2] < 0 ? nullptr : places[step.operands[2]];
  const BFloat16* bf16 = nullptr;
  const Half* f16 = nullptr;
  switch (step.code) {
    IPEX_BINARY(add, x + z);
    IPEX_BINARY(sub, x - z);
    IPEX_BINARY(mul, x * z);
    IPEX_BINARY(div, x / z);
    IPEX_UNARY(neg, -x);
    IPEX_UNARY(abs, abs(x));
    IPEX_UNARY(exp, kFast ? exp_fast(x) : exp(x));
    IPEX_UNARY(log, log(x));
    IPEX_UNARY(sqrt, sqrt(x));
    IPEX_UNARY(rsqrt, set1(1.0f) / sqrt(x));
    IPEX_UNARY(reciprocal, set1(1.0f) / x);
    IPEX_UNARY(tanh, kFast ? tanh_fast(x) : tanh(x));
    IPEX_UNARY(sigmoid, kFast ? sigmoid_fast(x) : sigmoid(x));
    IPEX_UNARY(erf, kFast ? erf_fast(x) : erf(x));
    IPEX_UNARY(relu, max(zero(), x));
    IPEX_UNARY(gelu, gelu<kFast>(x));
    IPEX_UNARY(gelu_tanh, gelu_tanh<kFast>(x));
    IPEX_UNARY(silu, silu<kFast>(x));
    IPEX_UNARY(sin, sin(x));
    IPEX_UNARY(cos, cos(x));
    IPEX_UNARY(floor, floor(x));
    IPEX_UNARY(ceil, ceil(x));
    IPEX_UNARY(round, round_any(x));
    IPEX_UNARY(trunc, trunc(x));
    IPEX_BINARY(maximum, maximum(x, z));
    IPEX_BINARY(minimum, minimum(x, z));
    case PointwiseCode::k_pow:
      if (b_is_one_value && power(a, *b, y, n)) return;
      for (int64_t i = 0; i < n; ++i) y[i] = __builtin_powf(a[i], b[i]);
      return;
      IPEX_BINARY(eq, one_where(x == z));
      IPEX_BINARY(ne, one_where(x != z));
      IPEX_BINARY(lt, one_where(x < z));
      IPEX_BINARY(le, one_where(x <= z));
      IPEX_BINARY(gt, one_where(x > z));
      IPEX_BINARY(ge, one_where(x >= z));
      IPEX_BINARY(logical_and, one_where((x != zero()) & (z != zero())));
      IPEX_BINARY(logical_or, one_where((x != zero()) | (z != zero())));
      IPEX_UNARY(logical_not, one_where(x == zero()));
    case PointwiseCode::k_where:
      return map3(a, b, c, y, n,
                  [](f32v x, f32v u, f32v v) IPEX_LAMBDA -> f32v { return x != zero() ? u : v; });
    case PointwiseCode::k_round_bfloat16:
      return map(a, y, n, [=](f32v x) IPEX_LAMBDA { return round_to(bf16, x); });
    case PointwiseCode::k_round_float16:
      return map(a, y, n, [=](f32v x) IPEX_LAMBDA { return round_to(f16, x); });
      IPEX_UNARY(log1p, log1p(x));
      IPEX_UNARY(expm1, expm1(x));
  }
}

#undef IPEX_UNARY
#undef IPEX_BINARY

// --- blocks ------------------------------------------------------------------------------------

Block block_at(const PointwiseCall& call, int64_t number) {
  if (call.pieces == 1) {
    const int64_t row = number * call.group;
    const int64_t rows = call.rows - row < call.group ? call.rows - row : call.group;
    return {row, 0, rows * call.columns};
  }
  const int64_t column = number % call.pieces * kBlock;
  return {number / call.pieces, column,
          call.columns - column < kBlock ? call.columns - column : kBlock};
}

template <typename T>
void run(const PointwiseCall& call, T* y, float* scratch, int64_t begin, int64_t end) {
  constexpr bool kIsFloat = sizeof(T) == sizeof(float);
  const float* places[PointwiseCall::kMaxPlaces];
  for (int64_t i = 0; i < call.places; ++i) places[i] = scratch + i * kBlock;
  for (int64_t i = 0; i < call.n_constants; ++i)
    fill(scratch + (call.n_inputs + i) * kBlock, call.constants[i], kBlock);
  for (int64_t i = 0; i < call.n_inputs; ++i) {
    const PointwiseInput& input = call.inputs[i];
    float* to = scratch + i * kBlock;
    visit(input.type, input.data, [&](const auto* p) IPEX_LAMBDA {
      if (input.layout == PointwiseLayout::kScalar) fill(to, element(p), kBlock);
      // Blocks of whole rows meet the same elements again and again.
      if (input.layout == PointwiseLayout::kRow && call.pieces == 1)
        for (int64_t r = 0; r < call.group; ++r)
          load_strided(p, input.strides[call.dim - 1], to + r * call.columns, call.columns);
    });
  }
  for (int64_t number = begin; number < end; ++number) {
    const Block block = block_at(call, number);
    const int64_t at = block.row * call.columns + block.column;
    for (int64_t i = 0; i < call.n_inputs; ++i) {
      const PointwiseInput& input = call.inputs[i];
      if (input.layout == PointwiseLayout::kScalar) continue;
      if (input.layout == PointwiseLayout::kRow && call.pieces == 1) continue;
      float* to = scratch + i * kBlock;
      visit(input.type, input.data, [&]<typename P>(const P* p) IPEX_LAMBDA {
        const int64_t stride = input.strides[call.dim - 1];
        const bool same = input.layout == PointwiseLayout::kSame;
        const bool row = input.layout == PointwiseLayout::kRow;
        if (!same && !row) return load_rows(call, p, input.strides, block, to);
        const P* from = p + (same ? at : block.column * stride);
        if (!same && stride != 1) return load_strided(from, stride, to, block.n);
        if constexpr (sizeof(P) == sizeof(float)) {
          places[i] = from;  // read where it is
        } else {
          load_block(from, to, block.n);
        }
      });
    }
    for (int64_t s = 0; s < call.n_steps; ++s) {
      const PointwiseStep& step = call.steps[s];
      float* to = scratch + step.to * kBlock;
      if constexpr (kIsFloat) {
        if (s == call.n_steps - 1) to = y + at;
      }
      const int32_t b = step.operands[1];
      const bool one_value =
          (b >= call.n_inputs && b < call.n_inputs + call.n_constants) ||
          (b >= 0 && b < call.n_inputs && call.inputs[b].layout == PointwiseLayout::kScalar);
      run_step<!kIsFloat && sizeof(T) == 2>(step, places, to, block.n, one_value);
    }
    if constexpr (kIsFloat) {
      if (call.n_steps == 0) load_block(places[call.result], y + at, block.n);
    } else {
      store_block(places[call.result], y + at, block.n);
    }
  }
}

}  // namespace
}  // namespace ipex

void ipex_k_pointwise(const ipex::PointwiseCall* call, void* y, float* scratch, int64_t begin,
                      int64_t end) {
  using ipex::PointwiseType;
  switch (call->type) {
    case PointwiseType::kFloat:
      return ipex::run(*call, static_cast<float*>(y), scratch, begin, end);
    case PointwiseType::kBFloat16:
      return ipex::run(*call, static_cast<ipex::BFloat16*>(y), scratch, begin, end);
    case PointwiseType::kHalf:
      return ipex::run(*call, static_cast<ipex::Half*>(y), scratch, begin, end);
    case PointwiseType::kBool:
      return ipex::run(*call, static_cast<bool*>(y), scratch, begin, end);
  }
}
