// SPDX-License-Identifier: Apache-2.0
// Attention of a few queries over cached keys and values, with an online softmax.
//
// An item is a range of keys of some key-value heads. Its query rows are all that read these keys:
// the heads of a group, the queries of a sequence and the beams of a prompt. Blocks of 64 keys are
// scored, weighted and summed for all rows at once, so that each row of the cache is read from
// memory once.
#include "decode.h"

#include <cmath>
#include <type_traits>

#include "ipex/vec_math.h"
#include "rows.h"

namespace ipex {
namespace {

// Working memory of one item; see decode_scratch_bytes.
class Room {
 public:
  explicit Room(char* base) : at_(base) {}
  template <class U>
  U* take(int64_t count) {
    U* here = reinterpret_cast<U*>(at_);
    at_ += decode_round_up(count * static_cast<int64_t>(sizeof(U)), 64);
    return here;
  }

 private:
  char* at_;
};

struct Row {
  int64_t sequence, head, query;
};

// Row r of an item: beams, then heads of the group, then queries.
IPEX_INLINE Row row_of(const DecodeArgs& args, const DecodeItem& item, int64_t kv_head, int64_t r) {
  const int64_t group = args.heads / args.kv_heads;
  return {item.unit * args.beams + r / args.queries / group,
          kv_head * group + r / args.queries % group, r % args.queries};
}

// The mask of one query row and the keys [first, first + count), added to the scores.
template <class T>
IPEX_INLINE void add_mask(const DecodeArgs& args, const Row& row, int64_t first, int64_t count,
                          float* s) {
  const int64_t step = args.mask_key_stride;
  const int64_t offset = row.sequence * args.mask_strides.sequence +
                         row.head * args.mask_strides.head + row.query * args.mask_strides.row +
                         first * step;
  if (args.mask_kind == DecodeMask::kBool) {
    const auto* mask = static_cast<const uint8_t*>(args.mask) + offset;
    for (int64_t j = 0; j < count; ++j)
      if (!mask[j * step]) s[j] = -INFINITY;
  } else if (args.mask_kind == DecodeMask::kFloat) {
    const auto* mask = static_cast<const float*>(args.mask) + offset;
    for (int64_t j = 0; j < count; ++j) s[j] += mask[j * step];
  } else {
    const T* mask = static_cast<const T*>(args.mask) + offset;
    for (int64_t j = 0; j < count; ++j) s[j] += load_n(mask + j * step, 1)[0];
  }
}

IPEX_INLINE bool has_nan(const float* s, int64_t count) {
  bool found = false;
  for (int64_t j = 0; j < count; ++j) found |= s[j] != s[j];
  return found;
}

// Scores of one row and one block: [low, high) are visible, the others become -infinity. Returns
// the maximum; NaN if that is all there is.
template <class T>
IPEX_INLINE float finish_scores(const DecodeArgs& args, const Row& row, int64_t first, int64_t low,
                                int64_t high, const float* key_scales, float* s) {
  for (int64_t j = 0; j < kDecodeBlock; j += kLanes) {
    f32v v = load(s + j) * (load(key_scales + j) * set1(args.scale));
    if (args.softcap > 0.0f) v = tanh(v * set1(1.0f / args.softcap)) * set1(args.softcap);
    store(s + j, v);
  }
  if (args.alibi) {
    const float slope = args.alibi[row.head];
    const int64_t query =
        args.lengths[row.sequence] - args.queries + row.query;  // its own position
    for (int64_t j = low; j < high; ++j) s[j] += slope * static_cast<float>(first + j - query);
  }
  for (int64_t j = 0; j < low; ++j) s[j] = -INFINITY;
  for (int64_t j = high; j < kDecodeBlock; ++j) s[j] = -INFINITY;
  if (args.mask_kind != DecodeMask::kNone) add_mask<T>(args, row, first + low, high - low, s + low);
  f32v largest = set1(-INFINITY);
  for (int64_t j = 0; j < kDecodeBlock; j += kLanes) largest = max(largest, load(s + j));
  const float block = reduce_max(largest);
  return block == -INFINITY && has_nan(s + low, high - low) ? NAN : block;
}

// weights = exp(s - largest) * value scale; returns the sum without the scales.
template <bool kFast, class W>
IPEX_INLINE float weigh(const float* s, float largest, const float* value_scales, W* weights) {
  f32v total = zero();
  const f32v shift = set1(largest);
  for (int64_t j = 0; j < kDecodeBlock; j += kLanes) {
    // Keys that are not visible: exp_fast is exactly 0 there only at -infinity.
    const f32v e = exp_nonpositive_as<kFast>(load(s + j) - shift);
    total = total + e;
    store(weights + j, e * load(value_scales + j));
  }
  return reduce_add(total);
}

IPEX_INLINE void scale_floats(float* row, float factor, int64_t count) {
  for (int64_t d = 0; d < count; d += kLanes) store(row + d, load(row + d) * set1(factor));
}

// The output of a row: acc / total, where `sink` joins the denominator. A row that sees no key
// gives zeros.
template <class P, class T>
IPEX_INLINE void finish_row(const DecodeArgs& args, const Row& row, float largest, float total,
                            const float* acc, T* room) {
  float factor = 0.0f;
  if (largest != -INFINITY) {
    if (args.sinks) {
      const float sink = args.sinks[row.head];
      const float top = sink > largest ? sink : largest;
      const float shrink = std::exp(largest - top);
      factor = shrink / (total * shrink + std::exp(sink - top));
    } else {
      factor = 1.0f / total;
    }
  }
  P::store_row(acc, factor, decode_padded(args.size), room);
  std::memcpy(static_cast<T*>(args.out) + row.sequence * args.out_strides.sequence +
                  row.head * args.out_strides.head + row.query * args.out_strides.row,
              room, sizeof(T) * static_cast<size_t>(args.size));
}

template <class T, class E>
class Attend {
  using P = typename ProductsFor<T, E>::Type;
  using Query = typename P::Query;
  using Weight = typename P::Weight;

