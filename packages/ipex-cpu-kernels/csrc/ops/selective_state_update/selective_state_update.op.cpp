// SPDX-License-Identifier: Apache-2.0
#include "selective_state_update/selective_state_update.h"

#include <algorithm>
#include <atomic>

#include "ipex/glue/argument_checks.h"
#include "runtime/scratch.h"

namespace ipex {
namespace {

constexpr char kOp[] = "selective_state_update";

const auto kernels = IPEX_KERNELS(kOp, selective_state_update);

void check_matrix(const char* name, const Tensor& value, const Tensor& x, int64_t batch,
                  int64_t heads, int64_t size) {
  check_kind(kOp, name, value, x, "x", true);
  const bool grouped = value.dim() == 3 && value.size(1) > 0 && heads % value.size(1) == 0;
  IPEX_CHECK(has_shape(value, {batch, size}) ||
                 (grouped && has_shape(value, {batch, value.size(1), size})),
             kOp, ": ", name, " must have shape ", shape_text({batch, size}), " or [", batch,
             ", G, ", size, "] where G divides ", heads, ", got ", shape_text(value));
}

// The dimensions of x are batch, head and channel (or number of the state), or some of them.
StepVector vector_of(const Tensor& x, bool has_batch, bool has_heads) {
  StepVector v;
  v.data = x.const_data_ptr();
  v.is_f32 = x.scalar_type() == ScalarType::Float;
  int64_t i = 0;
  if (has_batch) v.batch = x.stride(i++);
  if (has_heads) v.head = x.stride(i++);
  v.channel = x.stride(i);
  return v;
}

// The sizes of a state [B, D, N] or [B, H, D, N].
struct Sizes {
  bool has_heads;
  int64_t batch, heads, channels, numbers;

