// SPDX-License-Identifier: Apache-2.0
// The gradient of each row that was looked up, and the step of the optimizer on that row at once:
// neither gradients of tables nor lists of rows with gradients are made.
#include <type_traits>

#include "fetch_row.h"
#include "ipex/kernel/vec.h"
#include "merged_embeddingbag.h"

namespace ipex {
namespace {

// Lookups from one to that whose memory is asked for ahead of its use.
inline constexpr int64_t kAhead = 8;

// 16-bit patterns as the lower halves of integers, n of them.
IPEX_INLINE i32v read_low(const uint16_t* p, int64_t n) {
  const BFloat16* from = reinterpret_cast<const BFloat16*>(p);
  const f32v high = n == kLanes ? load(from) : load_n(from, n);
  return (as_int(high) >> 16) & iset1(0xffff);
}

// The lower halves of n integers. Not by a conversion to bfloat16: that would change some bits.
IPEX_INLINE void write_low(uint16_t* p, i32v bits, int64_t n) {
#if IPEX_HAVE_AVX512
  _mm512_mask_cvtepi32_storeu_epi16(p, first_n(n), raw(bits));
#elif IPEX_HAVE_AVX2
  const __m256i low = reinterpret_cast<__m256i>(bits & iset1(0xffff));
  const __m128i packed =
      _mm_packus_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1));
  if (n == kLanes) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), packed);
    return;
  }
  alignas(16) uint16_t values[kLanes];
  _mm_store_si128(reinterpret_cast<__m128i*>(values), packed);
  for (int64_t i = 0; i < n; ++i) p[i] = values[i];
#else
  for (int64_t i = 0; i < n; ++i) p[i] = static_cast<uint16_t>(bits[i]);
#endif
}

template <class T>
IPEX_INLINE f32v read_some(const T* p, int64_t n) {
  return n == kLanes ? load(p) : load_n(p, n);
}
template <class T>
IPEX_INLINE void write_some(T* p, f32v x, int64_t n) {
  if (n == kLanes)
    store(p, x);
  else
    store_n(p, x, n);
}

// n numbers of a row: the weight itself, or its two halves.
template <class T>
IPEX_INLINE f32v read_weight(const T* weight, [[maybe_unused]] const uint16_t* trail, int64_t n) {
  if constexpr (kIsBFloat16<T>)
    if (trail) return as_float((as_int(read_some(weight, n))) | read_low(trail, n));
  return read_some(weight, n);
}
template <class T>
IPEX_INLINE void write_weight(T* weight, [[maybe_unused]] uint16_t* trail, f32v x, int64_t n) {
  if constexpr (kIsBFloat16<T>) {
    if (trail) {
      write_low(reinterpret_cast<uint16_t*>(weight), as_int(x) >> 16, n);
      write_low(trail, as_int(x), n);
      return;
    }
  }
  write_some(weight, x, n);
}

struct Sgd {
  f32v lr, decay;
  bool decays;

  explicit Sgd(const UpdateArgs& args)
      : lr(set1(args.lr)), decay(set1(args.weight_decay)), decays(args.weight_decay != 0.0f) {}
  IPEX_INLINE f32v step(f32v weight, f32v grad, float*, int64_t) const {
    if (decays) grad = fma(decay, weight, grad);
    return fnma(lr, grad, weight);
  }
  static constexpr bool kHessian = false;
};

struct Adagrad {
  f32v lr, eps;

  explicit Adagrad(const UpdateArgs& args) : lr(set1(args.lr)), eps(set1(args.eps)) {}
  IPEX_INLINE f32v step(f32v weight, f32v grad, float* hessian, int64_t n) const {
    const f32v squares = fma(grad, grad, read_some(hessian, n));
    write_some(hessian, squares, n);
    return fnma(lr, grad / (sqrt(squares) + eps), weight);
  }
  static constexpr bool kHessian = true;
};

template <class T>
IPEX_INLINE const T* grad_of(const UpdateTable& table, const Lookup& lookup) {
  return static_cast<const T*>(table.grad) + static_cast<int64_t>(lookup.bag) * table.grad_stride;
}

template <class T, bool kHessian>
IPEX_INLINE void fetch_lookup(const UpdateTable& table, int64_t dim, const Lookup& lookup,
                              bool new_row) {
  const int64_t bytes = dim * static_cast<int64_t>(sizeof(T));
  const int64_t at = static_cast<int64_t>(lookup.row) * dim;
  fetch_row(grad_of<T>(table, lookup), bytes);
  if (!new_row) return;
  fetch_row(static_cast<const T*>(table.weight) + at, bytes);
  if (kIsBFloat16<T> && table.trail) fetch_row(table.trail + at, bytes);
  if (kHessian) fetch_row(table.hessian + at, dim * static_cast<int64_t>(sizeof(float)));
}

