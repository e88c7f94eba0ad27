// SPDX-License-Identifier: Apache-2.0
// Products with packed weights of several experts, each for rows of its own, and what a mixture of
// experts does around them.
#include "names.h"

namespace here = sycl::ext::oneapi;

// As wide as positions are (see matmul.sycl.cpp).
using Index = unsigned long;

constexpr Index kPanel = 32;    // features that lie side by side
constexpr Index kLanes = 16;    // features of a work-group
constexpr Index kTileRows = 8;  // rows of a tile

// Rows of one expert: places in the result.
struct Tile {
  int expert;
  int begin;
  int count;
};

// How many neighbors along the input lie side by side in a packed weight.
template <typename T>
constexpr Index kInner = std::is_same_v<T, bf16> ? 2 : 1;

// y[place] = x[rows[place]] W^T in float32, or x[place] without rows. A work-group has 16 features
// of a tile, an item one of them for all its rows.
template <typename T>
IPEX_KERNEL(2)
void expert_product(float* y, const T* x, Index x_row, const int* rows,
                    const unsigned char* weights, Index expert_bytes, const Tile* tiles, Index n,
                    Index k) {
  const auto position = here::this_work_item::get_nd_item<2>();
  const Tile tile = tiles[position.get_group(0)];
  const Index lane = position.get_local_id(1);
  const Index strip = position.get_group(1) * kLanes;
  const Index steps = (k + kInner<T> - 1) / kInner<T>;
  const T* weight = reinterpret_cast<const T*>(weights + tile.expert * expert_bytes) +
                    (strip / kPanel * steps * kPanel + strip % kPanel) * kInner<T>;
  const T* row[kTileRows];
#pragma unroll
  for (int r = 0; r < static_cast<int>(kTileRows); ++r) {
    const int place = tile.begin + (r < tile.count ? r : 0);
    row[r] = x + static_cast<Index>(rows ? rows[place] : place) * x_row;
  }
  float sums[kTileRows] = {};
  const Index whole = k / kInner<T>;
  for (Index i = 0; i < whole; ++i) {
#pragma unroll
    for (Index j = 0; j < kInner<T>; ++j) {
      const float value = load(weight + i * kPanel * kInner<T>, lane * kInner<T> + j);
#pragma unroll
      for (Index r = 0; r < kTileRows; ++r) sums[r] += value * load(row[r], i * kInner<T> + j);
    }
  }
  if (whole * kInner<T> < k) {  // an odd number of inputs
    const float value = load(weight + whole * kPanel * kInner<T>, lane * kInner<T>);
#pragma unroll
    for (Index r = 0; r < kTileRows; ++r) sums[r] += value * load(row[r], k - 1);
  }
  if (strip + lane >= n) return;
#pragma unroll
  for (int r = 0; r < static_cast<int>(kTileRows); ++r) {
    if (r < tile.count) y[(tile.begin + r) * n + strip + lane] = sums[r];
  }
}

enum Activation { kSilu, kGelu, kGeluTanh, kSwigluOai, kRelu2 };  // the last has no gate

inline float gated(float gate, float up, int activation, float alpha, float limit) {
  switch (activation) {
    case kSilu:
      return gate / (1.f + sycl::exp(-gate)) * up;
    case kGelu:
      return 0.5f * gate * (1.f + sycl::erf(gate * 0.70710678f)) * up;
    case kGeluTanh:
      return 0.5f * gate *
             (1.f + sycl::tanh(0.79788456f * (gate + 0.044715f * gate * gate * gate))) * up;
    case kRelu2:
      return gate < 0.f ? 0.f : gate * gate;
    default: {
      const float g = gate > limit ? limit : gate;
      const float u = up > limit ? limit : up < -limit ? -limit : up;
      return (u + 1.f) * (g / (1.f + sycl::exp(-alpha * g)));
    }
  }
}

// y = activation(gate) * up for products whose features are 32 gates and 32 ups in turn. `bias` (or
// null) has all gates of an expert and then all ups. With relu2 there are no gates.
template <typename T>
IPEX_KERNEL(2)
void expert_gate(T* y, const float* products, Index width, const float* bias, const int* experts,
                 Index inner, int activation, float alpha, float limit) {
  const auto item = here::this_work_item::get_nd_item<2>();
  const Index place = item.get_global_id(0);
  const Index i = item.get_global_id(1);
  if (i >= inner) return;
  const bool pair = activation != kRelu2;
  products += place * width + (pair ? i / kPanel * 2 * kPanel + i % kPanel : i);
  float gate = products[0];
  float up = pair ? products[kPanel] : 0.f;
  if (bias) {
    bias += experts[place] * (pair ? 2 : 1) * inner;
    gate += bias[i];
    if (pair) up += bias[inner + i];
  }
  store(y, place * inner + i, gated(gate, up, activation, alpha, limit));
}

// Sums what the experts of a token found: those at places[starts[token]] and following, in this
// order, each with its factor. The shared expert (or null) comes last.
template <typename T>
IPEX_KERNEL(2)
void expert_sum(T* y, const float* found, const float* bias, const int* experts,
                const float* factors, const int* places, const int* starts, const float* shared,
                const float* shared_factors, Index hidden) {
  const auto item = here::this_work_item::get_nd_item<2>();
  const Index token = item.get_global_id(0);
  const Index i = item.get_global_id(1);
  if (i >= hidden) return;
  float sum = 0.f;
  for (int s = starts[token]; s < starts[token + 1]; ++s) {
    const Index place = places[s];
    const float value =
        found[place * hidden + i] + (bias ? bias[experts[place] * hidden + i] : 0.f);
    sum += factors[place] * value;
  }
  if (shared) sum += shared[token * hidden + i] * (shared_factors ? shared_factors[token] : 1.f);
  store(y, token * hidden + i, sum);
}

#define EXPERTS(T)                                                                            \
  template void expert_product<T>(float*, const T*, Index, const int*, const unsigned char*,  \
                                  Index, const Tile*, Index, Index);                          \
  template void expert_gate<T>(T*, const float*, Index, const float*, const int*, Index, int, \
                               float, float);                                                 \
  template void expert_sum<T>(T*, const float*, const float*, const int*, const float*,       \
                              const int*, const int*, const float*, const float*, Index);
EXPERTS(float)
EXPERTS(half)
EXPERTS(bf16)
