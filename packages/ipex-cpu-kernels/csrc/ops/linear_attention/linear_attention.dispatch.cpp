// SPDX-License-Identifier: Apache-2.0
// Recurrences with a matrix as state. Lanes are values, each of which has a column of the state of
// its own: a task keeps some columns in the first-level cache while all rows of its text pass.
#include "linear_attention.h"

#include <utility>

#include "ipex/kernel/short_convolution.h"
#include "ipex/kernel/state_space.h"

namespace ipex {
namespace {

IPEX_INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

template <class T>
IPEX_INLINE float number(const HeadNumbers& v, int64_t row, int64_t head) {
  const int64_t at = row * v.row + head * v.head;
  return v.is_f32 ? static_cast<const float*>(v.data)[at]
                  : load_n(static_cast<const T*>(v.data) + at, 1)[0];
}

template <class T>
IPEX_INLINE const T* row_of(const HeadRows& rows, int64_t row, int64_t head) {
  return static_cast<const T*>(rows.data) + row * rows.row + head * rows.head;
}

// Reads n numbers as floats, times `scale`; divided by their length if asked for.
template <class T>
void read_row(const T* from, int64_t n, bool normalize, float scale, float* to) {
  f32v sum = zero();
  for (int64_t i = 0; i < n; i += kLanes) {
    const f32v v = n - i < kLanes ? load_n(from + i, n - i) : load(from + i);
    store(to + i, v);
    sum = fma(v, v, sum);
  }
  if (normalize) {
    const f32v squared = set1(reduce_add(sum) + 1e-6f);
    scale *= (set1(1.0f) / sqrt(squared))[0];
  }
  if (scale == 1.0f) return;
  for (int64_t i = 0; i < n; i += kLanes) store(to + i, load(to + i) * set1(scale));
}

// kVecs vectors of columns, of which the first `count` columns are there.
template <int kVecs>
IPEX_INLINE void copy_columns(const float* from, int64_t from_row, float* to, int64_t to_row,
                              int64_t rows, int64_t count, bool pad) {
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = 0; j < kVecs * kLanes; j += kLanes) {
      const float* source = from + i * from_row + j;
      float* target = to + i * to_row + j;
      const int64_t n = least(kLanes, count - j);
      if (n == kLanes)
        store(target, load(source));
      else if (pad)
        store(target, n > 0 ? load_n(source, n) : zero());
      else if (n > 0)
        store_n(target, load(source), n);
    }
}

// What a state is multiplied with, for a step without its activation.
IPEX_INLINE f32v decay_of(const RecurrenceArgs& args, int64_t head, f32v step) {
  const f32v a = set1(args.a[head]);
  if (args.lowest < 0) return decay2(sigmoid(-a * step) * set1(args.lowest * kLog2E));
  return decay2(min(set1(args.most), max(set1(args.least), softplus(step))) * (a * set1(kLog2E)));
}

// The decays of all keys before the head of a row: once, as tasks have some columns of a head.
template <class T>
IPEX_INLINE void read_decays(const RecurrenceArgs& args, int64_t begin, int64_t end) {
  for (int64_t r = begin; r < end; ++r) {
    const int64_t head = r % args.heads;
    const int64_t at = r / args.heads * args.step.row + head * args.step.head;
    const float* bias = args.bias + head * args.width;
    float* to = args.decays + r * args.width;
    for (int64_t i = 0; i < args.width; i += kLanes) {
      const int64_t n = least(kLanes, args.width - i);
      const f32v step = load_either<T>(args.step.data, args.step.is_f32, at + i, n);
      store_n(to + i, decay_of(args, head, step + load_n(bias + i, n)), n);
    }
  }
}

// Adds key x added to the decayed state, and sums it weighted by the query (and by the next key).
// With kEach each key has a decay of its own.
template <int kVecs, bool kNext, bool kEach>
IPEX_INLINE void advance(float* state, int64_t row, int64_t width, f32v decay, const float* decays,
                         const float* key, const float* query, const float* next,
                         const f32v (&added)[kVecs], f32v (&y)[kVecs], f32v (&known)[kVecs]) {
  for (int j = 0; j < kVecs; ++j) y[j] = known[j] = zero();
  for (int64_t i = 0; i < width; ++i) {
    const f32v k = set1(key[i]), q = set1(query[i]);
    if constexpr (kEach) decay = set1(decays[i]);
    f32v n = zero();
    if constexpr (kNext) n = set1(next[i]);
    float* at = state + i * row;
#pragma GCC unroll 4
    for (int j = 0; j < kVecs; ++j) {
      const f32v s = fma(k, added[j], decay * load(at + j * kLanes));
      store(at + j * kLanes, s);
      y[j] = fma(q, s, y[j]);
      if constexpr (kNext) known[j] = fma(n, s, known[j]);
    }
  }
}

template <int kVecs, bool kEach, class T>
void columns(const RecurrenceArgs& args, int64_t text, int64_t head, int64_t column, int64_t count,
             char* scratch) {
  const int64_t first = args.texts.starts[text], last = args.texts.starts[text + 1];
  const int64_t rows = last - first, width = args.width, group = head / (args.heads / args.groups);
  const int64_t padded = (width + 15) / 16 * 16;
  const bool begins = args.texts.lengths[text] == rows;
  float* block = reinterpret_cast<float*>(scratch);
  float* query = block + padded * kRecurrenceColumns;
  float* key = query + padded;
  float* next = key + padded;
  float* weighted = next + padded;  // a key times decays: what it finds in a state before them
  const float* decays = kEach ? args.decays + (first * args.heads + head) * width : nullptr;
  float* own =
      args.state + ((args.texts.slots[text] * args.heads + head) * width) * args.size + column;
  // For a row or two the state is advanced where it lies.
  const bool direct = !begins && rows < 3 && count == kVecs * kLanes;
  float* state = direct ? own : block;
  const int64_t row = direct ? args.size : kVecs * kLanes;
  if (!direct && begins)
    for (int64_t i = 0; i < width * row; i += kLanes) store(state + i, zero());
  else if (!direct)
    copy_columns<kVecs>(own, args.size, state, row, width, count, true);

  f32v known[kVecs], added[kVecs], y[kVecs];
  for (int j = 0; j < kVecs; ++j) known[j] = zero();
  read_row(row_of<T>(args.key, first, group), width, args.normalize, 1.0f, key);
  if (args.delta && !begins) {
    for (int64_t i = 0; i < width; ++i) {
      const f32v k = set1(kEach ? key[i] * decays[i] : key[i]);
#pragma GCC unroll 4
      for (int j = 0; j < kVecs; ++j)
        known[j] = fma(k, load(state + i * row + j * kLanes), known[j]);
    }
  }
  T* out = static_cast<T*>(args.y);
  for (int64_t t = first; t < last; ++t) {
    f32v decay = set1(1.0f), strength = decay;
    if constexpr (!kEach) {
      const f32v step = set1(number<T>(args.step, t, head) + args.bias[head]);
      decay = decay_of(args, head, step);
      if (!args.delta) strength = min(set1(args.most), max(set1(args.least), softplus(step)));
    }
    if (args.delta) strength = sigmoid(set1(number<T>(args.strength, t, head)));
    const T* value = row_of<T>(args.value, t, head) + column;
    f32v given[kVecs];
#pragma GCC unroll 4
    for (int j = 0; j < kVecs; ++j) {
      const int64_t n = least(kLanes, count - j * kLanes);
      given[j] = n == kLanes ? load(value + j * kLanes)
                 : n > 0     ? load_n(value + j * kLanes, n)
                             : zero();
      added[j] = args.delta ? strength * (given[j] - decay * known[j]) : strength * given[j];
    }
    read_row(row_of<T>(args.query, t, group), width, args.normalize, args.scale, query);
    const bool more = t + 1 < last;
    if (more) read_row(row_of<T>(args.key, t + 1, group), width, args.normalize, 1.0f, next);
    const float* finds = next;
    if constexpr (kEach) {
      const float* later = decays + args.heads * width;
      for (int64_t i = 0; more && i < width; i += kLanes)
        store(weighted + i, load(next + i) * load_n(later + i, least(kLanes, width - i)));
      finds = weighted;
    }
    if (args.delta && more)
      advance<kVecs, true, kEach>(state, row, width, decay, decays, key, query, finds, added, y,
                                  known);
    else
      advance<kVecs, false, kEach>(state, row, width, decay, decays, key, query, finds, added, y,
                                   known);
    std::swap(key, next);
    if constexpr (kEach) decays += args.heads * width;
    T* to = out + (t * args.heads + head) * args.size + column;
#pragma GCC unroll 4
    for (int j = 0; j < kVecs; ++j) {
      const int64_t n = least(kLanes, count - j * kLanes);
      f32v result = y[j];
      if (args.skip) result = fma(set1(args.skip[head]), given[j], result);
      if (n == kLanes)
        store(to + j * kLanes, result);
      else if (n > 0)
        store_n(to + j * kLanes, result, n);
    }
  }
  if (!direct) copy_columns<kVecs>(state, row, own, args.size, width, count, false);
}

template <bool kEach, class T>
IPEX_INLINE void blocks_of_columns(const RecurrenceArgs& args, int64_t begin, int64_t end,
                                   char* scratch) {
  const int64_t blocks = (args.size + kRecurrenceColumns - 1) / kRecurrenceColumns;
  for (int64_t i = begin; i < end; ++i) {
    const int64_t text = i / blocks / args.heads, head = i / blocks % args.heads;
    if (args.texts.starts[text] == args.texts.starts[text + 1]) continue;
    const int64_t first = i % blocks * kRecurrenceColumns;
    const int64_t last = least(args.size, first + kRecurrenceColumns);
    for (int64_t c = first; c < last;) {
      const int64_t count = least(4 * kLanes, last - c);
      if (count > 2 * kLanes)
        columns<4, kEach, T>(args, text, head, c, count, scratch);
      else if (count > kLanes)
        columns<2, kEach, T>(args, text, head, c, count, scratch);
      else
        columns<1, kEach, T>(args, text, head, c, count, scratch);
      c += count;
    }
  }
}

template <class T>
IPEX_INLINE void recurrence(const RecurrenceArgs& args, int64_t begin, int64_t end, char* scratch) {
  if (args.each)
    blocks_of_columns<true, T>(args, begin, end, scratch);
  else
    blocks_of_columns<false, T>(args, begin, end, scratch);
}

// Calls f with a text and its channels [first, last) for the blocks [begin, end) of all texts.
template <class F>
IPEX_INLINE void each_block(const Texts& texts, int64_t channels, int64_t begin, int64_t end, F f) {
  const int64_t blocks = (channels + kRecurrenceColumns - 1) / kRecurrenceColumns;
  for (int64_t i = begin; i < end; ++i) {
    const int64_t text = i / blocks;
    if (texts.starts[text] == texts.starts[text + 1]) continue;
    const int64_t first = i % blocks * kRecurrenceColumns;
    f(text, first, least(channels, first + kRecurrenceColumns));
  }
}

// -- Mamba ----------------------------------------------------------------------------------------

// kVecs vectors of channels, of which the first `count` channels are there.
template <int kVecs, class T>
void channels(const SelectiveArgs& args, int64_t text, int64_t channel, int64_t count,
              char* scratch) {
  const int64_t first = args.texts.starts[text], last = args.texts.starts[text + 1];
  const int64_t rows = last - first, width = args.width, wide = kVecs * kLanes;
  const bool begins = args.texts.lengths[text] == rows;
  float* state = reinterpret_cast<float*>(scratch);
  float* rates = state + width * kRecurrenceColumns;
  float* keys = rates + width * kRecurrenceColumns;
  float* queries = keys + (width + 15) / 16 * 16;
  float* own = args.state + args.texts.slots[text] * width * args.channels + channel;
  // For a row or two the state is advanced where it lies.
  const bool direct = !begins && rows < 3 && count == wide;
  const int64_t row = direct ? args.channels : wide;
  const float* a = direct ? args.a + channel : rates;
  if (!direct) {
    copy_columns<kVecs>(args.a + channel, args.channels, rates, row, width, count, true);
    if (begins)
      for (int64_t i = 0; i < width * row; i += kLanes) store(state + i, zero());
    else
      copy_columns<kVecs>(own, args.channels, state, row, width, count, true);
  } else {
    state = own;
  }
  f32v bias[kVecs], skip[kVecs];
  int64_t counts[kVecs];
  for (int j = 0; j < kVecs; ++j) {
    const int64_t n = count - j * kLanes;
    counts[j] = n < 0 ? 0 : least(kLanes, n);
    bias[j] = counts[j] ? load_n(args.bias + channel + j * kLanes, counts[j]) : zero();
    skip[j] = counts[j] ? load_n(args.skip + channel + j * kLanes, counts[j]) : zero();
  }
  for (int64_t t = first; t < last; ++t) {
    read_row(static_cast<const T*>(args.b) + t * args.b_row, width, false, 1.0f, keys);
    read_row(static_cast<const T*>(args.c) + t * args.c_row, width, false, 1.0f, queries);
    const T* x = static_cast<const T*>(args.x) + t * args.x_row + channel;
    f32v step[kVecs], added[kVecs], y[kVecs];
#pragma GCC unroll 4
    for (int j = 0; j < kVecs; ++j) {
      if (!counts[j]) {
        step[j] = added[j] = y[j] = zero();
        continue;
      }
      const f32v given = load_n(x + j * kLanes, counts[j]);
      const int64_t at = t * args.step.row + (channel + j * kLanes) * args.step.head;
      const f32v number = load_either<T>(args.step.data, args.step.is_f32, at, counts[j]);
      const f32v d = softplus(number + bias[j]);
      added[j] = d * given;
      step[j] = d * set1(kLog2E);
      y[j] = skip[j] * given;
    }
    for (int64_t i = 0; i < width; ++i) {
      const f32v k = set1(keys[i]), q = set1(queries[i]);
      float* at = state + i * row;
      const float* rate = a + i * row;
#pragma GCC unroll 4
      for (int j = 0; j < kVecs; ++j) {
        const f32v decay = decay2(step[j] * load(rate + j * kLanes));
        const f32v s = fma(k, added[j], decay * load(at + j * kLanes));
        store(at + j * kLanes, s);
        y[j] = fma(q, s, y[j]);
      }
    }
    T* to = static_cast<T*>(args.y) + t * args.channels + channel;
#pragma GCC unroll 4
    for (int j = 0; j < kVecs; ++j)
      if (counts[j]) store_n(to + j * kLanes, y[j], counts[j]);
  }
  if (!direct) copy_columns<kVecs>(state, row, own, args.channels, width, count, false);
}

template <class T>
IPEX_INLINE void selective(const SelectiveArgs& args, int64_t begin, int64_t end, char* scratch) {
  each_block(args.texts, args.channels, begin, end, [&](int64_t text, int64_t first, int64_t last) {
    for (int64_t c = first; c < last;) {
      const int64_t count = least(4 * kLanes, last - c);
      if (count > 2 * kLanes)
        channels<4, T>(args, text, c, count, scratch);
      else if (count > kLanes)
        channels<2, T>(args, text, c, count, scratch);
      else
        channels<1, T>(args, text, c, count, scratch);
      c += count;
    }
  });
}

// -- RWKV -----------------------------------------------------------------------------------------

// kVecs vectors of channels, of which the first `count` channels are there. Sums are kept without
// the factor of the largest weight so far: weights are exponentials of any numbers.
template <int kVecs, class T>
void means(const WkvArgs& args, int64_t text, int64_t channel, int64_t count) {
  const int64_t start = args.texts.starts[text], last = args.texts.starts[text + 1];
  const bool begins = args.texts.lengths[text] == last - start;
  const f32v log2e = set1(kLog2E);
  float* state = args.state + args.texts.slots[text] * 3 * args.channels + channel;
  int64_t counts[kVecs];
  f32v values[kVecs], weights[kVecs], most[kVecs], decay[kVecs], first[kVecs];
  for (int j = 0; j < kVecs; ++j) {
    const int64_t n = counts[j] = least(kLanes, count - j * kLanes), at = j * kLanes;
    values[j] = begins ? zero() : load_n(state + at, n);
    weights[j] = begins ? zero() : load_n(state + args.channels + at, n);
    most[j] = begins ? set1(-1e38f) : load_n(state + 2 * args.channels + at, n);
    decay[j] = load_n(args.decay + channel + at, n);
    first[j] = load_n(args.first + channel + at, n);
  }
  for (int64_t t = start; t < last; ++t) {
    const T* x = static_cast<const T*>(args.x) + t * args.x_row + channel;
    T* to = static_cast<T*>(args.y) + t * args.channels + channel;
#pragma GCC unroll 2
    for (int j = 0; j < kVecs; ++j) {
      const f32v value = load_n(x + j * kLanes, counts[j]);
      const int64_t at = t * args.key.row + (channel + j * kLanes) * args.key.head;
      const f32v key = load_either<T>(args.key.data, args.key.is_f32, at, counts[j]);
      const f32v now = key + first[j], all = max(most[j], now);
      const f32v past = decay2((most[j] - all) * log2e), own = decay2((now - all) * log2e);
      const f32v mean = fma(own, value, past * values[j]) / fma(past, weights[j], own);
      store_n(to + j * kLanes, mean, counts[j]);
      const f32v faded = most[j] + decay[j];
      most[j] = max(faded, key);
      const f32v kept = decay2((faded - most[j]) * log2e);
      const f32v added = decay2((key - most[j]) * log2e);
      values[j] = fma(added, value, kept * values[j]);
      weights[j] = fma(kept, weights[j], added);
    }
  }
  for (int j = 0; j < kVecs; ++j) {
    store_n(state + j * kLanes, values[j], counts[j]);
    store_n(state + args.channels + j * kLanes, weights[j], counts[j]);
    store_n(state + 2 * args.channels + j * kLanes, most[j], counts[j]);
  }
}

template <class T>
IPEX_INLINE void wkv(const WkvArgs& args, int64_t begin, int64_t end) {
  each_block(args.texts, args.channels, begin, end, [&](int64_t text, int64_t first, int64_t last) {
    for (int64_t c = first; c < last; c += 2 * kLanes) {
      const int64_t count = least(2 * kLanes, last - c);
      if (count > kLanes)
        means<2, T>(args, text, c, count);
      else
        means<1, T>(args, text, c, count);
    }
  });
}

// -- the short convolution ------------------------------------------------------------------------

// `count` channels of a text, 0 < count <= kLanes. kTaps is 0 for any number of taps.
template <int kTaps, class T>
void convolve(const VarlenConvArgs& args, int64_t text, int64_t channel, int64_t count,
              char* scratch) {
  const int64_t taps = kTaps ? kTaps : args.taps, before = taps - 1;
  const int64_t first = args.texts.starts[text], last = args.texts.starts[text + 1];
  const int64_t rows = last - first;
  const bool begins = args.texts.lengths[text] == rows;
  float* weight = reinterpret_cast<float*>(scratch);
  float* history = weight + taps * kLanes;
  T* state =
      static_cast<T*>(args.state) + args.texts.slots[text] * before * args.channels + channel;
  for (int64_t w = 0; w < taps; ++w)
    store(weight + w * kLanes,
          load_either<T>(args.weight, args.weight_is_f32, w * args.channels + channel, count));
  for (int64_t w = 0; w < before; ++w)
    store(history + w * kLanes, begins ? zero() : load_n(state + w * args.channels, count));
  const f32v bias =
      args.bias ? load_either<T>(args.bias, args.bias_is_f32, channel, count) : zero();
  const T* x = static_cast<const T*>(args.x) + first * args.x_row + channel;
  T* y = static_cast<T*>(args.y) + first * args.channels + channel;
  for (int64_t t = 0; t < rows; ++t) {
    const f32v v =
        activated<T>(add_taps(bias, x, args.x_row, t, taps, weight, history, count), args.silu);
    if (count == kLanes)
      store(y + t * args.channels, v);
    else
      store_n(y + t * args.channels, v, count);
  }
  for (int64_t w = 0; w < before; ++w) {
    const int64_t at = rows - before + w;
    const f32v value =
        at < 0 ? load(history + (at + before) * kLanes) : load_n(x + at * args.x_row, count);
    store_n(state + w * args.channels, value, count);
  }
}

template <class T>
IPEX_INLINE void convolutions(const VarlenConvArgs& args, int64_t begin, int64_t end,
                              char* scratch) {
  const int64_t blocks = (args.channels + kVarlenChannels - 1) / kVarlenChannels;
  for (int64_t i = begin; i < end; ++i) {
    const int64_t text = i / blocks;
    if (args.texts.starts[text] == args.texts.starts[text + 1]) continue;
    const int64_t first = i % blocks * kVarlenChannels;
    const int64_t last = least(args.channels, first + kVarlenChannels);
    for (int64_t c = first; c < last; c += kLanes) {
      const int64_t count = least(kLanes, last - c);
      if (args.taps == 4)
        convolve<4, T>(args, text, c, count, scratch);
      else
        convolve<0, T>(args, text, c, count, scratch);
    }
  }
}

}  // namespace
}  // namespace ipex

