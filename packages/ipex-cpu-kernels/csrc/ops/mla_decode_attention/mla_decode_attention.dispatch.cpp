// SPDX-License-Identifier: Apache-2.0
// Latent attention: all heads read the same rows, so that decoding is a product of matrices.
//
// Scores are computed transposed, keys x heads: rows of the cache are the left operand as they lie
// in memory, and only the queries are packed, once per item. The softmax then runs along the keys
// with a head in each lane. Values are the first columns of the same rows, packed once per block.
#include "mla.h"

#include <cmath>
#include <type_traits>

#include "attention/pack.h"
#include "ipex/kernel/gemm.h"
#include "ipex/kernel/vec_math.h"

namespace ipex {
namespace {

// With VDPBF16PS or AMX the weights of a bfloat16 product are bfloat16, else float.
template <class T>
inline constexpr bool kRoundWeights = IPEX_HAVE_AVX512_BF16 && kIsBFloat16<T>;

template <class T>
class Latent {
  using W = std::conditional_t<kRoundWeights<T>, T, float>;
  static constexpr bool kFast = kReducedPrecision<T>;

 public:
  Latent(const MlaArgs& args, char* scratch)
      : args_(args), columns_(mla_round_up(args.rank, 32)), depth_(mla_round_up(args.width, 32)) {
    float* at = reinterpret_cast<float*>(scratch);
    const auto take = [&](int64_t floats) {
      float* here = at;
      at += mla_round_up(floats, 16);
      return here;
    };
    query_ = reinterpret_cast<T*>(take(kMlaHeads * depth_));
    out_ = take(kMlaHeads * columns_);
    scores_ = take(kMlaBlock * kMlaHeads);
    weights_ = reinterpret_cast<W*>(take(kMlaBlock * kMlaHeads));
    rows_ = reinterpret_cast<T*>(take(kMlaBlock * depth_));
    values_ = reinterpret_cast<T*>(take(kMlaBlock * columns_));
    largest_ = take(kMlaHeads);
    total_ = take(kMlaHeads);
    factor_ = take(kMlaHeads);
    row_ = reinterpret_cast<T*>(take(columns_));
  }

  void run(int64_t index, TileScope& scope) {
    const MlaItem& item = args_.items[index];
    const T* query = static_cast<const T*>(args_.query) + item.sequence * args_.query_sequence +
                     item.head * args_.query_head;
    const T* heads[kMlaHeads];
    for (int64_t h = 0; h < item.heads; ++h) heads[h] = query + h * args_.query_head;
    for (int64_t h = 0; h < item.heads; h += kPanel)
      pack_keys(heads + h, item.heads - h < kPanel ? item.heads - h : kPanel, args_.width,
                query_ + h * depth_);
    for (int64_t h = 0; h < kMlaHeads; ++h) {
      largest_[h] = -INFINITY;
      total_[h] = 0.0f;
    }
    std::memset(out_, 0, sizeof(float) * static_cast<size_t>(item.heads * columns_));
    for (int64_t first = item.first; first < item.last; first += kMlaBlock)
      block(item, first, item.last - first < kMlaBlock ? item.last - first : kMlaBlock, scope);
    finish(item, index);
  }

  void combine(int64_t first) {
    const MlaItem& item = args_.items[first];
    const int64_t stride = mla_partial_stride(args_);
    for (int64_t h = 0; h < item.heads; ++h) {
      const float* parts = args_.partial + (first * kMlaHeads + h) * stride;
      float largest = -INFINITY, total = 0.0f;
      for (int64_t p = 0; p < item.parts; ++p) {
        const float one = parts[p * kMlaHeads * stride];
        if (!(one <= largest)) largest = one;  // NaN stays
        if (largest != largest) break;
      }
      for (int64_t d = 0; d < columns_; d += kLanes) store(out_ + d, zero());
      for (int64_t p = 0; p < item.parts; ++p) {
        const float* part = parts + p * kMlaHeads * stride;
        const float factor = std::exp(part[0] - largest);
        total += part[1] * factor;
        for (int64_t d = 0; d < columns_; d += kLanes)
          store(out_ + d, fma(load(part + 16 + d), set1(factor), load(out_ + d)));
      }
      write(item, h, out_, total);
    }
  }

 private:
  const T* row_at(const MlaItem& item, int64_t position) const {
    const int64_t block =
        args_.table ? args_.table[item.sequence * args_.table_stride + position / args_.block_size]
                    : item.sequence;
    const int64_t row = args_.table ? position % args_.block_size : position;
    return static_cast<const T*>(args_.cache) + block * args_.block_stride + row * args_.row_stride;
  }

  // Rows [first, first + count) at equal distances: as they lie in one block, or copied together.
  const T* rows_of(const MlaItem& item, int64_t first, int64_t count, int64_t* stride) {
    *stride = args_.row_stride;
    if (!args_.table || first % args_.block_size + count <= args_.block_size)
      return row_at(item, first);
    *stride = args_.width;
    for (int64_t j = 0; j < count; ++j)
      std::memcpy(rows_ + j * args_.width, row_at(item, first + j),
                  sizeof(T) * static_cast<size_t>(args_.width));
    return rows_;
  }

