// SPDX-License-Identifier: Apache-2.0
// Attention over whole sequences with an online softmax: scores never leave the cache.
//
// Keys and values are packed once and shared by all queries and by the heads of a group. An item
// takes a block of queries through the key blocks: scores = Q K^T, running maximum and sum per row,
// out += P V. Key blocks begin at multiples of kKeyBlock whatever the queries are, so the result of
// a query does not depend on those it shares an item with.
#include "attention.h"

#include <type_traits>

#include "ipex/kernel/gemm.h"
#include "pack.h"
#include "scores.h"

namespace ipex {
namespace {

// With VDPBF16PS or AMX queries and weights of a bfloat16 product are bfloat16; everywhere else
// they are float.
template <class T>
inline constexpr bool kDirect = false;
#if IPEX_HAVE_AVX512_BF16
template <>
inline constexpr bool kDirect<BFloat16> = true;
#endif

// Rows of an item. A multiple of the register tile; with AMX so many that the panels of keys and
// values are taken from L1 for the second half of them.
template <class T>
inline constexpr int64_t kRows = 48;
#if IPEX_HAVE_AMX
template <>
inline constexpr int64_t kRows<BFloat16> = 64;
#endif
static_assert(kRows<float> <= kMostRows && kRows<BFloat16> <= kMostRows);

template <class T>
using Operand = std::conditional_t<kDirect<T>, T, float>;

// Two panels, the second of which may be missing.
template <class T>
IPEX_INLINE void product(TileScope& scope, const Operand<T>* a, int64_t lda, int64_t rows,
                         const T* panel, int64_t next, bool two, int64_t k, float* c, int64_t ldc,
                         bool accumulate) {
  const T* second = two ? panel + next : nullptr;
  if constexpr (kDirect<T>)
    multiply(scope, a, lda, rows, panel, second, k, c, ldc, accumulate);
  else
    multiply_float(a, lda, rows, panel, second, k, c, ldc, accumulate);
}

template <class T>
struct Work {
  const AttentionArgs& args;
  const AttentionItem& item;
  const AttentionSequence& sequence;
  int64_t rows, columns, query_stride;
  float* scores;
  Operand<T>* weights;
  float* out;
  Operand<T>* query;
  float* mask;
  float largest[kMostRows], total[kMostRows];

  Work(const AttentionArgs& a, const AttentionItem& i, char* scratch)
      : args(a), item(i), sequence(a.sequences[i.sequence]) {
    rows = item.heads * item.queries;
    columns = round_up(args.size, kPanel);
    query_stride = columns + 32;
    scores = reinterpret_cast<float*>(scratch);
    out = scores + kMostRows * kScoreStride;
    mask = out + kMostRows * columns;
    weights = reinterpret_cast<Operand<T>*>(mask + kKeyBlock);
    query = weights + kMostRows * kWeightStride;
  }