// Numbers [d, d + kVectors vectors) of the row of these lookups; the last vector has n numbers.
template <int64_t kVectors, class T, class Rule>
IPEX_INLINE void update_part(const UpdateTable& table, const Rule& rule, int64_t dim,
                             const Lookup* begin, const Lookup* end, int64_t d, int64_t n) {
  f32v grad[kVectors];
#pragma GCC unroll 8
  for (int64_t v = 0; v < kVectors; ++v) grad[v] = zero();
  for (const Lookup* lookup = begin; lookup < end; ++lookup) {
    const T* from = grad_of<T>(table, *lookup) + d;
    const f32v scale = set1(lookup->scale);
#pragma GCC unroll 8
    for (int64_t v = 0; v < kVectors; ++v)
      grad[v] = fma(scale, read_some(from + v * kLanes, n), grad[v]);
  }
  const int64_t first = static_cast<int64_t>(begin->row) * dim + d;
  T* weight = static_cast<T*>(table.weight) + first;
  uint16_t* trail = table.trail ? table.trail + first : nullptr;
  float* hessian = Rule::kHessian ? table.hessian + first : nullptr;
#pragma GCC unroll 8
  for (int64_t v = 0; v < kVectors; ++v) {
    const int64_t at = v * kLanes;
    uint16_t* low = trail ? trail + at : nullptr;
    const f32v old = read_weight(weight + at, low, n);
    write_weight(weight + at, low, rule.step(old, grad[v], hessian ? hessian + at : nullptr, n), n);
  }
}

// The rows of one table whose first lookup is in [i, end); `last` is the end of its lookups.
template <class T, class Rule>
IPEX_INLINE void update_rows(const UpdateTable& table, const Rule& rule, int64_t dim,
                             const Lookup* i, const Lookup* end, const Lookup* last) {
  constexpr int64_t kVectors = kLanes == 16 ? 8 : 4;
  const Lookup* fetched = i;
  while (i < end) {
    const Lookup* next = i + 1;
    while (next < last && next->row == i->row) ++next;
    const Lookup* ahead = last - next > kAhead ? next + kAhead : last;
    for (fetched = fetched < next ? next : fetched; fetched < ahead; ++fetched)
      fetch_lookup<T, Rule::kHessian>(table, dim, *fetched, fetched->row != fetched[-1].row);
    int64_t d = 0;
    for (; d + kVectors * kLanes <= dim; d += kVectors * kLanes)
      update_part<kVectors, T>(table, rule, dim, i, next, d, kLanes);
    for (; d + kLanes <= dim; d += kLanes) update_part<1, T>(table, rule, dim, i, next, d, kLanes);
    if (d < dim) update_part<1, T>(table, rule, dim, i, next, d, dim - d);
    i = next;
  }
}

template <class T, class Rule>
IPEX_INLINE void run(const UpdateArgs& args, int64_t begin, int64_t end) {
  const Rule rule(args);
  const Lookup* lookups = args.lookups;
  const UpdateTable* table = args.tables;
  int64_t first = 0;  // lookup of the table
  for (int64_t i = begin; i < end; first = (table++)->end) {
    if (table->end <= i) continue;
    const int64_t stop = table->end < end ? table->end : end;
    // A row that began before is another task's.
    while (i > first && i < stop && lookups[i].row == lookups[i - 1].row) ++i;
    update_rows<T>(*table, rule, args.dim, lookups + i, lookups + stop, lookups + table->end);
    i = stop;
  }
}

}  // namespace
}  // namespace ipex

#define IPEX_DEFINE_UPDATE(suffix, T)                                                           \
  void ipex_k_merged_embeddingbag_sgd_##suffix(const ipex::UpdateArgs* args, int64_t begin,     \
                                               int64_t end) {                                   \
    ipex::run<T, ipex::Sgd>(*args, begin, end);                                                 \
  }                                                                                             \
  void ipex_k_merged_embeddingbag_adagrad_##suffix(const ipex::UpdateArgs* args, int64_t begin, \
                                                   int64_t end) {                               \
    ipex::run<T, ipex::Adagrad>(*args, begin, end);                                             \
  }
IPEX_DEFINE_UPDATE(f32, float)
IPEX_DEFINE_UPDATE(bf16, ipex::BFloat16)
IPEX_DEFINE_UPDATE(f16, ipex::Half)
#undef IPEX_DEFINE_UPDATE
