// SPDX-License-Identifier: Apache-2.0
// Attention over whole sequences with an online softmax: scores never leave the cache.
//
// Keys and values are packed once and shared by all queries (and by the heads of a group). A task
// takes up to 32 queries of one head through the key blocks: scores = Q K^T, running maximum and
// sum per query, out += P V.
#include "attention.h"

#include <cmath>
#include <type_traits>

#include "ipex/gemm.h"
#include "ipex/vec_math.h"
#include "pack.h"

namespace ipex {
namespace {

// With VDPBF16PS or AMX the weights of a bfloat16 product are bfloat16; everywhere else they stay
// float.
template <class T>
inline constexpr bool kRoundWeights = false;
#if IPEX_HAVE_AVX512_BF16
template <>
inline constexpr bool kRoundWeights<BFloat16> = true;
#endif

struct Head {
  int64_t batch, head, kv;  // kv: number of the packed head
};

template <class T>
struct Packed {
  T* keys;
  T* values;
};

template <class T>
IPEX_INLINE Packed<T> packed_head(const AttentionArgs& args, int64_t kv) {
  const int64_t keys = packed_keys(args.keys, args.size);
  T* base = reinterpret_cast<T*>(args.packed) +
            (kv - args.packed_first) * (keys + packed_values(args.keys, args.size));
  return {base, base + keys};
}

template <class T>
IPEX_INLINE void pack(const AttentionArgs& args, int64_t begin, int64_t end) {
  const int64_t blocks = (args.keys + kKeyBlock - 1) / kKeyBlock;
  const int64_t depth = round_up(args.keys, 32);
  for (int64_t i = begin; i < end; ++i) {
    const int64_t kv = i / blocks, first = i % blocks * kKeyBlock;
    const int64_t b = kv / args.kv_heads, h = kv % args.kv_heads;
    const int64_t last = first + kKeyBlock < args.keys ? first + kKeyBlock : args.keys;
    const Packed<T> to = packed_head<T>(args, kv);
    const T* keys =
        static_cast<const T*>(args.key) + b * args.key_strides.batch + h * args.key_strides.head;
    for (int64_t j = first; j < last; j += kPanel)
      pack_keys(keys + j * args.key_strides.row, args.key_strides.row,
                last - j < kPanel ? last - j : kPanel, args.size,
                to.keys + j / kPanel * panel_size<T>(args.size));
    const T* values = static_cast<const T*>(args.value) + b * args.value_strides.batch +
                      h * args.value_strides.head;
    pack_values(values, args.value_strides.row, first, round_up(last, 32), args.keys, args.size,
                depth, to.values);
  }
}

// The mask of one query and the keys [first, first + count) as an addend.
template <class T>
IPEX_INLINE void load_mask(const AttentionArgs& args, const Head& at, int64_t query, int64_t first,
                           int64_t count, float* to) {
  const int64_t offset = at.batch * args.mask_strides.batch + at.head * args.mask_strides.head +
                         query * args.mask_strides.row + first * args.mask_key_stride;
  const int64_t step = args.mask_key_stride;
  if (args.mask_kind == MaskKind::kBool) {
    const auto* mask = static_cast<const uint8_t*>(args.mask) + offset;
    for (int64_t j = 0; j < count; ++j) to[j] = mask[j * step] ? 0.0f : -INFINITY;
  } else if (args.mask_kind == MaskKind::kFloat) {
    const auto* mask = static_cast<const float*>(args.mask) + offset;
    for (int64_t j = 0; j < count; ++j) to[j] = mask[j * step];
  } else if (step == 1) {
    const T* mask = static_cast<const T*>(args.mask) + offset;
    int64_t j = 0;
    for (; j + kLanes <= count; j += kLanes) store(to + j, load(mask + j));
    if (j < count) store_n(to + j, load_n(mask + j, count - j), count - j);
  } else {
    const f32v value = load_n(static_cast<const T*>(args.mask) + offset, 1);
    for (int64_t j = 0; j < count; ++j) to[j] = value[0];
  }
}

// s = s * scale + mask; returns the maximum.
IPEX_INLINE float scale_scores(float* s, const float* mask, float scale, int64_t count) {
  f32v largest = set1(-INFINITY);
  const f32v factor = set1(scale);
  const auto one = [&](f32v score, f32v addend) IPEX_LAMBDA { return fma(score, factor, addend); };
  int64_t j = 0;
  for (; j + kLanes <= count; j += kLanes) {
    const f32v v = mask ? one(load(s + j), load(mask + j)) : load(s + j) * factor;
    store(s + j, v);
    largest = max(largest, v);
  }
  if (j < count) {
    const int64_t n = count - j;
    const f32v v = mask ? one(load_n(s + j, n), load_n(mask + j, n)) : load_n(s + j, n) * factor;
    store_n(s + j, v, n);
    largest = max(largest, keep_n(v, n, largest));
  }
  return reduce_max(largest);
}

// Whether any of the scores is NaN. The maximum does not tell: it loses a NaN to a number.
IPEX_INLINE bool has_nan(const float* s, int64_t count) {
  bool found = false;
  for (int64_t j = 0; j < count; ++j) found |= s[j] != s[j];
  return found;
}

// weights = exp(s - largest), zero from `count` to `padded`; returns their sum.
template <bool kFast, class W>
IPEX_INLINE float exponentiate(const float* s, W* weights, float largest, int64_t count,
                               int64_t padded) {
  f32v total = zero();
  const f32v shift = set1(largest);
  int64_t j = 0;
  for (; j + kLanes <= count; j += kLanes) {
    const f32v e = exp_nonpositive_as<kFast>(load(s + j) - shift);
    total = total + e;
    store(weights + j, e);
  }
  if (j < count) {
    const f32v e =
        keep_n(exp_nonpositive_as<kFast>(load_n(s + j, count - j) - shift), count - j, zero());
    total = total + e;
    store(weights + j, e);  // padding is a multiple of kLanes: the row has room
    j += kLanes;
  }
  for (; j < padded; j += kLanes) store(weights + j, zero());
  return reduce_add(total);
}

IPEX_INLINE void scale_row(float* row, float factor, int64_t count) {
  for (int64_t d = 0; d < count; d += kLanes) store(row + d, load(row + d) * set1(factor));
}

template <class T>
IPEX_INLINE void run_block(const AttentionArgs& args, const Head& at, int64_t first_query,
                           int64_t rows, char* scratch, TileScope& scope) {
  using W = std::conditional_t<kRoundWeights<T>, T, float>;
  constexpr bool kFast = kReducedPrecision<T>;
  const int64_t columns = round_up(args.size, kPanel), depth = round_up(args.keys, 32);
  float* scores = reinterpret_cast<float*>(scratch);
  W* weights = reinterpret_cast<W*>(scores + kQueryBlock * kKeyBlock);
  float* out = scores + 2 * kQueryBlock * kKeyBlock;
  float* mask = out + kQueryBlock * columns;
  float largest[kQueryBlock], total[kQueryBlock];
  for (int64_t r = 0; r < rows; ++r) {
    largest[r] = -INFINITY;
    total[r] = 0.0f;
    for (int64_t d = 0; d < columns; d += kLanes) store(out + r * columns + d, zero());
  }

  const T* query = static_cast<const T*>(args.query) + at.batch * args.query_strides.batch +
                   at.head * args.query_strides.head + first_query * args.query_strides.row;
  const Packed<T> packed = packed_head<T>(args, at.kv);
  const int64_t panel = panel_size<T>(args.size);
  const int64_t seen =
      args.is_causal && first_query + rows < args.keys ? first_query + rows : args.keys;
  for (int64_t first = 0; first < seen; first += kKeyBlock) {
    const int64_t count = seen - first < kKeyBlock ? seen - first : kKeyBlock;
    const int64_t padded = round_up(count, 32);
    const T* k = packed.keys + first / kPanel * panel;
    for (int64_t c = 0; c < padded; c += 2 * kPanel)
      multiply(scope, query, args.query_strides.row, rows, k + c / kPanel * panel,
               c + kPanel < padded ? k + (c / kPanel + 1) * panel : nullptr, args.size, scores + c,
               kKeyBlock, false);

    for (int64_t r = 0; r < rows; ++r) {
      float* s = scores + r * kKeyBlock;
      W* w = weights + r * kKeyBlock;
      int64_t visible = count;
      if (args.is_causal && first_query + r + 1 < first + count)
        visible = first_query + r + 1 > first ? first_query + r + 1 - first : 0;
      // A mask that is the same for all queries is read once per block.
      const bool masked = args.mask_kind != MaskKind::kNone;
      if (masked && (r == 0 || args.mask_strides.row != 0))
        load_mask<T>(args, at, first_query + r, first, count, mask);
      float block =
          visible > 0 ? scale_scores(s, masked ? mask : nullptr, args.scale, visible) : -INFINITY;
      // All masked or all NaN: only a mask makes zeros.
      if (block == -INFINITY && has_nan(s, visible)) block = NAN;
      const float before = largest[r];
      // Written so that a NaN takes the first branch: it shall reach the result.
      const float now = block <= before ? before : block;
      if (now == -INFINITY) {  // nothing visible yet
        exponentiate<kFast>(s, w, 0.0f, 0, padded);
        continue;
      }
      const float sum = exponentiate<kFast>(s, w, now, visible, padded);
      if (now != before && first > 0) {
        const float factor = std::exp(before - now);
        total[r] *= factor;
        scale_row(out + r * columns, factor, columns);
      }
      largest[r] = now;
      total[r] += sum;
    }

    for (int64_t d = 0; d < columns; d += 2 * kPanel) {
      const T* v0 = packed.values + d * depth + first * kPanel;
      const T* v1 = d + kPanel < columns ? v0 + kPanel * depth : nullptr;
      if constexpr (kRoundWeights<T>)
        multiply(scope, weights, kKeyBlock, rows, v0, v1, padded, out + d, columns, true);
      else
        multiply_float(weights, kKeyBlock, rows, v0, v1, padded, out + d, columns, true);
    }
  }

  T* y = static_cast<T*>(args.out) + at.batch * args.out_strides.batch +
         at.head * args.out_strides.head + first_query * args.out_strides.row;
  for (int64_t r = 0; r < rows; ++r) {
    // A query that sees no key gives zeros.
    const f32v factor = set1(largest[r] == -INFINITY ? 0.0f : 1.0f / total[r]);
    const float* o = out + r * columns;
    T* row = y + r * args.out_strides.row;
    int64_t d = 0;
    for (; d + kLanes <= args.size; d += kLanes) store(row + d, load(o + d) * factor);
    if (d < args.size) store_n(row + d, load(o + d) * factor, args.size - d);
  }
}

template <class T>
IPEX_INLINE void run(const AttentionArgs& args, int64_t rows, int64_t begin, int64_t end,
                     char* scratch) {
  const int64_t blocks = (args.queries + rows - 1) / rows;
  TileScope scope;
  for (int64_t i = begin; i < end; ++i) {
    Head at;
    at.batch = i / blocks / args.heads;
    at.head = i / blocks % args.heads;
    at.kv = at.batch * args.kv_heads + at.head / (args.heads / args.kv_heads);
    int64_t block = i % blocks;
    // Later queries of a causal mask see more keys: short and long tasks alternate so that threads
    // finish together.
    if (args.is_causal) block = block % 2 ? blocks - 1 - block / 2 : block / 2;
    const int64_t first = block * rows;
    const int64_t count = args.queries - first < rows ? args.queries - first : rows;
    run_block<T>(args, at, first, count, scratch, scope);
  }
}

}  // namespace
}  // namespace ipex

#define IPEX_DEFINE_ATTENTION(suffix, type)                                                    \
  void ipex_k_attention_pack_##suffix(const ipex::AttentionArgs* args, int64_t begin,          \
                                      int64_t end) {                                           \
    ipex::pack<ipex::type>(*args, begin, end);                                                 \
  }                                                                                            \
  void ipex_k_attention_##suffix(const ipex::AttentionArgs* args, int64_t rows, int64_t begin, \
                                 int64_t end, char* scratch) {                                 \
    ipex::run<ipex::type>(*args, rows, begin, end, scratch);                                   \
  }
namespace ipex {
using Float = float;
}
IPEX_DEFINE_ATTENTION(f32, Float)
IPEX_DEFINE_ATTENTION(bf16, BFloat16)
IPEX_DEFINE_ATTENTION(f16, Half)
