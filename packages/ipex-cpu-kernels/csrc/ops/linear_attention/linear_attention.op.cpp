// SPDX-License-Identifier: Apache-2.0
#include "linear_attention/linear_attention.h"

#include <algorithm>
#include <atomic>
#include <span>

#include "ipex/glue/argument_checks.h"
#include "runtime/scratch.h"

namespace ipex {
namespace {

constexpr char kConv[] = "causal_conv1d_varlen";
constexpr char kDelta[] = "gated_delta_rule";
constexpr char kScan[] = "ssd_scan";
constexpr char kSelective[] = "selective_scan_varlen";
constexpr char kWkv[] = "wkv_scan";

// One kernel for both, under the name of each.
const auto delta_kernels = IPEX_KERNELS(kDelta, recurrence);
const auto decay_kernels = IPEX_KERNELS(kDelta, decays);
const auto scan_kernels = IPEX_KERNELS(kScan, recurrence);
const auto selective_kernels = IPEX_KERNELS(kSelective, selective_varlen);
const auto wkv_kernels = IPEX_KERNELS(kWkv, wkv_scan);
const auto conv_kernels = IPEX_KERNELS(kConv, causal_conv1d_varlen);

// Numbers of a state that one task advances, at least: about a microsecond.
constexpr int64_t kGrain = 16384;

// Offsets of texts, kept as contiguous int32.
class HeldTexts {
 public:
  HeldTexts(const char* op, const Tensor& starts, const Tensor& lengths, const Tensor& slots,
            int64_t rows, int64_t states)
      : starts_(starts), lengths_(lengths), slots_(slots) {
    const int64_t batch = lengths.dim() == 1 ? lengths.size(0) : 0;
    check(op, "query_starts", starts, batch + 1);
    check(op, "lengths", lengths, batch);
    check(op, "slots", slots, batch);
    starts_ = as_contiguous(starts);
    lengths_ = as_contiguous(lengths);
    slots_ = as_contiguous(slots);
    texts = {data(starts_), data(lengths_), data(slots_), batch};
    bool rising = texts.starts[0] == 0 && texts.starts[batch] == rows, had = true, inside = true;
    for (int64_t b = 0; b < batch; ++b) {
      const int64_t count = texts.starts[b + 1] - texts.starts[b];
      rising &= count >= 0;
      had &= texts.lengths[b] >= count;
      inside &= texts.slots[b] >= 0 && texts.slots[b] < states;
    }
    IPEX_CHECK(rising, op, ": query_starts must rise from 0 to ", rows, ", got ",
               text_of(texts.starts, batch + 1));
    IPEX_CHECK(had, op, ": lengths must count the new rows, got ", text_of(texts.lengths, batch));
    IPEX_CHECK(inside, op, ": slots must be in [0, ", states, "), got ",
               text_of(texts.slots, batch));
  }

  Texts texts;

 private:
  static void check(const char* op, const char* name, const Tensor& value, int64_t size) {
    IPEX_CHECK(value.is_cpu(), op, ": ", name, " must be on the device of the rows = cpu");
    IPEX_CHECK(value.scalar_type() == ScalarType::Int, op, ": ", name,
               " must have dtype int32, got ", dtype_name(value.scalar_type()));
    check_shape(op, name, value, {size});
  }
  static const int32_t* data(const Tensor& x) {
    return static_cast<const int32_t*>(x.const_data_ptr());
  }
  static std::string text_of(const int32_t* values, int64_t n) {
    return list_text(std::span(values, static_cast<size_t>(n)));
  }