 public:
  Attend(const DecodeArgs& args, char* scratch)
      : args_(args),
        padded_(decode_padded(args.size)),
        head_rows_(decode_head_rows(args)),
        whole_(args.size % (2 * kLanes) == 0),
        width_(decode_round_up(args.size, 2 * kLanes)) {
    Room room(scratch);
    const int64_t rows = head_rows_ * args.item_heads;
    acc_ = room.take<float>(rows * padded_);
    query_ = room.take<Query>(rows * padded_);
    largest_ = room.take<float>(rows);
    total_ = room.take<float>(rows);
    scores_ = room.take<float>(head_rows_ * kDecodeBlock);
    weights_ = room.take<Weight>(head_rows_ * kDecodeBlock);
    list_ = room.take<int32_t>(head_rows_);
    row_copy_ = room.take<T>(padded_);
    rows_ = room.take<Row>(rows);
    if (!whole_) {
      key_copy_ = room.take<E>(kDecodeBlock * padded_);
      value_copy_ = room.take<E>(kDecodeBlock * padded_);
    }
  }

  void run(int64_t index) {
    const DecodeItem& item = args_.items[index];
    start(item);
    for (int64_t first = item.first; first < item.last; first += kDecodeBlock) {
      const int64_t count = item.last - first < kDecodeBlock ? item.last - first : kDecodeBlock;
      for (int64_t h = 0; h < args_.item_heads; ++h) {
        if (args_.beams == 1) {
          for (int64_t r = 0; r < head_rows_; ++r) list_[r] = static_cast<int32_t>(r);
          block(item, h, item.unit, first, count, head_rows_);
        } else {
          beams(item, h, first, count);
        }
      }
    }
    finish(item, index);
  }

