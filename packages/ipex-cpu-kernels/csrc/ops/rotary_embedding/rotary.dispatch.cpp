// SPDX-License-Identifier: Apache-2.0
#include "rotary.h"

#include "ipex/kernel/kv_load.h"
#include "ipex/kernel/vec_loops.h"

namespace ipex {
namespace {

inline constexpr int64_t kMaxPairs = kMaxRotaryDim / 2;
inline constexpr int64_t kPairStep = 2 * kLanes;

// The factors of one token, in float: y1 = x1 c1 - x2 s1, y2 = x2 c2 + x1 s2. Prepared once, used
// by every head. Where two vectors of T are loaded at once their lanes are in the order of T.
struct Factors {
  // Room for one pair of vectors more, because tails are read as full vectors.
  alignas(64) float c1[kMaxPairs + kPairStep];
  alignas(64) float s1[kMaxPairs + kPairStep];
  alignas(64) float c2[kMaxPairs + kPairStep];
  alignas(64) float s2[kMaxPairs + kPairStep];
};

// Factors for heads of T split into halves, from n numbers of P.
template <typename T, typename P>
IPEX_INLINE void prepare_halves(const P* from, float* to, int64_t n) {
  int64_t i = 0;
  for (; i + kPairStep <= n; i += kPairStep) {
    const f32v2 v = load2_as<T>(from + i);
    storeu(to + i, v.a);
    storeu(to + i + kLanes, v.b);
  }
  for (; i < n; i += kLanes) storeu(to + i, load_n(from + i, n - i < kLanes ? n - i : kLanes));
}

// Even and odd places of 2 * n numbers.
template <typename P>
IPEX_INLINE void prepare_pairs(const P* from, float* even, float* odd, int64_t n) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const f32v2 v = load_pairs(from + 2 * i);
    storeu(even + i, v.a);
    storeu(odd + i, v.b);
  }
  if (i < n) {
    P rest[2 * kLanes] = {};
    for (int64_t k = 0; k < 2 * (n - i); ++k) rest[k] = from[2 * i + k];
    const f32v2 v = load_pairs(rest);
    storeu(even + i, v.a);
    storeu(odd + i, v.b);
  }
}

template <typename T, typename P>
IPEX_INLINE void prepare(const RotaryWork& work, int64_t row, Factors& f) {
  const int64_t n = work.rotary_dim / 2;
  const P* cos = static_cast<const P*>(work.tables.cos) + row * work.tables.cos_stride;
  const P* sin = static_cast<const P*>(work.tables.sin) + row * work.tables.sin_stride;
  if (work.half_split) {
    const int64_t second = work.tables.full ? n : 0;
    prepare_halves<T>(cos, f.c1, n);
    prepare_halves<T>(sin, f.s1, n);
    prepare_halves<T>(cos + second, f.c2, n);
    prepare_halves<T>(sin + second, f.s2, n);
  } else if (work.tables.full) {
    prepare_pairs(cos, f.c1, f.c2, n);
    prepare_pairs(sin, f.s1, f.s2, n);
  } else {
    for (int64_t i = 0; i < n; i += kLanes) {
      const int64_t count = n - i < kLanes ? n - i : kLanes;
      const f32v c = load_n(cos + i, count);
      const f32v s = load_n(sin + i, count);
      storeu(f.c1 + i, c);
      storeu(f.c2 + i, c);
      storeu(f.s1 + i, s);
      storeu(f.s2 + i, s);
    }
  }
  if (!work.inverse) return;
  for (int64_t i = 0; i < n; i += kLanes) {
    storeu(f.s1 + i, zero() - loadu(f.s1 + i));
    storeu(f.s2 + i, zero() - loadu(f.s2 + i));
  }
}

IPEX_INLINE f32v first(const Factors& f, int64_t i, f32v x1, f32v x2) {
  return fnma(x2, loadu(f.s1 + i), x1 * loadu(f.c1 + i));
}
IPEX_INLINE f32v second(const Factors& f, int64_t i, f32v x1, f32v x2) {
  return fma(x1, loadu(f.s2 + i), x2 * loadu(f.c2 + i));
}

// The functions below read before they write, so y may be x.
template <typename T>
IPEX_INLINE void rotate_halves(const T* x, const Factors& f, T* y, int64_t n) {
  int64_t i = 0;
  for (; i + kPairStep <= n; i += kPairStep) {
    const f32v2 a = load2(x + i);
    const f32v2 b = load2(x + n + i);
    store2(y + i, {first(f, i, a.a, b.a), first(f, i + kLanes, a.b, b.b)});
    store2(y + n + i, {second(f, i, a.a, b.a), second(f, i + kLanes, a.b, b.b)});
  }
  if (i + kLanes <= n) {
    const f32v a = load(x + i);
    const f32v b = load(x + n + i);
    store(y + i, first(f, i, a, b));
    store(y + n + i, second(f, i, a, b));
    i += kLanes;
  }
  if (i < n) {
    const f32v a = load_n(x + i, n - i);
    const f32v b = load_n(x + n + i, n - i);
    store_n(y + i, first(f, i, a, b), n - i);
    store_n(y + n + i, second(f, i, a, b), n - i);
  }
}

