// SPDX-License-Identifier: Apache-2.0
// The short causal convolution. Where the steps of a channel lie together, lanes are steps; where
// channels do, and in an update, lanes are channels. Nothing is transposed but the filters.
#include "causal_conv1d.h"

#include "ipex/kernel/sequence_tile.h"
#include "ipex/kernel/short_convolution.h"

namespace ipex {
namespace {

IPEX_INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// -- lanes are steps ------------------------------------------------------------------------------

// One number of a row in the dtype of the kernel or float.
template <class T>
IPEX_INLINE float number(const void* data, bool is_f32, int64_t i) {
  return is_f32 ? static_cast<const float*>(data)[i]
                : load_n(static_cast<const T*>(data) + i, 1)[0];
}

// y[l] for n steps; the W - 1 steps before x are there to be read. kTaps is 0 for any W.
template <int kTaps, class S, class T>
IPEX_INLINE void convolve_row(const S* x, T* y, int64_t n, const float* weight, int64_t width,
                              float bias, bool apply_silu) {
  const int64_t taps = kTaps ? kTaps : width;
  x -= taps - 1;
  for (int64_t l = 0; l < n; l += kLanes) {
    const int64_t count = least(kLanes, n - l);
    f32v v = set1(bias);
#pragma GCC unroll 4
    for (int64_t w = 0; w < taps; ++w) {
      const S* from = x + l + w;
      v = fma(count == kLanes ? load(from) : load_n(from, count), set1(weight[w]), v);
    }
    v = activated<T>(v, apply_silu);
    if (count == kLanes)
      store(y + l, v);
    else
      store_n(y + l, v, count);
  }
}

template <int kTaps, class T>
void convolve_channel(const CausalConvArgs& args, int64_t batch, int64_t channel) {
  const Filter& f = args.filter;
  const int64_t before = f.width - 1;
  float weight[kMaxTaps];
  for (int64_t w = 0; w < f.width; ++w)
    weight[w] = number<T>(f.weight, f.weight_is_f32, channel * f.width + w);
  const float bias = f.bias ? number<T>(f.bias, f.bias_is_f32, channel) : 0.0f;
  const T* x = static_cast<const T*>(args.x) + batch * args.x_batch + channel * args.x_channel;
  T* y = static_cast<T*>(args.y) + batch * args.y_batch + channel * args.y_channel;

  // The first steps see the history: both are put together.
  float joined[2 * kMaxTaps + 16];
  const int64_t first = least(args.steps, (before + kLanes - 1) / kLanes * kLanes);
  const T* history = static_cast<const T*>(args.initial);
  if (history) history += (batch * args.channels + channel) * before;
  for (int64_t i = 0; i < before; ++i) joined[i] = history ? load_n(history + i, 1)[0] : 0.0f;
  for (int64_t i = 0; i < first; i += kLanes) {
    const int64_t count = least(kLanes, first - i);
    store(joined + before + i, load_n(x + i, count));
  }
  convolve_row<kTaps>(joined + before, y, first, weight, f.width, bias, f.silu);
  convolve_row<kTaps>(x + first, y + first, args.steps - first, weight, f.width, bias, f.silu);
}

template <class T>
IPEX_INLINE void rows(const CausalConvArgs& args, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) {
    const int64_t batch = i / args.channels, channel = i % args.channels;
    if (args.filter.width == 4)
      convolve_channel<4, T>(args, batch, channel);
    else
      convolve_channel<0, T>(args, batch, channel);
  }
}

// -- lanes are channels ---------------------------------------------------------------------------

// The filter of `count` channels, 0 < count <= kLanes: rows [W][kLanes], then the bias.
template <class T>
IPEX_INLINE void load_filter(const Filter& f, int64_t first, int64_t count, float* to) {
  if (f.weight_is_f32)
    load_tile(static_cast<const float*>(f.weight) + first * f.width, f.width, 1, count, f.width,
              to);
  else
    load_tile(static_cast<const T*>(f.weight) + first * f.width, f.width, 1, count, f.width, to);
  store(to + f.width * kLanes,
        f.bias ? load_either<T>(f.bias, f.bias_is_f32, first, count) : zero());
}

// Steps [begin, end) of `count` channels.
template <int kTaps, class T>
void convolve_columns(const CausalConvArgs& args, int64_t batch, int64_t first, int64_t count,
                      int64_t begin, int64_t end, char* scratch) {
  const Filter& f = args.filter;
  const int64_t taps = kTaps ? kTaps : f.width, before = taps - 1;
  float* weight = reinterpret_cast<float*>(scratch);
  float* history = weight + (taps + 1) * kLanes;
  load_filter<T>(f, first, count, weight);
  if (begin < before) {
    for (int64_t i = 0; i < before * kLanes; i += kLanes) store(history + i, zero());
    if (args.initial)
      load_tile(static_cast<const T*>(args.initial) + (batch * args.channels + first) * before,
                before, 1, count, before, history);
  }
  const f32v bias = load(weight + taps * kLanes);
  const T* x = static_cast<const T*>(args.x) + batch * args.x_batch + first;
  T* y = static_cast<T*>(args.y) + batch * args.y_batch + first;
  for (int64_t l = begin; l < end; ++l) {
    const f32v v =
        activated<T>(add_taps(bias, x, args.x_step, l, taps, weight, history, count), f.silu);
    if (count == kLanes)
      store(y + l * args.y_step, v);
    else
      store_n(y + l * args.y_step, v, count);
  }
}

template <class T>
IPEX_INLINE void columns(const CausalConvArgs& args, int64_t begin, int64_t end, char* scratch) {
  const int64_t blocks = (args.steps + kConvSteps - 1) / kConvSteps;
  for (int64_t i = begin; i < end; ++i) {
    const int64_t batch = i / blocks, step = i % blocks * kConvSteps;
    const int64_t last = least(args.steps, step + kConvSteps);
    for (int64_t c = 0; c < args.channels; c += kLanes) {
      const int64_t count = least(kLanes, args.channels - c);
      if (args.filter.width == 4)
        convolve_columns<4, T>(args, batch, c, count, step, last, scratch);
      else
        convolve_columns<0, T>(args, batch, c, count, step, last, scratch);
    }
  }
}

// -- one step -------------------------------------------------------------------------------------

// One new step of `count` channels, 0 < count <= kLanes.
template <class T>
IPEX_INLINE void update(const ConvUpdateArgs& args, int64_t batch, int64_t first, int64_t count,
                        char* scratch) {
  const Filter& f = args.filter;
  const int64_t taps = f.width, before = taps - 1, places = args.places;
  float* weight = reinterpret_cast<float*>(scratch);
  float* steps = weight + (taps + 1) * kLanes;  // history, then the new step
  load_filter<T>(f, first, count, weight);
  T* state = static_cast<T*>(args.state) + batch * args.state_batch + first * args.state_channel;
  const T* x = static_cast<const T*>(args.x) + batch * args.x_batch + first * args.x_channel;
  const int64_t length = args.lengths ? args.lengths[batch] % places : 0;
  const int64_t known = args.lengths ? before : places;
  if (args.lengths) {
    for (int64_t i = 0; i < before; ++i) {
      const int64_t place = (length + places - before + i) % places;
      load_tile(state + place * args.state_place, args.state_channel, 1, count, 1,
                steps + i * kLanes);
    }
  } else {
    load_tile(state, args.state_channel, args.state_place, count, places, steps);
  }
  float* now = steps + known * kLanes;
  load_tile(x, args.x_channel, 1, count, 1, now);
  if (args.lengths)
    store_tile(state + length * args.state_place, args.state_channel, 1, count, 1, now);
  else
    store_tile(state, args.state_channel, args.state_place, count, places, steps + kLanes);

  f32v v = load(weight + taps * kLanes);
  for (int64_t w = 0; w < taps; ++w)
    v = fma(load(now - (before - w) * kLanes), load(weight + w * kLanes), v);
  v = activated<T>(v, f.silu);
  store_n(static_cast<T*>(args.y) + batch * args.channels + first, v, count);
}

template <class T>
IPEX_INLINE void updates(const ConvUpdateArgs& args, int64_t begin, int64_t end, char* scratch) {
  const int64_t blocks = (args.channels + kConvChannels - 1) / kConvChannels;
  for (int64_t i = begin; i < end; ++i) {
    const int64_t first = i % blocks * kConvChannels;
    const int64_t last = least(args.channels, first + kConvChannels);
    for (int64_t c = first; c < last; c += kLanes)
      update<T>(args, i / blocks, c, least(kLanes, last - c), scratch);
  }
}

}  // namespace
}  // namespace ipex

#define IPEX_DEFINE_CAUSAL_CONV(suffix, T)                                                    \
  void ipex_k_causal_conv1d_rows_##suffix(const ipex::CausalConvArgs* args, int64_t begin,    \
                                          int64_t end) {                                      \
    ipex::rows<T>(*args, begin, end);                                                         \
  }                                                                                           \
  void ipex_k_causal_conv1d_columns_##suffix(const ipex::CausalConvArgs* args, int64_t begin, \
                                             int64_t end, char* scratch) {                    \
    ipex::columns<T>(*args, begin, end, scratch);                                             \
  }                                                                                           \
  void ipex_k_causal_conv1d_update_##suffix(const ipex::ConvUpdateArgs* args, int64_t begin,  \
                                            int64_t end, char* scratch) {                     \
    ipex::updates<T>(*args, begin, end, scratch);                                             \
  }
IPEX_DEFINE_CAUSAL_CONV(f32, float)
IPEX_DEFINE_CAUSAL_CONV(bf16, ipex::BFloat16)
IPEX_DEFINE_CAUSAL_CONV(f16, ipex::Half)