  // Combines the parts of one unit, which follow each other from `first` on.
  void combine(int64_t first) {
    const DecodeItem& item = args_.items[first];
    const int64_t rows = head_rows_ * args_.item_heads, stride = decode_partial_stride(args_);
    for (int64_t r = 0; r < rows; ++r) {
      const float* parts = args_.partial + (first * rows + r) * stride;
      float largest = -INFINITY, total = 0.0f;
      for (int64_t p = 0; p < item.parts; ++p) {
        const float one = parts[p * rows * stride];
        if (!(one <= largest)) largest = one;  // NaN stays
        if (largest != largest) break;
      }
      for (int64_t d = 0; d < padded_; d += kLanes) store(acc_ + d, zero());
      for (int64_t p = 0; p < item.parts; ++p) {
        const float* part = parts + p * rows * stride;
        if (part[0] == -INFINITY) continue;
        const float factor = std::exp(part[0] - largest);
        total += part[1] * factor;
        for (int64_t d = 0; d < padded_; d += kLanes)
          store(acc_ + d, fma(load(part + 16 + d), set1(factor), load(acc_ + d)));
      }
      const int64_t kv_head = item.head + r / head_rows_;
      finish_row<P>(args_, row_of(args_, item, kv_head, r % head_rows_), largest, total, acc_,
                    row_copy_);
    }
  }

 private:
  void start(const DecodeItem& item) {
    for (int64_t h = 0; h < args_.item_heads; ++h)
      for (int64_t r = 0; r < head_rows_; ++r) {
        const Row row = row_of(args_, item, item.head + h, r);
        const int64_t at = h * head_rows_ + r;
        rows_[at] = row;
        const T* from = static_cast<const T*>(args_.query) +
                        row.sequence * args_.query_strides.sequence +
                        row.head * args_.query_strides.head + row.query * args_.query_strides.row;
        std::memset(row_copy_, 0, sizeof(T) * static_cast<size_t>(padded_));
        std::memcpy(row_copy_, from, sizeof(T) * static_cast<size_t>(args_.size));
        P::prepare(row_copy_, padded_, query_ + at * padded_);
        for (int64_t d = 0; d < padded_; d += kLanes) store(acc_ + at * padded_ + d, zero());
        largest_[at] = -INFINITY;
        total_[at] = 0.0f;
      }
  }

  // Beams whose rows are the same for all keys of the block are one set of query rows. Those that
  // differ somewhere come one after the other, while what they share is in the cache.
  void beams(const DecodeItem& item, int64_t h, int64_t first, int64_t count) {
    const int64_t rows = head_rows_ / args_.beams;
    const auto table = [&](int64_t beam) {
      return args_.kv.table + (item.unit * args_.beams + beam) * args_.kv.table_stride + first;
    };
    const auto same = [&](int64_t a, int64_t b) {
      return std::memcmp(table(a), table(b), sizeof(int32_t) * static_cast<size_t>(count)) == 0;
    };
    for (int64_t beam = 0; beam < args_.beams; ++beam) {
      bool done = false;
      for (int64_t b = 0; b < beam && !done; ++b) done = same(b, beam);
      if (done) continue;
      int64_t n = 0;
      for (int64_t b = beam; b < args_.beams; ++b)
        if (b == beam || same(beam, b))
          for (int64_t r = 0; r < rows; ++r) list_[n++] = static_cast<int32_t>(b * rows + r);
      block(item, h, item.unit * args_.beams + beam, first, count, n);
    }
  }

  // Where the rows of a block are; the pointers behind `count` repeat the last one, up to kKeyStep.
  IPEX_INLINE void locate(const KvPart& part, int64_t sequence, int64_t head, int64_t first,
                          int64_t count, const E** rows) {
    const int64_t step = part.strides.row;
    for_segments(args_.kv, sequence, first, first + count,
                 [&](int64_t position, const KvSegment& segment) IPEX_LAMBDA {
                   const E* row = kv_row<E>(part, segment.block, head, segment.row);
                   const E** to = rows + (position - first);
                   for (int64_t i = 0; i < segment.count; ++i) to[i] = row + i * step;
                 });
    for (int64_t j = count; j % kKeyStep; ++j) rows[j] = rows[count - 1];
  }

