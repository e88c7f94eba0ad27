// SPDX-License-Identifier: Apache-2.0
// Products with the factors of adapters.
//
// Shrink: long dot products of a few rows with a few rows of weights, which are read once for all
// of them. Expand: the sums are as short as the rank, so a tile of weights is transposed and then
// lanes are outputs; the rows of a group share the tile.
#include "lora.h"

#include <type_traits>

#include "ipex/kernel/sequence_tile.h"

namespace ipex {
namespace {

// Rows of a register block of shrink: with four outputs, half of the registers are sums.
inline constexpr int kBlockRows = kLanes == 16 ? 4 : 2;

// The next numbers of a row, for dot products: kEach of them, or n at the end of the row.
template <class T>
struct Wide {
  static constexpr int64_t kEach = kLanes;
  f32v v;
  IPEX_INLINE explicit Wide(const T* p) : v(load(p)) {}
  IPEX_INLINE Wide(const T* p, int64_t n) : v(load_n(p, n)) {}
};
template <class X, class T>
IPEX_INLINE f32v add_products(const Wide<X>& x, const Wide<T>& w, f32v sum) {
  return fma(x.v, w.v, sum);
}

#if IPEX_HAVE_AVX512_BF16
// The instruction multiplies pairs of bfloat16 and adds both products to a float.
struct Pairs {
  static constexpr int64_t kEach = 32;
  __m512i v;
  IPEX_INLINE explicit Pairs(const BFloat16* p) : v(_mm512_loadu_si512(p)) {}
  IPEX_INLINE Pairs(const BFloat16* p, int64_t n)
      : v(_mm512_maskz_loadu_epi16(static_cast<__mmask32>((uint64_t{1} << n) - 1), p)) {}
};
IPEX_INLINE f32v add_products(const Pairs& x, const Pairs& w, f32v sum) {
  return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(x.v), reinterpret_cast<__m512bh>(w.v));
}
#endif

// How numbers of the type A are read that meet numbers of the type B.
template <class A, class B>
struct ReadAs {
  using Type = Wide<A>;
};
#if IPEX_HAVE_AVX512_BF16
template <>
struct ReadAs<BFloat16, BFloat16> {
  using Type = Pairs;
};
#endif

template <class T>
IPEX_INLINE void write(const LoraArgs& args, T* to, f32v v, int64_t n) {
  v = v * set1(args.scale);
  if (n == kLanes) {
    if (args.add) v = v + load(to);
    store(to, v);
  } else {
    if (args.add) v = v + load_n(to, n);
    store_n(to, v, n);
  }
}

// n outputs of a row from `output` on.
template <class T>
IPEX_INLINE void write(const LoraArgs& args, int64_t row, int64_t output, f32v v, int64_t n) {
  const int64_t at = row * args.out_row + output;
  if (args.out_is_f32)
    write(args, static_cast<float*>(args.out) + at, v, n);
  else
    write(args, static_cast<T*>(args.out) + at, v, n);
}

// -- shrink ---------------------------------------------------------------------------------------

// kOutputs rows of weights from w on, kRows rows of the input.
template <int kRows, int kOutputs, class X, class T>
void shrink_block(const LoraArgs& args, const int64_t* rows, const T* w, int64_t output) {
  using ReadX = typename ReadAs<X, T>::Type;
  using ReadW = typename ReadAs<T, X>::Type;
  constexpr int64_t kEach = ReadX::kEach;
  f32v sum[kRows][kOutputs];
  const X* x[kRows];
#pragma GCC unroll 4
  for (int i = 0; i < kRows; ++i) {
    x[i] = static_cast<const X*>(args.input) + rows[i] * args.input_row;
#pragma GCC unroll 4
    for (int j = 0; j < kOutputs; ++j) sum[i][j] = zero();
  }
  int64_t k = 0;
  for (; k + kEach <= args.inputs; k += kEach) {
#pragma GCC unroll 4
    for (int j = 0; j < kOutputs; ++j) {
      const ReadW weight(w + j * args.weight_row + k);
#pragma GCC unroll 4
      for (int i = 0; i < kRows; ++i) sum[i][j] = add_products(ReadX(x[i] + k), weight, sum[i][j]);
    }
  }
  if (k < args.inputs) {
    const int64_t n = args.inputs - k;
#pragma GCC unroll 4
    for (int j = 0; j < kOutputs; ++j) {
      const ReadW weight(w + j * args.weight_row + k, n);
#pragma GCC unroll 4
      for (int i = 0; i < kRows; ++i)
        sum[i][j] = add_products(ReadX(x[i] + k, n), weight, sum[i][j]);
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < kRows; ++i) {
    alignas(64) float y[kLanes] = {};
#pragma GCC unroll 4
    for (int j = 0; j < kOutputs; ++j) y[j] = reduce_add(sum[i][j]);
    write<T>(args, rows[i], output, load(y), kOutputs);
  }
}

template <int kRows, class X, class T>
IPEX_INLINE void shrink_outputs(const LoraArgs& args, const int64_t* rows, const T* weights,
                                int64_t begin, int64_t end) {
  if (end - begin == 4)
    return shrink_block<kRows, 4, X>(args, rows, weights + begin * args.weight_row, begin);
  for (int64_t j = begin; j < end; ++j)
    shrink_block<kRows, 1, X>(args, rows, weights + j * args.weight_row, j);
}

template <class X, class T>
IPEX_INLINE void shrink_group(const LoraArgs& args, const LoraGroup& group, int64_t begin,
                              int64_t end) {
  const T* weights = static_cast<const T*>(args.weights) + group.adapter * args.adapter;
  const int64_t* rows = args.rows + group.first;
  int64_t i = 0;
  for (; i + kBlockRows <= group.count; i += kBlockRows)
    shrink_outputs<kBlockRows, X>(args, rows + i, weights, begin, end);
  for (; i < group.count; ++i) shrink_outputs<1, X>(args, rows + i, weights, begin, end);
}

template <class T>
IPEX_INLINE void shrink(const LoraArgs& args, int64_t begin, int64_t end) {
  const int64_t blocks = (args.outputs + kShrinkOutputs - 1) / kShrinkOutputs;
  for (int64_t task = begin; task < end; ++task) {
    const LoraGroup& group = args.groups[task / blocks];
    const int64_t first = task % blocks * kShrinkOutputs;
    const int64_t last =
        first + kShrinkOutputs < args.outputs ? first + kShrinkOutputs : args.outputs;
    if (!std::is_same_v<T, float> && args.input_is_f32)
      shrink_group<float, T>(args, group, first, last);
    else
      shrink_group<T, T>(args, group, first, last);
  }
}

// -- expand ---------------------------------------------------------------------------------------

// Rows of a register block of expand: enough sums to hide the latency of one.
inline constexpr int kExpandBlock = 8;

template <class X>
IPEX_INLINE void widen(const X* from, int64_t n, float* to) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(to + i, load(from + i));
  if (i < n) store_n(to + i, load_n(from + i, n - i), n - i);
}

// kRows rows of x times the tile [inputs][kLanes].
template <int kRows, class T>
IPEX_INLINE void expand_rows(const LoraArgs& args, const int64_t* rows, const float* x,
                             const float* tile, int64_t output, int64_t count) {
  f32v sum[kRows];
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i) sum[i] = zero();
  for (int64_t k = 0; k < args.inputs; ++k) {
    const f32v w = load(tile + k * kLanes);
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) sum[i] = fma(w, set1(x[i * args.inputs + k]), sum[i]);
  }
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i) write<T>(args, rows[i], output, sum[i], count);
}