  void block(const MlaItem& item, int64_t first, int64_t count, TileScope& scope) {
    int64_t stride;
    const T* rows = rows_of(item, first, count, &stride);
    multiply(scope, rows, stride, count, query_,
             item.heads > kPanel ? query_ + kPanel * depth_ : nullptr, args_.width, scores_,
             kMlaHeads, false);
    const int64_t padded = mla_round_up(count, 32);
    bool grown = false;
    for (int64_t h = 0; h < item.heads; h += kLanes) grown |= update(h, count, padded);
    if (grown && first > item.first)
      for (int64_t h = 0; h < item.heads; ++h) {
        const f32v factor = set1(factor_[h]);
        float* out = out_ + h * columns_;
        for (int64_t d = 0; d < columns_; d += kLanes) store(out + d, load(out + d) * factor);
      }
    const T* latents[kMlaBlock];
    for (int64_t j = 0; j < count; ++j) latents[j] = rows + j * stride;
    for (int64_t j = 0; j < count; j += kPanel)
      pack_values(latents + j, count - j < kPanel ? count - j : kPanel, args_.rank,
                  kPanel * kMlaBlock, values_ + j * kPanel);
    for (int64_t c = 0; c < columns_; c += 2 * kPanel) {
      const T* v0 = values_ + c * kMlaBlock;
      const T* v1 = c + kPanel < columns_ ? v0 + kPanel * kMlaBlock : nullptr;
      if constexpr (kRoundWeights<T>)
        multiply(scope, weights_, kMlaBlock, item.heads, v0, v1, padded, out_ + c, columns_, true);
      else
        multiply_float(weights_, kMlaBlock, item.heads, v0, v1, padded, out_ + c, columns_, true);
    }
  }

  // The softmax of kLanes heads over one more block: weights are stored heads x keys. Returns
  // whether a maximum has grown.
  IPEX_INLINE bool update(int64_t h, int64_t count, int64_t padded) {
    const f32v scale = set1(args_.scale);
    const float* scores = scores_ + h;
    const f32v before = load(largest_ + h);
    f32v now = before;
    for (int64_t j = 0; j < count; ++j) now = max(now, load(scores + j * kMlaHeads) * scale);
    f32v sum = zero();
    alignas(64) float tile[kLanes * kLanes];
    for (int64_t j = 0; j < padded; j += kLanes) {
      for (int64_t i = 0; i < kLanes; ++i) {
        f32v e = zero();
        if (j + i < count)
          e = exp_nonpositive_as<kFast>(fma(load(scores + (j + i) * kMlaHeads), scale, -now));
        sum = sum + e;
        store(tile + i * kLanes, e);
      }
      for (int64_t r = 0; r < kLanes; ++r) {
        alignas(64) float column[kLanes];
        for (int64_t i = 0; i < kLanes; ++i) column[i] = tile[i * kLanes + r];
        store(weights_ + (h + r) * kMlaBlock + j, load(column));
      }
    }
    // The first block: exp(-infinity), which is 0.
    const f32v factor = exp_nonpositive_as<kFast>(before - now);
    store(factor_ + h, factor);
    store(total_ + h, fma(load(total_ + h), factor, sum));
    store(largest_ + h, now);
    return any(lt(before, now)) || any(is_nan(now));
  }

  void finish(const MlaItem& item, int64_t index) {
    for (int64_t h = 0; h < item.heads; ++h) {
      if (item.parts == 1) {
        write(item, h, out_ + h * columns_, total_[h]);
        continue;
      }
      float* part = args_.partial + (index * kMlaHeads + h) * mla_partial_stride(args_);
      part[0] = largest_[h];
      part[1] = total_[h];
      std::memcpy(part + 16, out_ + h * columns_, sizeof(float) * static_cast<size_t>(columns_));
    }
  }

  // A sequence without keys gives zeros.
  void write(const MlaItem& item, int64_t h, const float* out, float total) {
    const f32v factor = set1(item.last > 0 ? 1.0f / total : 0.0f);
    for (int64_t d = 0; d < columns_; d += kLanes) store(row_ + d, load(out + d) * factor);
    std::memcpy(static_cast<T*>(args_.out) + item.sequence * args_.out_sequence +
                    (item.head + h) * args_.out_head,
                row_, sizeof(T) * static_cast<size_t>(args_.rank));
  }

  const MlaArgs& args_;
  const int64_t columns_, depth_;  // rank and width, padded
  T *query_, *rows_, *values_, *row_;
  W* weights_;
  float *out_, *scores_, *largest_, *total_, *factor_;
};

template <class T>
IPEX_INLINE void run_latent(const MlaArgs& args, int64_t begin, int64_t end, char* scratch) {
  Latent<T> latent(args, scratch);
  TileScope scope;
  for (int64_t i = begin; i < end; ++i) latent.run(i, scope);
}

template <class T>
IPEX_INLINE void combine_latent(const MlaArgs& args, const int32_t* first, int64_t begin,
                                int64_t end, char* scratch) {
  Latent<T> latent(args, scratch);
  for (int64_t i = begin; i < end; ++i)
    if (args.items[first[i]].parts > 1) latent.combine(first[i]);
}

using Float = float;

}  // namespace
}  // namespace ipex

#define IPEX_DEFINE_MLA(suffix, type)                                                              \
  void ipex_k_mla_decode_##suffix(const ipex::MlaArgs* args, int64_t begin, int64_t end,           \
                                  char* scratch) {                                                 \
    ipex::run_latent<ipex::type>(*args, begin, end, scratch);                                      \
  }                                                                                                \
  void ipex_k_mla_combine_##suffix(const ipex::MlaArgs* args, const int32_t* first, int64_t begin, \
                                   int64_t end, char* scratch) {                                   \
    ipex::combine_latent<ipex::type>(*args, first, begin, end, scratch);                           \
  }
IPEX_DEFINE_MLA(f32, Float)
IPEX_DEFINE_MLA(bf16, BFloat16)
IPEX_DEFINE_MLA(f16, Half)
