// SPDX-License-Identifier: Apache-2.0
// Attention of a few queries over cached keys and values, with an online softmax.
//
// An item is a range of keys of some key-value heads. Its query rows are all that read these keys:
// the heads of a group, the queries of a sequence and the beams of a prompt. Blocks of 64 keys are
// scored, weighted and summed for all rows at once, so that each row of the cache is read from
// memory once.
#include "decode.h"

#include <cmath>
#include <cstring>

#include "rows.h"
#include "rows_int8.h"
#include "scores.h"

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

// Where the rows of a block are; the pointers behind `count` repeat the last one, up to kKeyStep.
template <class E>
IPEX_NOINLINE void locate(const KvView& kv, const KvPart& part, int64_t sequence, int64_t head,
                          int64_t first, int64_t count, const E** rows) {
  const int64_t step = part.strides.row;
  for_segments(kv, sequence, first, first + count,
               [&](int64_t position, const KvSegment& segment) IPEX_LAMBDA {
                 const E* row = kv_row<E>(part, segment.block, head, segment.row);
                 const E** to = rows + (position - first);
                 for (int64_t i = 0; i < segment.count; ++i) to[i] = row + i * step;
               });
  for (int64_t j = count; j % kKeyStep; ++j) rows[j] = rows[count - 1];
}

// Scales of the rows of a block, 0 behind `count`.
IPEX_NOINLINE void load_scales(const KvView& kv, const KvPart& part, int64_t sequence, int64_t head,
                               int64_t first, int64_t count, float* scales) {
  for (int64_t j = 0; j < kDecodeBlock; j += kLanes) store(scales + j, set1(part.scale));
  if (part.scales)
    for_segments(kv, sequence, first, first + count,
                 [&](int64_t position, const KvSegment& segment) IPEX_LAMBDA {
                   for (int64_t i = 0; i < segment.count; ++i)
                     scales[position - first + i] =
                         kv_scale(part, segment.block, head, segment.row + i);
                 });
  for (int64_t j = count; j < kDecodeBlock; ++j) scales[j] = 0.0f;
}

// What each row knows of the keys before a block. Parts that do not depend on the type of the cache
// are functions of their own: the products for one cache type are large enough.
template <class T, class Weight>
class OnlineSoftmax {
 protected:
  explicit OnlineSoftmax(const DecodeArgs& args) : args_(args), padded_(decode_padded(args.size)) {}

  // The softmax of one row over one more block.
  IPEX_NOINLINE void update(const Row& row, int64_t at, int64_t first, int64_t count,
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

  const DecodeArgs& args_;
  const int64_t padded_;
  float* acc_ = nullptr;
  float *largest_ = nullptr, *total_ = nullptr;
};

template <class T, class E>
class Attend : OnlineSoftmax<T, typename ProductsFor<T, E>::Type::Weight> {
  using P = typename ProductsFor<T, E>::Type;
  using Query = typename P::Query;
  using Weight = typename P::Weight;
  using Base = OnlineSoftmax<T, Weight>;
  using Base::acc_, Base::args_, Base::largest_, Base::padded_, Base::total_;

 public:
  Attend(const DecodeArgs& args, char* scratch)
      : Base(args),
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

  // `more`: item index + 1 comes next.
  void run(int64_t index, bool more) {
    const DecodeItem& item = args_.items[index];
    following_ = more ? &item + 1 : nullptr;
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

  // The keys that come after a block: of the next head, of the next block of the first head, or of
  // the next item, whose first block would have to wait for memory.
  IPEX_INLINE void locate_next(const DecodeItem& item, int64_t h, int64_t sequence, int64_t first,
                               int64_t count, const E* const* keys, const E** ahead) {
    const bool last_head = h + 1 == args_.item_heads;
    int64_t head = last_head ? item.head : item.head + h + 1;
    int64_t then = last_head ? first + kDecodeBlock : first, end = item.last;
    if (then >= end && following_) {
      sequence = following_->unit * args_.beams;
      head = following_->head;
      then = following_->first;
      end = following_->last;
    }
    const int64_t coming = then >= end ? 0 : end - then < count ? end - then : count;
    if (coming) locate(args_.kv, args_.kv.key, sequence, head, then, coming, ahead);
    for (int64_t j = coming; j < decode_round_up(count, kKeyStep); ++j) ahead[j] = keys[0];
  }

  // One block of keys for the `n` query rows of list_ that read them.
  void block(const DecodeItem& item, int64_t h, int64_t sequence, int64_t first, int64_t count,
             int64_t n) {
    const E* keys[kDecodeBlock];
    const E* values[kDecodeBlock];
    alignas(64) float key_scales[kDecodeBlock], value_scales[kDecodeBlock];
    const int64_t kv_head = item.head + h;
    locate(args_.kv, args_.kv.key, sequence, kv_head, first, count, keys);
    locate(args_.kv, args_.kv.value, sequence, kv_head, first, count, values);
    load_scales(args_.kv, args_.kv.key, sequence, kv_head, first, count, key_scales);
    load_scales(args_.kv, args_.kv.value, sequence, kv_head, first, count, value_scales);
    const E* ahead[kDecodeBlock];
    locate_next(item, h, sequence, first, count, keys, ahead);
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
      score_rows<P>(q, rows, keys, count, width_, begin == 0 ? values : nullptr, s);
      for (int64_t i = 0; i < rows; ++i) {
        const int64_t r = list_[begin + i];
        Base::update(rows_[base + r], base + r, first, count, key_scales, value_scales, s[i],
                     weights_ + i * kDecodeBlock);
      }
      add_rows<P>(acc, rows, w, values, count, width_, begin == 0 ? ahead : nullptr);
    }
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

  const DecodeItem* following_ = nullptr;  // the item after this one
  const int64_t head_rows_;
  const bool whole_;     // rows of the cache fill vectors
  const int64_t width_;  // elements of a row that are multiplied
  Query* query_;
  float* scores_;
  Weight* weights_;
  int32_t* list_;
  T* row_copy_;
  Row* rows_;
  E* key_copy_ = nullptr;
  E* value_copy_ = nullptr;
};

template <class T>
IPEX_INLINE void run(const DecodeArgs& args, int64_t begin, int64_t end, char* scratch) {
  with_cache_type<T>(args.kv.type, [&]<class E>() {
    Attend<T, E> attend(args, scratch);
    for (int64_t i = begin; i < end; ++i) attend.run(i, i + 1 < end);
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