template <class T>
IPEX_INLINE void expand(const LoraArgs& args, int64_t begin, int64_t end, char* scratch) {
  const int64_t blocks = (args.outputs + kExpandOutputs - 1) / kExpandOutputs;
  float* x = reinterpret_cast<float*>(scratch);
  float* tile = x + kExpandRows * args.inputs;
  int64_t held = -1;  // the group whose rows are in x
  for (int64_t task = begin; task < end; ++task) {
    const int64_t number = task / blocks;
    const LoraGroup& group = args.groups[number];
    const int64_t* rows = args.rows + group.first;
    for (int64_t i = 0; number != held && i < group.count; ++i) {
      const int64_t at = rows[i] * args.input_row;
      if (args.input_is_f32)
        widen(static_cast<const float*>(args.input) + at, args.inputs, x + i * args.inputs);
      else
        widen(static_cast<const T*>(args.input) + at, args.inputs, x + i * args.inputs);
    }
    held = number;
    const T* weights = static_cast<const T*>(args.weights) + group.adapter * args.adapter;
    const int64_t first = task % blocks * kExpandOutputs;
    const int64_t last =
        first + kExpandOutputs < args.outputs ? first + kExpandOutputs : args.outputs;
    for (int64_t j = first; j < last; j += kLanes) {
      const int64_t count = last - j < kLanes ? last - j : kLanes;
      load_tile(weights + j * args.weight_row, args.weight_row, 1, count, args.inputs, tile);
      int64_t i = 0;
      for (; i + kExpandBlock <= group.count; i += kExpandBlock)
        expand_rows<kExpandBlock, T>(args, rows + i, x + i * args.inputs, tile, j, count);
      for (; i + 4 <= group.count; i += 4)
        expand_rows<4, T>(args, rows + i, x + i * args.inputs, tile, j, count);
      for (; i < group.count; ++i)
        expand_rows<1, T>(args, rows + i, x + i * args.inputs, tile, j, count);
    }
  }
}

}  // namespace
}  // namespace ipex

#define IPEX_DEFINE_LORA(suffix, T)                                                          \
  void ipex_k_lora_shrink_##suffix(const ipex::LoraArgs* args, int64_t begin, int64_t end) { \
    ipex::shrink<T>(*args, begin, end);                                                      \
  }                                                                                          \
  void ipex_k_lora_expand_##suffix(const ipex::LoraArgs* args, int64_t begin, int64_t end,   \
                                   char* scratch) {                                          \
    ipex::expand<T>(*args, begin, end, scratch);                                             \
  }
IPEX_DEFINE_LORA(f32, float)
IPEX_DEFINE_LORA(bf16, ipex::BFloat16)
IPEX_DEFINE_LORA(f16, ipex::Half)