  // Rows are ordered by head, then by query.
  int64_t head(int64_t row) const { return item.head + row / item.queries; }
  int64_t query_of(int64_t row) const { return item.query + row % item.queries; }
};

template <class T>
IPEX_INLINE void start(Work<T>& work) {
  const AttentionArgs& args = work.args;
  for (int64_t r = 0; r < work.rows; ++r) {
    const T* from = static_cast<const T*>(work.sequence.query) +
                    work.head(r) * args.query_strides.head +
                    work.query_of(r) * args.query_strides.row;
    Operand<T>* to = work.query + r * work.query_stride;
    int64_t d = 0;
    for (; d + kLanes <= args.size; d += kLanes) store(to + d, load(from + d));
    if (d < args.size) {
      store(to + d, load_n(from + d, args.size - d));
      d += kLanes;
    }
    for (; d < work.columns; d += kLanes) store(to + d, zero());
    const float sink = args.sinks ? args.sinks[work.head(r)] : -INFINITY;
    work.largest[r] = sink;
    // exp(sink - sink); infinity and NaN must give NaN
    work.total[r] = sink == -INFINITY ? 0.0f : 1.0f + (sink - sink);
  }
}

// Scores of the row r for the keys [first, first + count) to weights; rescales what has been summed
// so far. kPlain: neither mask nor alibi nor softcap, and a positive scale.
template <class T, bool kPlain>
IPEX_INLINE void weigh(Work<T>& work, int64_t r, int64_t first, int64_t count, bool reload_mask,
                       bool is_first) {
  constexpr bool kFast = kReducedPrecision<T>;
  const AttentionArgs& args = work.args;
  float* s = work.scores + r * kScoreStride;
  Operand<T>* w = work.weights + r * kWeightStride;
  const int64_t padded = round_up(count, 32), query = work.query_of(r);
  const KeyRange seen = visible(args, first + count, work.sequence.shift, query, query);
  if (reload_mask)
    load_mask<T>(args, work.sequence.mask,
                 work.head(r) * args.mask_strides.head + query * args.mask_strides.row +
                     first * args.mask_key_stride,
                 count, work.mask);
  const int64_t begin = seen.begin > first ? seen.begin - first : 0, end = seen.end - first;
  if (begin >= end) {
    clear(w, padded);
    return;
  }
  const int64_t start = begin / kLanes * kLanes;
  float factor = args.scale;
  if constexpr (!kPlain) {
    if (args.softcap != 0.0f) {
      cap_scores<kFast>(s, args.scale, args.softcap, start, end);
      factor = 1.0f;
    }
    if (work.sequence.alibi) {
      add_alibi(s, factor, work.sequence.alibi[work.head(r)],
                query + work.sequence.shift - first - start, start, end);
      factor = 1.0f;
    }
    if (work.sequence.near) {
      const int64_t row = (query * args.heads + work.head(r)) * args.near_keys;
      add_near(s, factor, static_cast<const T*>(work.sequence.near) + row, args.near_keys,
               query + work.sequence.shift - first, start, end);
      factor = 1.0f;
    }
  }
  for (int64_t j = start; j < begin; ++j) s[j] = -INFINITY;
  float block;
  if constexpr (kPlain) {
    block = find_max(s, start, end) * factor;
  } else {
    block = add_mask(s, work.mask, factor, start, end);
    factor = 1.0f;
  }
  // All masked or all NaN: only a mask makes zeros.
  if (block == -INFINITY && has_nan(s, begin, end)) block = NAN;
  const float before = work.largest[r];
  // Written so that a NaN takes the first branch: it shall reach the result.
  const float now = block <= before ? before : block;
  if (now == -INFINITY) {  // nothing visible yet
    clear(w, padded);
    return;
  }
  const float sum = exponentiate(s, w, Exponential<kFast, kPlain>(factor, now), start, end, padded);
  if (now != before && before != -INFINITY) {
    const float change = std::exp(before - now);
    work.total[r] *= change;
    if (!is_first) scale_row(work.out + r * work.columns, change, work.columns);
  }
  work.largest[r] = now;
  work.total[r] += sum;
}

template <class T>
IPEX_INLINE void finish(const Work<T>& work) {
  const AttentionArgs& args = work.args;
  for (int64_t r = 0; r < work.rows; ++r) {
    // A query that sees no key gives zeros.
    const f32v factor = set1(work.largest[r] == -INFINITY ? 0.0f : args.out_scale / work.total[r]);
    const float* from = work.out + r * work.columns;
    T* to = static_cast<T*>(work.sequence.out) + work.head(r) * args.out_strides.head +
            work.query_of(r) * args.out_strides.row;
    int64_t d = 0;
    for (; d + kLanes <= args.size; d += kLanes) store(to + d, load(from + d) * factor);
    if (d < args.size) store_n(to + d, load(from + d) * factor, args.size - d);
  }
}

template <class T, bool kPlain>
void run_item(const AttentionArgs& args, const AttentionItem& item, char* memory, char* scratch,
              TileScope& scope) {
  Work<T> work(args, item, scratch);
  start(work);
  const AttentionSequence& sequence = work.sequence;
  const Packed<T> packed = packed_head<T>(args, sequence, memory + item.packed);
  const int64_t depth = round_up(args.size, kDepthStep<T>);
  const KeyRange seen =
      visible(args, sequence.keys, sequence.shift, item.query, item.query + item.queries - 1);
  const int64_t from = seen.begin / kPanel * kPanel;
  if constexpr (!kPlain)  // what an absent mask adds
    std::memset(work.mask, 0, sizeof(float) * kKeyBlock);
  if (from >= seen.end) std::memset(work.out, 0, sizeof(float) * work.rows * work.columns);
  for (int64_t first = from; first < seen.end; first = first / kKeyBlock * kKeyBlock + kKeyBlock) {
    int64_t count = first / kKeyBlock * kKeyBlock + kKeyBlock - first;
    if (seen.end - first < count) count = seen.end - first;
    const int64_t padded = round_up(count, 32), at = first - sequence.begin;
    for (int64_t c = 0; c < padded; c += 2 * kPanel)
      product<T>(scope, work.query, work.query_stride, work.rows,
                 packed.keys + (at + c) / kPanel * packed.panel, packed.panel, c + kPanel < padded,
                 depth, work.scores + c, kScoreStride, false);

    for (int64_t r = 0; r < work.rows; ++r) {
      // A mask that is the same for all rows is read once per block.
      const bool reload = !kPlain && args.mask_kind != MaskKind::kNone &&
                          (r == 0 || args.mask_strides.row != 0 || args.mask_strides.head != 0);
      weigh<T, kPlain>(work, r, first, count, reload, first == from);
    }

    for (int64_t d = 0; d < work.columns; d += 2 * kPanel)
      product<T>(scope, work.weights, kWeightStride, work.rows,
                 packed.values + d / kPanel * packed.distance + at * kPanel, packed.distance,
                 d + kPanel < work.columns, padded, work.out + d, work.columns, first != from);
  }
  finish(work);
}

template <class T>
void run(const AttentionArgs& args, const AttentionItem* items, int64_t count, char* packed,
         char* scratch) {
  TileScope scope;
  const bool plain = args.mask_kind == MaskKind::kNone && args.softcap == 0.0f && args.scale > 0.0f;
  for (int64_t i = 0; i < count; ++i) {
    const AttentionSequence& sequence = args.sequences[items[i].sequence];
    if (plain && !sequence.alibi && !sequence.near)
      run_item<T, true>(args, items[i], packed, scratch, scope);
    else
      run_item<T, false>(args, items[i], packed, scratch, scope);
  }
}

}  // namespace
}  // namespace ipex

#define IPEX_DEFINE_ATTENTION(suffix, type)                                                     \
  int64_t ipex_k_attention_rows_##suffix() { return ipex::kRows<ipex::type>; }                  \
  void ipex_k_attention_pack_##suffix(const ipex::AttentionArgs* args,                          \
                                      const ipex::AttentionPack* items, int64_t count,          \
                                      char* packed) {                                           \
    for (int64_t i = 0; i < count; ++i) ipex::pack_block<ipex::type>(*args, items[i], packed);  \
  }                                                                                             \
  void ipex_k_attention_##suffix(const ipex::AttentionArgs* args,                               \
                                 const ipex::AttentionItem* items, int64_t count, char* packed, \
                                 char* scratch) {                                               \
    ipex::run<ipex::type>(*args, items, count, packed, scratch);                                \
  }
namespace ipex {
using Float = float;
}
IPEX_DEFINE_ATTENTION(f32, Float)
IPEX_DEFINE_ATTENTION(bf16, BFloat16)
IPEX_DEFINE_ATTENTION(f16, Half)