  // Rows whose size does not fill vectors are copied.
  void pad(int64_t count, E* copy, const E** rows) {
    for (int64_t j = 0; j < count; ++j) {
      E* to = copy + j * padded_;
      std::memcpy(to, rows[j], sizeof(E) * static_cast<size_t>(args_.size));
      std::memset(to + args_.size, 0, sizeof(E) * static_cast<size_t>(padded_ - args_.size));
      rows[j] = to;
    }
    for (int64_t j = count; j % kKeyStep; ++j) rows[j] = rows[count - 1];
  }

  // Scales of the rows of a block, 0 behind `count`.
  IPEX_INLINE void load_scales(const KvPart& part, int64_t sequence, int64_t head, int64_t first,
                               int64_t count, float* scales) {
    for (int64_t j = 0; j < kDecodeBlock; j += kLanes) store(scales + j, set1(part.scale));
    if (part.scales)
      for_segments(args_.kv, sequence, first, first + count,
                   [&](int64_t position, const KvSegment& segment) IPEX_LAMBDA {
                     for (int64_t i = 0; i < segment.count; ++i)
                       scales[position - first + i] =
                           kv_scale(part, segment.block, head, segment.row + i);
                   });
    for (int64_t j = count; j < kDecodeBlock; ++j) scales[j] = 0.0f;
  }

  // One block of keys for the `n` query rows of list_ that read them.
  void block(const DecodeItem& item, int64_t h, int64_t sequence, int64_t first, int64_t count,
             int64_t n) {
    const E* keys[kDecodeBlock];
    const E* values[kDecodeBlock];
    alignas(64) float key_scales[kDecodeBlock], value_scales[kDecodeBlock];
    const int64_t kv_head = item.head + h;
    locate(args_.kv.key, sequence, kv_head, first, count, keys);
    locate(args_.kv.value, sequence, kv_head, first, count, values);
    load_scales(args_.kv.key, sequence, kv_head, first, count, key_scales);
    load_scales(args_.kv.value, sequence, kv_head, first, count, value_scales);
    // The keys after these: of the next head, or of the next block of the first one.
    const E* ahead[kDecodeBlock];
    const bool last_head = h + 1 == args_.item_heads;
    const int64_t then = last_head ? first + kDecodeBlock : first;
    int64_t coming = item.last - then < count ? item.last - then : count;
    if (coming <= 0) coming = 0;
    if (coming)
      locate(args_.kv.key, sequence, last_head ? item.head : kv_head + 1, then, coming, ahead);
    for (int64_t j = coming; j < count; ++j) ahead[j] = keys[j];
    if (!whole_) {
      pad(count, key_copy_, keys);
      pad(count, value_copy_, values);
    }
    const int64_t base = h * head_rows_;

    constexpr int64_t kRows = 16;  // rows that are handled at a time
    for (int64_t begin = 0; begin < n; begin += kRows) {
      const int64_t rows = n - begin < kRows ? n - begin : kRows;
      const Query* q[kRows];
      float* s[kRows];
      float* acc[kRows];
      const Weight* w[kRows];
      for (int64_t i = 0; i < rows; ++i) {
        const int64_t r = list_[begin + i];
        q[i] = query_ + (base + r) * padded_;
        s[i] = scores_ + i * kDecodeBlock;
        acc[i] = acc_ + (base + r) * padded_;
        w[i] = weights_ + i * kDecodeBlock;
      }
      score_rows<P>(q, rows, keys, count, width_, values, s);
      for (int64_t i = 0; i < rows; ++i) {
        const int64_t r = list_[begin + i];
        update(rows_[base + r], base + r, first, count, key_scales, value_scales, s[i],
               weights_ + i * kDecodeBlock);
      }
      add_rows<P>(acc, rows, w, values, count, width_, ahead);
    }
  }

