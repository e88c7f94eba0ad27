// SPDX-License-Identifier: Apache-2.0
// One step of the selective scan: lanes are the numbers of one channel's state, which is read and
// written once.
#include "selective_state_update.h"

#include <type_traits>

#include "ipex/kernel/state_space.h"

namespace ipex {
namespace {

// n numbers, `stride` elements apart, as floats.
template <class T>
void gather(const T* from, int64_t stride, int64_t n, float* to) {
  if (stride == 1) {
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) store(to + i, load(from + i));
    if (i < n) store_n(to + i, load_n(from + i, n - i), n - i);
    return;
  }
  const float first = load_n(from, 1)[0];
  for (int64_t i = 0; i < n; ++i) to[i] = stride ? load_n(from + i * stride, 1)[0] : first;
}

template <class T>
IPEX_INLINE void gather(const StepVector& v, int64_t batch, int64_t head, int64_t first, int64_t n,
                        float* to) {
  const int64_t at = batch * v.batch + head * v.head + first * v.channel;
  if (v.is_f32)
    gather(static_cast<const float*>(v.data) + at, v.channel, n, to);
  else
    gather(static_cast<const T*>(v.data) + at, v.channel, n, to);
}

// Advances the state of one channel and returns the sum of C * state. `exponent` is dt * log2(e);
// with kOneDecay, `factor` is the decay of all numbers.
template <bool kOneDecay, class S>
IPEX_INLINE float advance(S* state, const float* a, const float* b, const float* c, int64_t size,
                          f32v exponent, f32v scaled, f32v factor) {
  f32v sum = zero();
  const auto next = [&](f32v old, f32v added, auto&& number) IPEX_LAMBDA {
    if constexpr (kOneDecay) return fma(factor, old, added);
    return fma(decay2(exponent * number()), old, added);
  };
  int64_t n = 0;
  for (; n + kLanes <= size; n += kLanes) {
    const f32v s =
        next(load(state + n), scaled * load(b + n), [&]() IPEX_LAMBDA { return load(a + n); });
    store(state + n, s);
    sum = fma(s, load(c + n), sum);
  }
  if (n < size) {
    const int64_t rest = size - n;
    const f32v s = next(load_n(state + n, rest), scaled * load_n(b + n, rest),
                        [&]() IPEX_LAMBDA { return load_n(a + n, rest); });
    store_n(state + n, s, rest);
    // The lanes behind the end may be NaN by an infinite factor.
    sum = fma(keep_n(s, rest, zero()), load_n(c + n, rest), sum);
  }
  return reduce_add(sum);
}

template <bool kOneDecay, class S>
void advance_block(const StateUpdateArgs& args, S* state, const float* a, const float* b,
                   const float* c, int64_t count, const float* dt, const float* x, float* y) {
  for (int64_t i = 0; i < count; ++i) {
    const f32v exponent = set1(dt[i] * kLog2E);
    const float* number = a + i * args.a_channel;
    f32v factor = zero();
    if constexpr (kOneDecay) factor = decay2(exponent * set1(*number));
    y[i] = advance<kOneDecay>(state + i * args.state_channel, number, b, c, args.size, exponent,
                              set1(dt[i] * x[i]), factor);
  }
}

template <class T, class S>
IPEX_INLINE void update(const StateUpdateArgs& args, int64_t batch, int64_t head, int64_t first,
                        int64_t count, char* scratch) {
  alignas(64) float dt[kUpdateChannels], x[kUpdateChannels], y[kUpdateChannels],
      other[kUpdateChannels];
  float* b = reinterpret_cast<float*>(scratch);
  float* c = b + (args.size + 15) / 16 * 16;
  gather<T>(args.b, batch, head / (args.heads / args.b_groups), 0, args.size, b);
  gather<T>(args.c, batch, head / (args.heads / args.c_groups), 0, args.size, c);
  gather<T>(args.x, batch, head, first, count, x);
  gather<T>(args.dt, batch, head, first, count, dt);
  // Whole vectors from here on: what lies behind `count` is computed and not used.
  for (int64_t i = count; i < kUpdateChannels; ++i) dt[i] = 0.0f;
  if (args.bias.data) {
    gather<T>(args.bias, batch, head, first, count, other);
    for (int64_t i = 0; i < count; ++i) dt[i] += other[i];
  }
  if (args.softplus)
    for (int64_t i = 0; i < count; i += kLanes) store(dt + i, softplus(load(dt + i)));

  S* state = static_cast<S*>(args.state) + batch * args.state_batch + head * args.state_head +
             first * args.state_channel;
  const float* a = args.a + head * args.a_head + first * args.a_channel;
  if (args.a_number == 0)
    advance_block<true>(args, state, a, b, c, count, dt, x, y);
  else
    advance_block<false>(args, state, a, b, c, count, dt, x, y);

  if (args.d.data) {
    gather<T>(args.d, batch, head, first, count, other);
    for (int64_t i = 0; i < count; ++i) y[i] += other[i] * x[i];
  }
  if (args.z.data) gather<T>(args.z, batch, head, first, count, other);
  T* to = static_cast<T*>(args.y) + (batch * args.heads + head) * args.channels + first;
  for (int64_t i = 0; i < count; i += kLanes) {
    const int64_t n = count - i < kLanes ? count - i : kLanes;
    f32v v = load_n(y + i, n);
    if (args.z.data) v = v * silu<kReducedPrecision<T>>(load_n(other + i, n));
    store_n(to + i, v, n);
  }
}

template <class T>
IPEX_INLINE void run(const StateUpdateArgs& args, int64_t begin, int64_t end, char* scratch) {
  const int64_t blocks = (args.channels + kUpdateChannels - 1) / kUpdateChannels;
  for (int64_t i = begin; i < end; ++i) {
    const int64_t row = i / blocks, first = i % blocks * kUpdateChannels;
    const int64_t rest = args.channels - first;
    const int64_t count = rest < kUpdateChannels ? rest : kUpdateChannels;
    if (std::is_same_v<T, float> || args.state_is_f32)
      update<T, float>(args, row / args.heads, row % args.heads, first, count, scratch);
    else
      update<T, T>(args, row / args.heads, row % args.heads, first, count, scratch);
  }
}

}  // namespace
}  // namespace ipex

void ipex_k_selective_state_update_f32(const ipex::StateUpdateArgs* args, int64_t begin,
                                       int64_t end, char* scratch) {
  ipex::run<float>(*args, begin, end, scratch);
}
void ipex_k_selective_state_update_bf16(const ipex::StateUpdateArgs* args, int64_t begin,
                                        int64_t end, char* scratch) {
  ipex::run<ipex::BFloat16>(*args, begin, end, scratch);
}
void ipex_k_selective_state_update_f16(const ipex::StateUpdateArgs* args, int64_t begin,
                                       int64_t end, char* scratch) {
  ipex::run<ipex::Half>(*args, begin, end, scratch);
}