  Tensor starts_, lengths_, slots_;
};

void check_contiguous(const char* op, const char* name, const Tensor& value) {
  IPEX_CHECK(value.is_contiguous(), op, ": ", name, " must be contiguous, got strides ",
             list_text(value.strides()));
}

// Rows whose last dimension lies together.
Tensor dense_rows(const Tensor& x) {
  const int64_t last = x.dim() - 1;
  return x.size(last) == 1 || x.stride(last) == 1 ? x : torch::stable::contiguous(x);
}

HeadRows head_rows(const Tensor& x) { return {x.const_data_ptr(), x.stride(0), x.stride(1)}; }

HeadNumbers head_numbers(const Tensor& x) {
  return {x.const_data_ptr(), x.stride(0), x.stride(1), x.scalar_type() == ScalarType::Float};
}

Tensor causal_conv1d_varlen(const Tensor& x0, const Tensor& state, const Tensor& weight0,
                            const OptionalTensor& bias0, const std::string& activation,
                            const Tensor& starts, const Tensor& lengths, const Tensor& slots) {
  check_tensor(kConv, "x", x0);
  IPEX_CHECK(x0.dim() == 2, kConv, ": x must be 2-D [T, D], got ", x0.dim(), "-D");
  check_kind(kConv, "weight", weight0, x0, "x", true);
  const int64_t channels = x0.size(1);
  IPEX_CHECK(weight0.dim() == 2 && weight0.size(1) == channels && weight0.size(0) >= 1 &&
                 weight0.size(0) <= kVarlenMaxTaps,
             kConv, ": weight must have shape [W, ", channels, "] with W from 1 to ",
             kVarlenMaxTaps, ", got ", shape_text(weight0));
  check_shaped(kConv, "bias", bias0, {channels}, x0, "x", true);
  check_kind(kConv, "conv_state", state, x0, "x", false);
  const int64_t states = state.dim() == 3 ? state.size(0) : 0, taps = weight0.size(0);
  check_shape(kConv, "conv_state", state, {states, taps - 1, channels});
  check_contiguous(kConv, "conv_state", state);
  IPEX_CHECK(activation == "none" || activation == "silu", kConv,
             ": activation must be 'none' or 'silu', got '", activation, "'");
  const HeldTexts held(kConv, starts, lengths, slots, x0.size(0), states);

  const Tensor x = dense_rows(x0), weight = as_contiguous(weight0);
  OptionalTensor bias;
  if (bias0) bias = as_contiguous(*bias0);
  Tensor y = new_contiguous_like(x0);
  if (x.numel() == 0) return y;
  VarlenConvArgs args{};
  args.texts = held.texts;
  args.x = x.const_data_ptr();
  args.x_row = x.stride(0);
  args.y = y.mutable_data_ptr();
  args.state = state.mutable_data_ptr();
  args.weight = weight.const_data_ptr();
  args.bias = bias ? bias->const_data_ptr() : nullptr;
  args.channels = channels;
  args.taps = taps;
  args.weight_is_f32 = weight.scalar_type() == ScalarType::Float;
  args.bias_is_f32 = bias && bias->scalar_type() == ScalarType::Float;
  args.silu = activation == "silu";
  const int64_t blocks = (channels + kVarlenChannels - 1) / kVarlenChannels;
  const int64_t outputs = x.numel() / (held.texts.batch * blocks) + 1;
  const int64_t bytes = varlen_conv_scratch_bytes(taps);
  std::atomic<bool> no_memory{false};
  conv_kernels.visit(x.scalar_type(), [&]<class T>(auto* kernel) {
    parallel_for(held.texts.batch * blocks, std::max<int64_t>(1, kGrain / 2 / outputs),
                 [&](int64_t begin, int64_t end) {
                   char* room = Scratch<Area::kVarlenConv>::get(bytes);
                   if (room)
                     kernel(&args, begin, end, room);
                   else
                     no_memory = true;
                 });
  });
  IPEX_CHECK(!no_memory, kConv, ": not enough memory for a filter");
  return y;
}

// Checks rows of heads and the two of their groups; returns the width of the latter.
int64_t check_heads(const char* op, const char* name, const Tensor& x, const char* first,
                    const Tensor& a, const char* second, const Tensor& b) {
  check_tensor(op, name, x);
  IPEX_CHECK(x.dim() == 3, op, ": ", name, " must be 3-D [T, H, width], got ", x.dim(), "-D");
  const auto check = [&](const char* key, const Tensor& value) {
    check_kind(op, key, value, x, name, false);
    IPEX_CHECK(value.dim() == 3 && value.size(1) > 0 && x.size(1) % value.size(1) == 0 &&
                   value.size(0) == x.size(0) && value.size(2) > 0,
               op, ": ", key, " must have shape [", x.size(0), ", G, width] where G divides ",
               x.size(1), ", got ", shape_text(value));
  };
  check(first, a);
  check(second, b);
  check_shape(op, second, b, {a.size(0), a.size(1), a.size(2)});
  return a.size(2);
}

int64_t check_state(const char* op, const Tensor& state, int64_t heads, int64_t width, int64_t size,
                    const char* of) {
  const int64_t states = state.dim() == 4 ? state.size(0) : 0;
  check_float32(op, "state", state, {states, heads, width, size}, of);
  check_writable(op, "state", state);
  check_contiguous(op, "state", state);
  return states;
}

// Runs a recurrence; in `args` is what only one of the two has.
Tensor run(const char* op, RecurrenceArgs args, const HeldTexts& held, const Tensor& query0,
           const Tensor& key0, const Tensor& value0, const Tensor& step0, const Tensor& state) {
  const Tensor query = dense_rows(query0), key = dense_rows(key0), value = dense_rows(value0);
  const Tensor step = args.each ? dense_rows(step0) : step0;
  Tensor y = new_contiguous_like(value0);
  if (y.numel() == 0) return y;
  args.texts = held.texts;
  args.query = head_rows(query);
  args.key = head_rows(key);
  args.value = head_rows(value);
  args.step = head_numbers(step);
  args.state = static_cast<float*>(state.mutable_data_ptr());
  args.y = y.mutable_data_ptr();
  args.heads = value.size(1);
  args.groups = query.size(1);
  args.width = query.size(2);
  args.size = value.size(2);
  const int64_t rows = value.size(0);
  OptionalTensor decays;
  if (args.each) {
    const int64_t sizes[] = {rows, args.heads, args.width};
    decays = new_contiguous(sizes, 3, ScalarType::Float);
    args.decays = static_cast<float*>(decays->mutable_data_ptr());
    decay_kernels.visit(value.scalar_type(), [&]<class T>(auto* kernel) {
      // Two exponentials and a logarithm for each number take as long as a dozen products.
      parallel_for(rows * args.heads, std::max<int64_t>(1, kGrain / (12 * args.width)),
                   [&](int64_t begin, int64_t end) { kernel(&args, begin, end); });
    });
  }
  const int64_t blocks = (args.size + kRecurrenceColumns - 1) / kRecurrenceColumns;
  const int64_t tasks = args.texts.batch * args.heads * blocks;
  const int64_t block = std::min(args.size, kRecurrenceColumns) * args.width;
  const int64_t work = block * std::max<int64_t>(1, rows / args.texts.batch);
  const int64_t bytes = recurrence_scratch_bytes(args.width);
  std::atomic<bool> no_memory{false};
  (args.delta ? delta_kernels : scan_kernels)
      .visit(value.scalar_type(), [&]<class T>(auto* kernel) {
        parallel_for(tasks, std::max<int64_t>(1, kGrain / work), [&](int64_t begin, int64_t end) {
          char* room = Scratch<Area::kRecurrence>::get(bytes);
          if (room)
            kernel(&args, begin, end, room);
          else
            no_memory = true;
        });
      });
  IPEX_CHECK(!no_memory, op, ": not enough memory for a part of the state");
  return y;
}

// Float vectors [H], or [H][K].
struct PerHead {
  Tensor tensor;
  const float* data;