  // The softmax of one row over one more block.
  IPEX_INLINE void update(const Row& row, int64_t at, int64_t first, int64_t count,
                          const float* key_scales, const float* value_scales, float* s,
                          Weight* weights) {
    constexpr bool kFast = kReducedPrecision<T>;
    const int64_t position = args_.lengths[row.sequence] - args_.queries + row.query;
    int64_t high = position + 1 - first, low = 0;
    if (args_.sees_all || high > count) high = count;
    if (high < 0) high = 0;
    if (args_.window > 0) low = position + 1 - args_.window - first;
    if (low < 0) low = 0;
    if (low > high) low = high;
    const float block = finish_scores<T>(args_, row, first, low, high, key_scales, s);
    const float before = largest_[at];
    // Written so that a NaN takes the first branch: it shall reach the result.
    const float now = block <= before ? before : block;
    if (now == -INFINITY) {  // nothing visible yet
      for (int64_t j = 0; j < kDecodeBlock; j += kLanes) store(weights + j, zero());
      return;
    }
    const float sum = weigh<kFast>(s, now, value_scales, weights);
    if (now != before && before != -INFINITY) {
      const float factor = std::exp(before - now);
      total_[at] *= factor;
      scale_floats(acc_ + at * padded_, factor, padded_);
    }
    largest_[at] = now;
    total_[at] += sum;
  }

  void finish(const DecodeItem& item, int64_t index) {
    const int64_t rows = head_rows_ * args_.item_heads;
    for (int64_t r = 0; r < rows; ++r) {
      if (item.parts == 1) {
        const int64_t kv_head = item.head + r / head_rows_;
        finish_row<P>(args_, row_of(args_, item, kv_head, r % head_rows_), largest_[r], total_[r],
                      acc_ + r * padded_, row_copy_);
        continue;
      }
      float* part = args_.partial + (index * rows + r) * decode_partial_stride(args_);
      part[0] = largest_[r];
      part[1] = total_[r];
      std::memcpy(part + 16, acc_ + r * padded_, sizeof(float) * static_cast<size_t>(padded_));
    }
  }

  const DecodeArgs& args_;
  const int64_t padded_, head_rows_;
  const bool whole_;     // rows of the cache fill vectors
  const int64_t width_;  // elements of a row that are multiplied
  float* acc_;
  Query* query_;
  float *largest_, *total_, *scores_;
  Weight* weights_;
  int32_t* list_;
  T* row_copy_;
  Row* rows_;
  E* key_copy_ = nullptr;
  E* value_copy_ = nullptr;
};

// Calls f.operator()<E>() with what the cache holds.
template <class T, class F>
IPEX_INLINE void with_cache_type(KvType type, const F& f) {
  if (type == KvType::kSame)
    f.template operator()<T>();
  else if (type == KvType::kInt8)
    f.template operator()<Int8>();
  else
    f.template operator()<E5m2>();
}

template <class T>
IPEX_INLINE void run(const DecodeArgs& args, int64_t begin, int64_t end, char* scratch) {
  with_cache_type<T>(args.kv.type, [&]<class E>() {
    Attend<T, E> attend(args, scratch);
    for (int64_t i = begin; i < end; ++i) attend.run(i);
  });
}

template <class T>
IPEX_INLINE void combine(const DecodeArgs& args, const int32_t* first, int64_t begin, int64_t end,
                         char* scratch) {
  with_cache_type<T>(args.kv.type, [&]<class E>() {
    Attend<T, E> attend(args, scratch);
    for (int64_t i = begin; i < end; ++i)
      if (args.items[first[i]].parts > 1) attend.combine(first[i]);
  });
}

using Float = float;

}  // namespace
}  // namespace ipex

#define IPEX_DEFINE_DECODE(suffix, type)                                                          \
  void ipex_k_decode_attention_##suffix(const ipex::DecodeArgs* args, int64_t begin, int64_t end, \
                                        char* scratch) {                                          \
    ipex::run<ipex::type>(*args, begin, end, scratch);                                            \
  }                                                                                               \
  void ipex_k_decode_combine_##suffix(const ipex::DecodeArgs* args, const int32_t* first,         \
                                      int64_t begin, int64_t end, char* scratch) {                \
    ipex::combine<ipex::type>(*args, first, begin, end, scratch);                                 \
  }
IPEX_DEFINE_DECODE(f32, Float)
IPEX_DEFINE_DECODE(bf16, BFloat16)
IPEX_DEFINE_DECODE(f16, Half)
