// SPDX-License-Identifier: Apache-2.0
#include "causal_conv1d/causal_conv1d.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "ipex/glue/argument_checks.h"
#include "ipex/glue/sequence.h"
#include "runtime/scratch.h"

namespace ipex {
namespace {

constexpr char kFn[] = "causal_conv1d_fn";
constexpr char kUpdate[] = "causal_conv1d_update";

const auto rows_kernels = IPEX_KERNELS(kFn, causal_conv1d_rows);
const auto columns_kernels = IPEX_KERNELS(kFn, causal_conv1d_columns);
const auto update_kernels = IPEX_KERNELS(kUpdate, causal_conv1d_update);

// Outputs of one task, at least: a silu takes about a nanosecond.
constexpr int64_t kGrain = 8192;

void check_filter(const char* op, const Tensor& x, const Tensor& weight,
                  const OptionalTensor& bias) {
  check_kind(op, "weight", weight, x, "x", true);
  const int64_t channels = x.size(1);
  IPEX_CHECK(weight.dim() == 2 && weight.size(0) == channels && weight.size(1) >= 1 &&
                 weight.size(1) <= kMaxTaps,
             op, ": weight must have shape [", channels, ", W] with W from 1 to ", kMaxTaps,
             ", got ", shape_text(weight));
  check_shaped(op, "bias", bias, {channels}, x, "x", true);
}

void check_activation(const char* op, const std::string& activation) {
  IPEX_CHECK(activation == "none" || activation == "silu", op,
             ": activation must be 'none' or 'silu', got '", activation, "'");
}

// A filter and the tensors that keep its memory alive.
struct FilterHolder {
  Tensor weight;
  OptionalTensor bias;
  Filter filter;

  FilterHolder(const Tensor& w, const OptionalTensor& b, bool silu) : weight(as_contiguous(w)) {
    if (b) bias = as_contiguous(*b);
    filter = {weight.const_data_ptr(),
              bias ? bias->const_data_ptr() : nullptr,
              weight.size(1),
              weight.scalar_type() == ScalarType::Float,
              bias && bias->scalar_type() == ScalarType::Float,
              silu};
  }
};

// x [B, D, L] with the contiguous history [B, D, W - 1] before it.
Tensor convolve(const Tensor& x0, const OptionalTensor& history, const FilterHolder& filter) {
  Tensor y = new_sequence_like(x0);
  if (x0.numel() == 0) return y;
  const Tensor x = dense_either_way(x0);
  CausalConvArgs args{};
  args.filter = filter.filter;
  args.x = x.const_data_ptr();
  args.y = y.mutable_data_ptr();
  args.initial = history ? history->const_data_ptr() : nullptr;
  args.x_batch = x.stride(0);
  args.x_channel = x.stride(1);
  args.x_step = x.stride(2);
  args.y_batch = y.stride(0);
  args.y_channel = y.stride(1);
  args.y_step = y.stride(2);
  args.batch = x.size(0);
  args.channels = x.size(1);
  args.steps = x.size(2);
  if (!channels_last(x)) {
    rows_kernels.visit(x.scalar_type(), [&]<class T>(auto* kernel) {
      parallel_for(args.batch * args.channels, std::max<int64_t>(1, kGrain / args.steps),
                   [&](int64_t begin, int64_t end) { kernel(&args, begin, end); });
    });
    return y;
  }
  const int64_t blocks = (args.steps + kConvSteps - 1) / kConvSteps;
  const int64_t grain = std::max<int64_t>(1, kGrain / (kConvSteps * args.channels));
  const int64_t bytes = causal_conv_scratch_bytes(args.filter.width);
  std::atomic<bool> no_memory{false};
  columns_kernels.visit(x.scalar_type(), [&]<class T>(auto* kernel) {
    parallel_for(args.batch * blocks, grain, [&](int64_t begin, int64_t end) {
      char* room = Scratch<Area::kCausalConv>::get(bytes);
      if (room)
        kernel(&args, begin, end, room);
      else
        no_memory = true;
    });
  });
  IPEX_CHECK(!no_memory, kFn, ": not enough memory for a filter");
  return y;
}

// A [B, D, n] view of elements of `size` bytes, moved one by one: a few steps per channel.
struct Elements {
  char* data;
  int64_t batch, channel, step, size;