  PerHead(const char* op, const char* name, const Tensor& value,
          std::initializer_list<int64_t> sizes, const char* of)
      : tensor(value) {
    check_float32(op, name, value, sizes, of);
    tensor = as_contiguous(value);
    data = static_cast<const float*>(tensor.const_data_ptr());
  }
};

Tensor gated_delta_rule(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& a,
                        const Tensor& b, const Tensor& factor, const Tensor& bias,
                        const Tensor& state, const Tensor& starts, const Tensor& lengths,
                        const Tensor& slots, double scale, bool normalize, double lowest) {
  const int64_t width = check_heads(kDelta, "v", v, "q", q, "k", k);
  const int64_t rows = v.size(0), heads = v.size(1);
  const bool each = a.dim() == 3;
  if (each)
    check_shaped(kDelta, "a", a, {rows, heads, width}, v, "v", true);
  else
    check_shaped(kDelta, "a", a, {rows, heads}, v, "v", true);
  check_shaped(kDelta, "b", b, {rows, heads}, v, "v", true);
  const PerHead own_factor(kDelta, "A", factor, {heads}, "v");
  const PerHead own_bias = each ? PerHead(kDelta, "dt_bias", bias, {heads, width}, "v")
                                : PerHead(kDelta, "dt_bias", bias, {heads}, "v");
  IPEX_CHECK(lowest <= 0, kDelta, ": lowest must be at most 0, got ", lowest);
  const int64_t states = check_state(kDelta, state, heads, width, v.size(2), "v");
  const HeldTexts held(kDelta, starts, lengths, slots, rows, states);
  RecurrenceArgs args{};
  args.strength = head_numbers(b);
  args.a = own_factor.data;
  args.bias = own_bias.data;
  args.scale = static_cast<float>(scale);
  args.least = 0.0f;
  args.most = 1e30f;
  args.lowest = static_cast<float>(lowest);
  args.delta = true;
  args.normalize = normalize;
  args.each = each;
  return run(kDelta, args, held, q, k, v, a, state);
}

Tensor ssd_scan(const Tensor& x, const Tensor& dt, const Tensor& factor, const Tensor& b,
                const Tensor& c, const Tensor& skip, const Tensor& bias, const Tensor& state,
                const Tensor& starts, const Tensor& lengths, const Tensor& slots, double dt_min,
                double dt_max) {
  const int64_t width = check_heads(kScan, "x", x, "B", b, "C", c);
  const int64_t rows = x.size(0), heads = x.size(1);
  check_shaped(kScan, "dt", dt, {rows, heads}, x, "x", true);
  const PerHead own_factor(kScan, "A", factor, {heads}, "x");
  const PerHead own_skip(kScan, "D", skip, {heads}, "x");
  const PerHead own_bias(kScan, "dt_bias", bias, {heads}, "x");
  const int64_t states = check_state(kScan, state, heads, width, x.size(2), "x");
  IPEX_CHECK(dt_min >= 0 && dt_min <= dt_max, kScan, ": dt_min must be from 0 to dt_max = ", dt_max,
             ", got ", dt_min);
  const HeldTexts held(kScan, starts, lengths, slots, rows, states);
  RecurrenceArgs args{};
  args.a = own_factor.data;
  args.bias = own_bias.data;
  args.skip = own_skip.data;
  args.scale = 1.0f;
  args.least = static_cast<float>(dt_min);
  args.most = static_cast<float>(dt_max);
  return run(kScan, args, held, c, b, x, dt, state);
}

Tensor selective_scan_varlen(const Tensor& x0, const Tensor& dt, const Tensor& rates,
                             const Tensor& b0, const Tensor& c0, const Tensor& skip,
                             const Tensor& bias, const Tensor& state, const Tensor& starts,
                             const Tensor& lengths, const Tensor& slots) {
  const char* op = kSelective;
  check_tensor(op, "x", x0);
  IPEX_CHECK(x0.dim() == 2, op, ": x must be 2-D [T, E], got ", x0.dim(), "-D");
  const int64_t rows = x0.size(0), channels = x0.size(1);
  check_shaped(op, "dt", dt, {rows, channels}, x0, "x", true);
  check_kind(op, "B", b0, x0, "x", false);
  IPEX_CHECK(b0.dim() == 2 && b0.size(0) == rows && b0.size(1) > 0, op, ": B must have shape [",
             rows, ", N], got ", shape_text(b0));
  const int64_t width = b0.size(1);
  check_kind(op, "C", c0, x0, "x", false);
  check_shape(op, "C", c0, {rows, width});
  check_float32(op, "A", rates, {width, channels}, "x");
  const PerHead own_skip(op, "D", skip, {channels}, "x");
  const PerHead own_bias(op, "dt_bias", bias, {channels}, "x");
  const int64_t states = state.dim() == 3 ? state.size(0) : 0;
  check_float32(op, "state", state, {states, width, channels}, "x");
  check_writable(op, "state", state);
  check_contiguous(op, "state", state);
  const HeldTexts held(op, starts, lengths, slots, rows, states);

  Tensor y = new_contiguous_like(x0);
  if (y.numel() == 0) return y;
  const Tensor x = dense_rows(x0), b = dense_rows(b0), c = dense_rows(c0), steps = dense_rows(dt);
  const Tensor a = as_contiguous(rates);
  SelectiveArgs args{};
  args.texts = held.texts;
  args.x = x.const_data_ptr();
  args.b = b.const_data_ptr();
  args.c = c.const_data_ptr();
  args.x_row = x.stride(0);
  args.b_row = b.stride(0);
  args.c_row = c.stride(0);
  args.step = {steps.const_data_ptr(), steps.stride(0), 1,
               steps.scalar_type() == ScalarType::Float};
  args.a = static_cast<const float*>(a.const_data_ptr());
  args.bias = own_bias.data;
  args.skip = own_skip.data;
  args.state = static_cast<float*>(state.mutable_data_ptr());
  args.y = y.mutable_data_ptr();
  args.channels = channels;
  args.width = width;
  const int64_t blocks = (channels + kRecurrenceColumns - 1) / kRecurrenceColumns;
  // An exponential for each number of the state takes as long as four products.
  const int64_t work = 4 * std::min(channels, kRecurrenceColumns) * width *
                       std::max<int64_t>(1, rows / args.texts.batch);
  const int64_t bytes = selective_scratch_bytes(width);
  std::atomic<bool> no_memory{false};
  selective_kernels.visit(x.scalar_type(), [&]<class T>(auto* kernel) {
    parallel_for(args.texts.batch * blocks, std::max<int64_t>(1, kGrain / work),
                 [&](int64_t begin, int64_t end) {
                   char* room = Scratch<Area::kRecurrence>::get(bytes);
                   if (room)
                     kernel(&args, begin, end, room);
                   else
                     no_memory = true;
                 });
  });
  IPEX_CHECK(!no_memory, op, ": not enough memory for a part of the state");
  return y;
}

Tensor wkv_scan(const Tensor& x0, const Tensor& key0, const Tensor& decay, const Tensor& first,
                const Tensor& state, const Tensor& starts, const Tensor& lengths,
                const Tensor& slots) {
  check_tensor(kWkv, "x", x0);
  IPEX_CHECK(x0.dim() == 2, kWkv, ": x must be 2-D [T, E], got ", x0.dim(), "-D");
  const int64_t rows = x0.size(0), channels = x0.size(1);
  check_shaped(kWkv, "k", key0, {rows, channels}, x0, "x", true);
  const PerHead own_decay(kWkv, "decay", decay, {channels}, "x");
  const PerHead own_first(kWkv, "first", first, {channels}, "x");
  const int64_t states = state.dim() == 3 ? state.size(0) : 0;
  check_float32(kWkv, "state", state, {states, 3, channels}, "x");
  check_writable(kWkv, "state", state);
  check_contiguous(kWkv, "state", state);
  const HeldTexts held(kWkv, starts, lengths, slots, rows, states);

  Tensor y = new_contiguous_like(x0);
  if (y.numel() == 0) return y;
  const Tensor x = dense_rows(x0), key = dense_rows(key0);
  WkvArgs args{};
  args.texts = held.texts;
  args.x = x.const_data_ptr();
  args.x_row = x.stride(0);
  args.key = {key.const_data_ptr(), key.stride(0), 1, key.scalar_type() == ScalarType::Float};
  args.decay = own_decay.data;
  args.first = own_first.data;
  args.state = static_cast<float*>(state.mutable_data_ptr());
  args.y = y.mutable_data_ptr();
  args.channels = channels;
  const int64_t blocks = (channels + kRecurrenceColumns - 1) / kRecurrenceColumns;
  // Four exponentials for each number.
  const int64_t work =
      16 * std::min(channels, kRecurrenceColumns) * std::max<int64_t>(1, rows / args.texts.batch);
  wkv_kernels.visit(x.scalar_type(), [&]<class T>(auto* kernel) {
    parallel_for(args.texts.batch * blocks, std::max<int64_t>(1, kGrain / work),
                 [&](int64_t begin, int64_t end) { kernel(&args, begin, end); });
  });
  return y;
}

}  // namespace
}  // namespace ipex

STABLE_TORCH_LIBRARY_IMPL(ipex, CPU, m) {
  IPEX_IMPL(m, "causal_conv1d_varlen", ipex::causal_conv1d_varlen);
  IPEX_IMPL(m, "gated_delta_rule", ipex::gated_delta_rule);
  IPEX_IMPL(m, "ssd_scan", ipex::ssd_scan);
  IPEX_IMPL(m, "selective_scan_varlen", ipex::selective_scan_varlen);
  IPEX_IMPL(m, "wkv_scan", ipex::wkv_scan);
}
