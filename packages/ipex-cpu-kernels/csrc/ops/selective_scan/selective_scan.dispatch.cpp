// SPDX-License-Identifier: Apache-2.0
// The selective scan: lanes are channels, the states of a block of them stay in registers.
//
// A task takes its channels through the sequence in pieces of kScanSteps. A piece is turned into
// tiles [step][channel] once; then the numbers of the state go through it in groups, and each step
// costs one exponential and four operations per vector.
#include "selective_scan.h"

#include "ipex/kernel/sequence_tile.h"
#include "ipex/kernel/state_space.h"

namespace ipex {
namespace {

// Numbers of the state that are held in registers at a time.
inline constexpr int kHeld = kLanes == 16 ? 16 : 8;

// A number of B or C: of the row that all channels share at a step, or one per channel.
template <bool kVaries>
IPEX_INLINE f32v element(const float* data, int64_t n) {
  if constexpr (kVaries) return set1(data[n]);
  return load(data + n * kLanes);
}

struct Piece {
  const float* a;       // [N][kLanes], times log2(e)
  const float* b;       // [steps][N], or [N][kLanes] if it does not vary
  const float* c;       // likewise
  float* state;         // [N][kLanes]
  const float* delta;   // [steps][kLanes]
  const float* scaled;  // delta * u
  float* y;             // [steps][kLanes], added to
  int64_t size, steps;
};

// The numbers [n, n + kCount) of the state through all steps.
template <int kCount, bool kVaryingB, bool kVaryingC>
void advance(const Piece& p, int64_t n) {
  f32v state[kCount];
#pragma GCC unroll 16
  for (int i = 0; i < kCount; ++i) state[i] = load(p.state + (n + i) * kLanes);
  const float* a = p.a + n * kLanes;
  const float* b = p.b + (kVaryingB ? n : n * kLanes);
  const float* c = p.c + (kVaryingC ? n : n * kLanes);
  for (int64_t l = 0; l < p.steps; ++l) {
    const f32v delta = load(p.delta + l * kLanes);
    const f32v scaled = load(p.scaled + l * kLanes);
    f32v y = load(p.y + l * kLanes);
#pragma GCC unroll 16
    for (int i = 0; i < kCount; ++i) {
      const f32v added = scaled * element<kVaryingB>(b, i);
      state[i] = fma(decay2(delta * load(a + i * kLanes)), state[i], added);
      y = fma(state[i], element<kVaryingC>(c, i), y);
    }
    store(p.y + l * kLanes, y);
    if constexpr (kVaryingB) b += p.size;
    if constexpr (kVaryingC) c += p.size;
  }
#pragma GCC unroll 16
  for (int i = 0; i < kCount; ++i) store(p.state + (n + i) * kLanes, state[i]);
}

template <bool kVaryingB, bool kVaryingC>
IPEX_INLINE void advance_all(const Piece& p) {
  int64_t n = 0;
  for (; n + kHeld <= p.size; n += kHeld) advance<kHeld, kVaryingB, kVaryingC>(p, n);
  for (; n + 4 <= p.size; n += 4) advance<4, kVaryingB, kVaryingC>(p, n);
  for (; n < p.size; ++n) advance<1, kVaryingB, kVaryingC>(p, n);
}

IPEX_INLINE void advance_all(const Piece& p, bool varying_b, bool varying_c) {
  if (varying_b)
    varying_c ? advance_all<true, true>(p) : advance_all<true, false>(p);
  else
    varying_c ? advance_all<false, true>(p) : advance_all<false, false>(p);
}

// Working memory of a block of channels.
struct Room {
  float *a, *b, *c, *state, *delta, *scaled, *y, *u;