  explicit Elements(const Tensor& x)
      : data(static_cast<char*>(x.mutable_data_ptr())),
        batch(x.stride(0)),
        channel(x.stride(1)),
        step(x.stride(2)),
        size(x.scalar_type() == ScalarType::Float ? 4 : 2) {}
  char* at(int64_t b, int64_t c, int64_t l) const {
    return data + (b * batch + c * channel + l * step) * size;
  }
};

// Calls f(b, c) for each channel of x; f moves `steps` elements.
template <class F>
void for_channels(const Tensor& x, int64_t steps, const F& f) {
  const int64_t channels = x.size(1);
  parallel_for(x.size(0) * channels, std::max<int64_t>(1, kGrain / (steps + 1)),
               [&](int64_t begin, int64_t end) {
                 for (int64_t i = begin; i < end; ++i) f(i / channels, i % channels);
               });
}

void move(char* to, const char* from, int64_t size) {
  std::memcpy(to, from, static_cast<size_t>(size));
}

std::tuple<Tensor, Tensor> causal_conv1d_fn(const Tensor& x, const Tensor& weight,
                                            const OptionalTensor& bias,
                                            const OptionalTensor& initial0,
                                            const std::string& activation) {
  check_tensor(kFn, "x", x);
  IPEX_CHECK(x.dim() == 3, kFn, ": x must be 3-D [B, D, L], got ", x.dim(), "-D");
  check_filter(kFn, x, weight, bias);
  const int64_t batch = x.size(0), channels = x.size(1), steps = x.size(2),
                before = weight.size(1) - 1;
  check_shaped(kFn, "initial_states", initial0, {batch, channels, before}, x, "x", false);
  check_activation(kFn, activation);

  const FilterHolder filter(weight, bias, activation == "silu");
  OptionalTensor initial;
  if (initial0) initial = as_contiguous(*initial0);
  Tensor y = convolve(x, initial, filter);
  const int64_t sizes[3] = {batch, channels, before};
  Tensor last = new_contiguous(sizes, 3, x.scalar_type());
  if (last.numel() == 0) return {y, last};
  const Elements to(last), from(x), old(initial ? *initial : last);
  for_channels(x, before, [&](int64_t b, int64_t c) {
    for (int64_t i = 0; i < before; ++i) {
      const int64_t step = steps - before + i;
      if (step >= 0)
        move(to.at(b, c, i), from.at(b, c, step), to.size);
      else if (initial)
        move(to.at(b, c, i), old.at(b, c, before + step), to.size);
      else
        std::memset(to.at(b, c, i), 0, static_cast<size_t>(to.size));
    }
  });
  return {y, last};
}

// The contiguous history of each sequence, [B, D, W - 1].
Tensor history_of(const Tensor& state, const int64_t* lengths, int64_t before) {
  const int64_t places = state.size(2);
  const int64_t sizes[3] = {state.size(0), state.size(1), before};
  Tensor history = new_contiguous(sizes, 3, state.scalar_type());
  if (before == 0) return history;
  const Elements to(history), from(state);
  for_channels(state, before, [&](int64_t b, int64_t c) {
    const int64_t first = lengths ? lengths[b] % places + places - before : places - before;
    for (int64_t i = 0; i < before; ++i)
      move(to.at(b, c, i), from.at(b, c, (first + i) % places), to.size);
  });
  return history;
}

void put_steps(const Tensor& state, const int64_t* lengths, const Tensor& x) {
  const int64_t places = state.size(2), steps = x.size(2);
  const int64_t kept = std::min(places, steps);
  const Elements to(state), from(x);
  for_channels(state, places + kept, [&](int64_t b, int64_t c) {
    if (!lengths)
      for (int64_t i = 0; i + steps < places; ++i)
        move(to.at(b, c, i), to.at(b, c, i + steps), to.size);
    for (int64_t i = steps - kept; i < steps; ++i) {
      const int64_t place = lengths ? (lengths[b] % places + i) % places : places - steps + i;
      move(to.at(b, c, place), from.at(b, c, i), to.size);
    }
  });
}

// Checked lengths as int64.
OptionalTensor checked_lengths(const OptionalTensor& value, const Tensor& x) {
  if (!value) return value;
  IPEX_CHECK(value->is_cpu(), kUpdate, ": cache_seqlens must be on the device of x = cpu");
  const ScalarType dtype = value->scalar_type();
  IPEX_CHECK(dtype == ScalarType::Int || dtype == ScalarType::Long, kUpdate,
             ": cache_seqlens must have dtype int32 or int64, got ", dtype_name(dtype));
  check_shape(kUpdate, "cache_seqlens", *value, {x.size(0)});
  return as_contiguous(dtype == ScalarType::Long ? *value
                                                 : torch::stable::to(*value, ScalarType::Long));
}

// One step for each sequence, with a kernel of its own: this is what decoding does.
Tensor update_one(const Tensor& x, const Tensor& state, const FilterHolder& filter,
                  const int64_t* lengths) {
  Tensor y = new_contiguous_like(x);
  ConvUpdateArgs args{};
  args.filter = filter.filter;
  args.x = x.const_data_ptr();
  args.x_batch = x.stride(0);
  args.x_channel = x.stride(1);
  args.y = y.mutable_data_ptr();
  args.state = state.mutable_data_ptr();
  args.state_batch = state.stride(0);
  args.state_channel = state.stride(1);
  args.state_place = state.stride(2);
  args.places = state.size(2);
  args.lengths = lengths;
  args.batch = x.size(0);
  args.channels = x.size(1);
  const int64_t blocks = (args.channels + kConvChannels - 1) / kConvChannels;
  const int64_t bytes = conv_update_scratch_bytes(args.filter.width, args.places);
  std::atomic<bool> no_memory{false};
  update_kernels.visit(x.scalar_type(), [&]<class T>(auto* kernel) {
    // A block takes about a microsecond.
    parallel_for(args.batch * blocks, 16, [&](int64_t begin, int64_t end) {
      char* room = Scratch<Area::kCausalConv>::get(bytes);
      if (room)
        kernel(&args, begin, end, room);
      else
        no_memory = true;
    });
  });
  IPEX_CHECK(!no_memory, kUpdate, ": not enough memory for the history of a channel");
  return y;
}

Tensor causal_conv1d_update(const Tensor& x, const Tensor& state0, const Tensor& weight,
                            const OptionalTensor& bias, const std::string& activation,
                            const OptionalTensor& lengths0) {
  check_tensor(kUpdate, "x", x);
  IPEX_CHECK(x.dim() == 2 || x.dim() == 3, kUpdate, ": x must be 2-D [B, D] or 3-D [B, D, T], got ",
             x.dim(), "-D");
  check_filter(kUpdate, x, weight, bias);
  check_kind(kUpdate, "conv_state", state0, x, "x", false);
  const int64_t batch = x.size(0), channels = x.size(1), before = weight.size(1) - 1;
  const int64_t least = std::max<int64_t>(1, before);
  IPEX_CHECK(state0.dim() == 3 && state0.size(0) == batch && state0.size(1) == channels &&
                 state0.size(2) >= least,
             kUpdate, ": conv_state must have shape [", batch, ", ", channels,
             ", S] with S at least ", least, ", got ", shape_text(state0));
  check_writable(kUpdate, "conv_state", state0);
  check_activation(kUpdate, activation);
  const OptionalTensor held = checked_lengths(lengths0, x);
  const int64_t* lengths = held ? static_cast<const int64_t*>(held->const_data_ptr()) : nullptr;
  for (int64_t b = 0; lengths && b < batch; ++b)
    IPEX_CHECK(lengths[b] >= 0, kUpdate, ": cache_seqlens must not be negative, got ", lengths[b]);
  const FilterHolder filter(weight, bias, activation == "silu");

  if (x.dim() == 3) {
    const Tensor history = history_of(state0, lengths, before);
    Tensor y = convolve(x, history, filter);
    put_steps(state0, lengths, x);
    return y;
  }
  if (x.numel() == 0) return new_contiguous_like(x);
  if (state0.stride(1) == 1 || state0.stride(2) == 1) return update_one(x, state0, filter, lengths);
  const Tensor state = torch::stable::contiguous(state0);
  Tensor y = update_one(x, state, filter, lengths);
  Tensor target = state0;
  torch::stable::copy_(target, state);
  return y;
}

}  // namespace
}  // namespace ipex

STABLE_TORCH_LIBRARY_IMPL(ipex, CPU, m) {
  IPEX_IMPL(m, "causal_conv1d_fn", ipex::causal_conv1d_fn);
  IPEX_IMPL(m, "causal_conv1d_update", ipex::causal_conv1d_update);
}