#define IPEX_DEFINE_LINEAR_ATTENTION(suffix, T)                                                 \
  void ipex_k_decays_##suffix(const ipex::RecurrenceArgs* args, int64_t begin, int64_t end) {   \
    ipex::read_decays<T>(*args, begin, end);                                                    \
  }                                                                                             \
  void ipex_k_recurrence_##suffix(const ipex::RecurrenceArgs* args, int64_t begin, int64_t end, \
                                  char* scratch) {                                              \
    ipex::recurrence<T>(*args, begin, end, scratch);                                            \
  }                                                                                             \
  void ipex_k_selective_varlen_##suffix(const ipex::SelectiveArgs* args, int64_t begin,         \
                                        int64_t end, char* scratch) {                           \
    ipex::selective<T>(*args, begin, end, scratch);                                             \
  }                                                                                             \
  void ipex_k_wkv_scan_##suffix(const ipex::WkvArgs* args, int64_t begin, int64_t end) {        \
    ipex::wkv<T>(*args, begin, end);                                                            \
  }                                                                                             \
  void ipex_k_causal_conv1d_varlen_##suffix(const ipex::VarlenConvArgs* args, int64_t begin,    \
                                            int64_t end, char* scratch) {                       \
    ipex::convolutions<T>(*args, begin, end, scratch);                                          \
  }
IPEX_DEFINE_LINEAR_ATTENTION(f32, float)
IPEX_DEFINE_LINEAR_ATTENTION(bf16, ipex::BFloat16)
IPEX_DEFINE_LINEAR_ATTENTION(f16, ipex::Half)