  Room(char* scratch, int64_t size) {
    float* p = reinterpret_cast<float*>(scratch);
    const auto take = [&](int64_t rows) {
      float* at = p;
      p += rows * kLanes;
      return at;
    };
    a = take(size);
    b = take(size);
    c = take(size);
    state = take(size);
    delta = take(kScanSteps);
    scaled = take(kScanSteps);
    y = take(kScanSteps);
    u = take(kScanSteps);
  }
};

// delta, delta * u and the part of y that is not a recurrence, for one piece.
IPEX_INLINE void prepare(const Room& room, int64_t steps, f32v bias, const float* d, int64_t count,
                         bool apply_softplus) {
  const f32v skip = d ? load_n(d, count) : zero();
  for (int64_t l = 0; l < steps; ++l) {
    const f32v u = load(room.u + l * kLanes);
    f32v delta = load(room.delta + l * kLanes) + bias;
    if (apply_softplus) delta = softplus(delta);
    store(room.delta + l * kLanes, delta);
    store(room.scaled + l * kLanes, delta * u);
    // Not 0 * u, which is NaN for an infinity.
    store(room.y + l * kLanes, d ? skip * u : zero());
  }
}

template <class T>
IPEX_INLINE const T* at(const void* data, const SequenceStrides& s, int64_t b, int64_t channel) {
  return static_cast<const T*>(data) + b * s.batch + channel * s.channel;
}

// `count` channels of one batch from `first` on, which share their rows of B and of C.
template <class T>
IPEX_INLINE void scan(const SelectiveScanArgs& args, int64_t batch, int64_t first, int64_t count,
                      char* scratch) {
  const int64_t size = args.size;
  const Room room(scratch, size);
  load_tile(args.a + first * size, size, 1, count, size, room.a);
  for (int64_t i = 0; i < size * kLanes; i += kLanes)
    store(room.a + i, load(room.a + i) * set1(kLog2E));
  if (!args.b_groups) load_tile(args.b + first * size, size, 1, count, size, room.b);
  if (!args.c_groups) load_tile(args.c + first * size, size, 1, count, size, room.c);
  const int64_t state = (batch * args.channels + first) * size;
  if (args.initial) {
    load_tile(args.initial + state, size, 1, count, size, room.state);
  } else {
    for (int64_t i = 0; i < size * kLanes; i += kLanes) store(room.state + i, zero());
  }
  // Where B varies: its rows for the group of these channels.
  const auto rows = [&](const float* data, int64_t groups) {
    const int64_t group = first / (args.channels / groups);
    return data + (batch * groups + group) * args.steps * size;
  };
  const float* b = args.b_groups ? rows(args.b, args.b_groups) : room.b;
  const float* c = args.c_groups ? rows(args.c, args.c_groups) : room.c;
  const f32v bias = args.bias ? load_n(args.bias + first, count) : zero();
  const float* d = args.d ? args.d + first : nullptr;

  for (int64_t l = 0; l < args.steps; l += kScanSteps) {
    const int64_t steps = args.steps - l < kScanSteps ? args.steps - l : kScanSteps;
    const auto tile = [&](const void* data, const SequenceStrides& s, float* to) {
      load_tile(at<T>(data, s, batch, first) + l * s.step, s.channel, s.step, count, steps, to);
    };
    tile(args.u, args.u_strides, room.u);
    tile(args.delta, args.delta_strides, room.delta);
    prepare(room, steps, bias, d, count, args.softplus);
    const Piece piece{room.a,
                      args.b_groups ? b + l * size : b,
                      args.c_groups ? c + l * size : c,
                      room.state,
                      room.delta,
                      room.scaled,
                      room.y,
                      size,
                      steps};
    advance_all(piece, args.b_groups != 0, args.c_groups != 0);
    if (args.z) {
      tile(args.z, args.z_strides, room.u);
      for (int64_t i = 0; i < steps * kLanes; i += kLanes)
        store(room.y + i, load(room.y + i) * silu<kReducedPrecision<T>>(load(room.u + i)));
    }
    const SequenceStrides& s = args.y_strides;
    T* to = static_cast<T*>(args.y) + batch * s.batch + first * s.channel + l * s.step;
    store_tile(to, s.channel, s.step, count, steps, room.y);
  }
  store_tile(args.last + state, size, 1, count, size, room.state);
}

template <class T>
IPEX_INLINE void run(const SelectiveScanArgs& args, int64_t begin, int64_t end, char* scratch) {
  const int64_t blocks = (args.channels + kScanChannels - 1) / kScanChannels;
  for (int64_t i = begin; i < end; ++i) {
    const int64_t batch = i / blocks;
    int64_t first = i % blocks * kScanChannels;
    const int64_t last =
        first + kScanChannels < args.channels ? first + kScanChannels : args.channels;
    while (first < last) {
      int64_t next = first + kLanes < last ? first + kLanes : last;
      const int64_t both[] = {args.b_groups, args.c_groups};
      for (const int64_t groups : both) {
        if (!groups) continue;
        const int64_t width = args.channels / groups;
        const int64_t border = (first / width + 1) * width;
        if (border < next) next = border;
      }
      scan<T>(args, batch, first, next - first, scratch);
      first = next;
    }
  }
}

}  // namespace
}  // namespace ipex

void ipex_k_selective_scan_f32(const ipex::SelectiveScanArgs* args, int64_t begin, int64_t end,
                               char* scratch) {
  ipex::run<float>(*args, begin, end, scratch);
}
void ipex_k_selective_scan_bf16(const ipex::SelectiveScanArgs* args, int64_t begin, int64_t end,
                                char* scratch) {
  ipex::run<ipex::BFloat16>(*args, begin, end, scratch);
}
void ipex_k_selective_scan_f16(const ipex::SelectiveScanArgs* args, int64_t begin, int64_t end,
                               char* scratch) {
  ipex::run<ipex::Half>(*args, begin, end, scratch);
}