template <typename T>
IPEX_INLINE void rotate_pairs(const T* x, const Factors& f, T* y, int64_t n) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const f32v2 v = load_pairs(x + 2 * i);
    store_pairs(y + 2 * i, {first(f, i, v.a, v.b), second(f, i, v.a, v.b)});
  }
  if (i < n) {
    T rest[2 * kLanes] = {};
    for (int64_t k = 0; k < 2 * (n - i); ++k) rest[k] = x[2 * i + k];
    const f32v2 v = load_pairs(rest);
    store_pairs(rest, {first(f, i, v.a, v.b), second(f, i, v.a, v.b)});
    for (int64_t k = 0; k < 2 * (n - i); ++k) y[2 * i + k] = rest[k];
  }
}

template <typename T>
IPEX_INLINE void rotate_part(const RotaryWork& work, const T* x, const Factors& f, T* y) {
  if (work.half_split) {
    rotate_halves(x, f, y, work.rotary_dim / 2);
  } else {
    rotate_pairs(x, f, y, work.rotary_dim / 2);
  }
}

// A whole head: what is not rotated is copied.
template <typename T>
IPEX_INLINE void rotate(const RotaryWork& work, const T* x, const Factors& f, T* y) {
  rotate_part(work, x, f, y);
  const int64_t left = work.head_dim - work.rotary_dim;
  if (x != y && left > 0)
    __builtin_memcpy(y + work.rotary_dim, x + work.rotary_dim,
                     static_cast<size_t>(left) * sizeof(T));
}

// The head h of token t.
template <typename T>
IPEX_INLINE const T* head(const RotaryHeads& x, int64_t batch, int64_t position, int64_t h) {
  return static_cast<const T*>(x.data) + batch * x.strides[0] + position * x.strides[1] +
         h * x.strides[2];
}
template <typename E>
IPEX_INLINE E* cache_row(const RotaryCache& cache, int64_t slot, int64_t h) {
  return static_cast<E*>(cache.data) +
         kv_offset(cache.strides, slot / cache.block_size, h, slot % cache.block_size);
}

// Stores n elements in the type of the cache; plain copies keep every bit.
template <typename T, typename E>
IPEX_INLINE void store_row(const T* x, int64_t n, float inverse_scale, E* to) {
  const f32v factor = set1(inverse_scale);
  for (int64_t i = 0; i < n; i += kLanes) {
    const int64_t count = n - i < kLanes ? n - i : kLanes;
    float lanes[kLanes];
    storeu(lanes, load_n(x + i, count) * factor);
    for (int64_t k = 0; k < count; ++k) quantize(lanes[k], to + i + k);
  }
}
template <typename T>
IPEX_INLINE void store_row(const T* x, int64_t n, float, T* to) {
  __builtin_memcpy(to, x, static_cast<size_t>(n) * sizeof(T));
}

template <typename T, typename E>
IPEX_INLINE void store_token(const RotaryWork& work, const Factors& f, int64_t batch,
                             int64_t position, int64_t slot) {
  for (int64_t h = 0; h < work.from[1].heads; ++h) {
    const T* key = head<T>(work.from[1], batch, position, h);
    E* to = cache_row<E>(work.key_cache, slot, h);
    if constexpr (sizeof(E) == sizeof(T)) {
      rotate(work, key, f, to);
    } else {
      // Rounded to T before it is quantized, as the two operations in a row would do.
      T rotated[kMaxRotaryDim];
      rotate_part(work, key, f, rotated);
      const int64_t n = work.rotary_dim;
      store_row(rotated, n, work.key_cache.inverse_scale, to);
      store_row(key + n, work.head_dim - n, work.key_cache.inverse_scale, to + n);
    }
    store_row(head<T>(work.value, batch, position, h), work.value_dim,
              work.value_cache.inverse_scale, cache_row<E>(work.value_cache, slot, h));
  }
}

template <typename T>
IPEX_INLINE void run(const RotaryWork& work, int64_t begin, int64_t end) {
  Factors f;
  const bool stores = work.slots != nullptr;
  for (int64_t t = begin; t < end; ++t) {
    const int64_t batch = t / work.positions;
    const int64_t position = t % work.positions;
    int64_t row = t % work.row_period;
    if (work.rows != nullptr) row = work.rows[row];
    if (work.tables.is_f32) {
      prepare<T, float>(work, row, f);
    } else {
      prepare<T, T>(work, row, f);
    }
    for (int k = 0; k < (stores ? 1 : 2); ++k) {
      const RotaryHeads& to = work.to[k];
      for (int64_t h = 0; h < to.heads; ++h)
        rotate(work, head<T>(work.from[k], batch, position, h), f,
               const_cast<T*>(head<T>(to, batch, position, h)));
    }
    if (!stores || work.slots[t] < 0) continue;
    const int64_t slot = work.slots[t];
    with_cache_type<T>(work.cache_type, [&]<class E>() IPEX_LAMBDA {
      store_token<T, E>(work, f, batch, position, slot);
    });
  }
}

}  // namespace
}  // namespace ipex

void ipex_k_rotary_f32(const ipex::RotaryWork* work, int64_t begin, int64_t end) {
  ipex::run<float>(*work, begin, end);
}
void ipex_k_rotary_bf16(const ipex::RotaryWork* work, int64_t begin, int64_t end) {
  ipex::run<ipex::BFloat16>(*work, begin, end);
}
void ipex_k_rotary_f16(const ipex::RotaryWork* work, int64_t begin, int64_t end) {
  ipex::run<ipex::Half>(*work, begin, end);
}