  explicit Sizes(const Tensor& state)
      : has_heads(state.dim() == 4),
        batch(state.size(0)),
        heads(has_heads ? state.size(1) : 1),
        channels(state.size(state.dim() - 2)),
        numbers(state.size(state.dim() - 1)) {}
};

Sizes check_arguments(const Tensor& state, const Tensor& x, const Tensor& dt, const Tensor& a,
                      const Tensor& b, const Tensor& c, const OptionalTensor& d,
                      const OptionalTensor& z, const OptionalTensor& bias) {
  check_tensor(kOp, "x", x);
  IPEX_CHECK(state.dim() == 3 || state.dim() == 4, kOp,
             ": state must be 3-D [B, D, N] or 4-D [B, H, D, N], got ", state.dim(), "-D");
  check_kind(kOp, "state", state, x, "x", true);
  const Sizes n(state);
  IPEX_CHECK(n.numbers > 0, kOp, ": state must have a last dimension that is not empty, got ",
             shape_text(state));
  check_writable(kOp, "state", state);
  const auto check_like_rows = [&](const char* name, const Tensor& value) {
    if (n.has_heads)
      check_shape(kOp, name, value, {n.batch, n.heads, n.channels});
    else
      check_shape(kOp, name, value, {n.batch, n.channels});
  };
  const auto check_parameter = [&](const char* name, const OptionalTensor& value) {
    if (!value) return;
    check_kind(kOp, name, *value, x, "x", true);
    if (n.has_heads)
      check_shape(kOp, name, *value, {n.heads, n.channels});
    else
      check_shape(kOp, name, *value, {n.channels});
  };
  check_like_rows("x", x);
  check_kind(kOp, "dt", dt, x, "x", true);
  check_like_rows("dt", dt);
  check_kind(kOp, "A", a, x, "x", true);
  if (n.has_heads)
    check_shape(kOp, "A", a, {n.heads, n.channels, n.numbers});
  else
    check_shape(kOp, "A", a, {n.channels, n.numbers});
  check_matrix("B", b, x, n.batch, n.heads, n.numbers);
  check_matrix("C", c, x, n.batch, n.heads, n.numbers);
  check_parameter("D", d);
  if (z) {
    check_kind(kOp, "z", *z, x, "x", true);
    check_like_rows("z", *z);
  }
  check_parameter("dt_bias", bias);
  return n;
}

void run(const StateUpdateArgs& args, ScalarType dtype) {
  const int64_t blocks = (args.channels + kUpdateChannels - 1) / kUpdateChannels;
  const int64_t block = std::min(args.channels, kUpdateChannels) * args.size;
  const int64_t bytes = state_update_scratch_bytes(args.size);
  std::atomic<bool> no_memory{false};
  kernels.visit(dtype, [&]<class T>(auto* kernel) {
    const int64_t tasks = args.batch * args.heads * blocks;
    parallel_for(tasks, std::max<int64_t>(1, 16384 / block), [&](int64_t begin, int64_t end) {
      char* room = Scratch<Area::kStateUpdate>::get(bytes);
      if (room)
        kernel(&args, begin, end, room);
      else
        no_memory = true;
    });
  });
  IPEX_CHECK(!no_memory, kOp, ": not enough memory for the rows of B and C");
}

Tensor selective_state_update(const Tensor& state0, const Tensor& x, const Tensor& dt,
                              const Tensor& a0, const Tensor& b, const Tensor& c,
                              const OptionalTensor& d, const OptionalTensor& z,
                              const OptionalTensor& bias, bool softplus) {
  const Sizes n = check_arguments(state0, x, dt, a0, b, c, d, z, bias);
  Tensor y = new_contiguous_like(x);
  if (n.batch * n.heads * n.channels == 0) return y;

  Tensor state = state0;
  const bool in_place = n.numbers == 1 || state0.stride(state0.dim() - 1) == 1;
  if (!in_place) state = torch::stable::contiguous(state0);
  Tensor a = a0.scalar_type() == ScalarType::Float ? a0 : torch::stable::to(a0, ScalarType::Float);
  const int64_t last = a.dim() - 1;
  if (n.numbers > 1 && a.stride(last) != 1 && a.stride(last) != 0) a = torch::stable::contiguous(a);

  StateUpdateArgs args{};
  args.state = state.mutable_data_ptr();
  args.state_batch = state.stride(0);
  args.state_head = n.has_heads ? state.stride(1) : 0;
  args.state_channel = state.stride(state.dim() - 2);
  args.state_is_f32 = state.scalar_type() == ScalarType::Float;
  args.a = static_cast<const float*>(a.const_data_ptr());
  args.a_head = n.has_heads ? a.stride(0) : 0;
  args.a_channel = a.stride(last - 1);
  args.a_number = n.numbers == 1 ? 1 : a.stride(last);
  args.x = vector_of(x, true, n.has_heads);
  args.dt = vector_of(dt, true, n.has_heads);
  args.b = vector_of(b, true, b.dim() == 3);
  args.c = vector_of(c, true, c.dim() == 3);
  if (d) args.d = vector_of(*d, false, n.has_heads);
  if (z) args.z = vector_of(*z, true, n.has_heads);
  if (bias) args.bias = vector_of(*bias, false, n.has_heads);
  args.y = y.mutable_data_ptr();
  args.batch = n.batch;
  args.heads = n.heads;
  args.channels = n.channels;
  args.size = n.numbers;
  args.b_groups = b.dim() == 3 ? b.size(1) : 1;
  args.c_groups = c.dim() == 3 ? c.size(1) : 1;
  args.softplus = softplus;
  run(args, x.scalar_type());
  if (!in_place) {
    Tensor target = state0;
    torch::stable::copy_(target, state);
  }
  return y;
}

}  // namespace
}  // namespace ipex

STABLE_TORCH_LIBRARY_IMPL(ipex, CPU, m) {
  IPEX_IMPL(m, "selective_state_update", ipex::selective_state_update);
}
