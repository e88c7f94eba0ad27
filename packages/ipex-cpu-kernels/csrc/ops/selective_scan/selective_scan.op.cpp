// SPDX-License-Identifier: Apache-2.0
#include "selective_scan/selective_scan.h"

#include <algorithm>
#include <atomic>

#include "ipex/glue/argument_checks.h"
#include "ipex/glue/sequence.h"
#include "runtime/scratch.h"

namespace ipex {
namespace {

constexpr char kOp[] = "selective_scan_fn";

const auto kernels = IPEX_KERNELS(kOp, selective_scan);

// Number of groups of B or C, 0 if it does not vary along the sequence.
int64_t groups_of(const Tensor& matrix) {
  return matrix.dim() == 2 ? 0 : matrix.dim() == 3 ? 1 : matrix.size(1);
}

void check_matrix(const char* name, const Tensor& value, const Tensor& u, int64_t size) {
  check_kind(kOp, name, value, u, "u", true);
  const int64_t batch = u.size(0), channels = u.size(1), steps = u.size(2);
  const bool grouped = value.dim() == 4 && value.size(1) > 0 && channels % value.size(1) == 0;
  IPEX_CHECK(has_shape(value, {channels, size}) || has_shape(value, {batch, size, steps}) ||
                 (grouped && has_shape(value, {batch, value.size(1), size, steps})),
             kOp, ": ", name, " must have shape ", shape_text({channels, size}), ", ",
             shape_text({batch, size, steps}), " or [", batch, ", G, ", size, ", ", steps,
             "] where G divides ", channels, ", got ", shape_text(value));
}

// [D][N], or [B][G][L][N] if it varies.
Tensor prepared(const Tensor& matrix) {
  const int64_t last = matrix.dim() - 1;
  return as_float_contiguous(last == 1 ? matrix : torch::stable::transpose(matrix, last - 1, last));
}

struct Vector {
  OptionalTensor tensor;  // keeps the memory alive
  const float* data = nullptr;

  explicit Vector(const OptionalTensor& value) {
    if (!value) return;
    tensor = as_float_contiguous(*value);
    data = static_cast<const float*>(tensor->const_data_ptr());
  }
};

SequenceStrides strides_of(const Tensor& x) { return {x.stride(0), x.stride(1), x.stride(2)}; }

std::tuple<Tensor, Tensor> selective_scan(const Tensor& u0, const Tensor& delta0, const Tensor& a0,
                                          const Tensor& b0, const Tensor& c0,
                                          const OptionalTensor& d0, const OptionalTensor& z0,
                                          const OptionalTensor& bias0, bool softplus,
                                          const OptionalTensor& initial0) {
  check_tensor(kOp, "u", u0);
  IPEX_CHECK(u0.dim() == 3, kOp, ": u must be 3-D [B, D, L], got ", u0.dim(), "-D");
  check_like(kOp, "delta", delta0, u0, "u");
  check_kind(kOp, "A", a0, u0, "u", true);
  const int64_t batch = u0.size(0), channels = u0.size(1), steps = u0.size(2);
  IPEX_CHECK(a0.dim() == 2 && a0.size(0) == channels && a0.size(1) > 0, kOp,
             ": A must have shape [", channels, ", N], got ", shape_text(a0));
  const int64_t size = a0.size(1);
  check_matrix("B", b0, u0, size);
  check_matrix("C", c0, u0, size);
  check_shaped(kOp, "D", d0, {channels}, u0, "u", true);
  if (z0) check_like(kOp, "z", *z0, u0, "u");
  check_shaped(kOp, "delta_bias", bias0, {channels}, u0, "u", true);
  if (initial0) check_float32(kOp, "initial_state", *initial0, {batch, channels, size}, "u");

  Tensor y = new_sequence_like(u0);
  const int64_t state_sizes[3] = {batch, channels, size};
  Tensor last = new_contiguous(state_sizes, 3, ScalarType::Float);
  if (batch * channels == 0) return {y, last};

  const Tensor u = dense_either_way(u0), delta = dense_either_way(delta0);
  const OptionalTensor z = z0 ? OptionalTensor(dense_either_way(*z0)) : z0;
  const Tensor a = as_float_contiguous(a0), b = prepared(b0), c = prepared(c0);
  const Vector d(d0), bias(bias0), initial(initial0);
  SelectiveScanArgs args{};
  args.u = u.const_data_ptr();
  args.delta = delta.const_data_ptr();
  args.z = z ? z->const_data_ptr() : nullptr;
  args.y = y.mutable_data_ptr();
  args.u_strides = strides_of(u);
  args.delta_strides = strides_of(delta);
  if (z) args.z_strides = strides_of(*z);
  args.y_strides = strides_of(y);
  args.a = static_cast<const float*>(a.const_data_ptr());
  args.b = static_cast<const float*>(b.const_data_ptr());
  args.c = static_cast<const float*>(c.const_data_ptr());
  args.d = d.data;
  args.bias = bias.data;
  args.initial = initial.data;
  args.last = static_cast<float*>(last.mutable_data_ptr());
  args.batch = batch;
  args.channels = channels;
  args.steps = steps;
  args.size = size;
  args.b_groups = groups_of(b0);
  args.c_groups = groups_of(c0);
  args.softplus = softplus;

  const int64_t blocks = (channels + kScanChannels - 1) / kScanChannels;
  // A task should take some ten microseconds: an exponential takes half a nanosecond.
  const int64_t grain = std::max<int64_t>(1, 20000 / (kScanChannels * size * (steps + 1)));
  const int64_t bytes = selective_scan_scratch_bytes(size);
  std::atomic<bool> no_memory{false};
  kernels.visit(u.scalar_type(), [&]<class T>(auto* kernel) {
    parallel_for(batch * blocks, grain, [&](int64_t begin, int64_t end) {
      char* room = Scratch<Area::kSelectiveScan>::get(bytes);
      if (room)
        kernel(&args, begin, end, room);
      else
        no_memory = true;
    });
  });
  IPEX_CHECK(!no_memory, kOp, ": not enough memory for the states of a block of channels");
  return {y, last};
}

}  // namespace
}  // namespace ipex

STABLE_TORCH_LIBRARY_IMPL(ipex, CPU, m) { IPEX_IMPL(m, "selective_scan_fn", ipex::selective_scan); }
