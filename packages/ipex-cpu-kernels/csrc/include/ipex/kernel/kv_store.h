// SPDX-License-Identifier: Apache-2.0
// Writes a row of keys or values into a cache, quantized if the cache is. For kernels.
#pragma once

#include <cstring>

#include "ipex/kernel/kv_load.h"
#include "ipex/kv_view.h"

namespace ipex {
namespace {

// f(i, value) for the elements of a row, in float.
template <class T, class F>
IPEX_INLINE void for_elements_of(const T* from, int64_t size, const F& f) {
  alignas(64) float lanes[kLanes];
  for (int64_t i = 0; i < size; i += kLanes) {
    const int64_t n = size - i < kLanes ? size - i : kLanes;
    storeu(lanes, n == kLanes ? load(from + i) : load_n(from + i, n));
    for (int64_t j = 0; j < n; ++j) f(i + j, lanes[j]);
  }
}

// Largest magnitude of a row; NaN if any element is NaN or infinite.
template <class T>
IPEX_INLINE float largest_magnitude(const T* from, int64_t size) {
  f32v largest = zero(), poison = zero();
  int64_t i = 0;
  const auto one = [&](f32v x) IPEX_LAMBDA {
    largest = max(largest, abs(x));
    poison = fma(x, zero(), poison);
  };
  for (; i + kLanes <= size; i += kLanes) one(load(from + i));
  if (i < size) one(load_n(from + i, size - i));
  return reduce_max(largest) + reduce_add(poison);
}

// The row `row` of a cache. With scales of its own an int8 row is divided by largest magnitude /
// 127 (a row that is not finite gets NaN for a scale), otherwise by the scale of the cache.
template <class T>
IPEX_INLINE void store_kv_row(const T* from, int64_t size, KvType type, const KvPart& part,
                              int64_t block, int64_t head, int64_t row) {
  const int64_t at = kv_offset(part.strides, block, head, row);
  if (type == KvType::kSame) {
    std::memcpy(static_cast<T*>(const_cast<void*>(part.data)) + at, from,
                sizeof(T) * static_cast<size_t>(size));
    return;
  }
  float inverse = 1.0f / part.scale;
  if (part.scales) {
    const float largest = largest_magnitude(from, size);
    inverse = largest > 0.0f ? 127.0f / largest : 0.0f;
    const_cast<float*>(part.scales)[kv_offset(part.scale_strides, block, head, row)] =
        largest / 127.0f;
  }
  with_cache_type<Int8>(type, [&]<class E>() IPEX_LAMBDA {
    E* to = static_cast<E*>(const_cast<void*>(part.data)) + at;
    for_elements_of(from, size,
                    [&](int64_t i, float x) IPEX_LAMBDA { quantize(x * inverse, to + i); });
  });
}

}  // namespace
}  // namespace ipex
