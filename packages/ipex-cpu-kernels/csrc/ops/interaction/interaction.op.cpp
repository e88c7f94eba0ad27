// SPDX-License-Identifier: Apache-2.0
#include "interaction/interaction.h"

#include <algorithm>
#include <atomic>
#include <string>
#include <vector>

#include "ipex/glue/argument_checks.h"
#include "runtime/scratch.h"

namespace ipex {
namespace {

constexpr char kForward[] = "interaction";
constexpr char kBackward[] = "interaction_backward";

const auto forward_kernels = IPEX_KERNELS(kForward, interaction);
const auto backward_kernels = IPEX_KERNELS(kBackward, interaction_backward);

void check_inputs(const char* op, const std::vector<Tensor>& inputs) {
  IPEX_CHECK(!inputs.empty(), op, ": inputs must hold at least 1 tensor, got 0");
  const Tensor& first = inputs[0];
  check_tensor(op, "inputs[0]", first);
  IPEX_CHECK(first.dim() == 2, op, ": inputs[0] must be 2-D [B, D], got ", first.dim(), "-D");
  for (size_t i = 1; i < inputs.size(); ++i)
    check_like(op, ("inputs[" + std::to_string(i) + "]").c_str(), inputs[i], first, "inputs[0]");
}

// The inputs as kernels take them.
struct Inputs {
  std::vector<Rows> rows;  // keep the memory alive
  std::vector<const void*> data;
  std::vector<int64_t> strides;

  explicit Inputs(const std::vector<Tensor>& inputs) {
    rows.reserve(inputs.size());
    for (const Tensor& input : inputs) {
      rows.push_back(as_rows(input));
      data.push_back(rows.back().data);
      strides.push_back(rows.back().stride);
    }
  }
  InteractionArgs args(const Tensor& first) const {
    InteractionArgs args{};
    args.inputs = data.data();
    args.strides = strides.data();
    args.count = static_cast<int64_t>(data.size());
    args.batch = first.size(0);
    args.dim = first.size(1);
    return args;
  }
};

template <class Kernels>
void run(const char* op, const Kernels& kernels, ScalarType dtype, const InteractionArgs& args) {
  const int64_t work = args.count * args.dim + args.count * args.count;
  const int64_t grain = std::max<int64_t>(1, 65536 / work);
  const int64_t bytes = interaction_scratch_bytes(args.count, args.dim);
  std::atomic<bool> no_memory{false};
  kernels.visit(dtype, [&]<class T>(auto* kernel) {
    parallel_for(args.batch, grain, [&](int64_t begin, int64_t end) {
      char* room = Scratch<Area::kInteraction>::get(bytes);
      if (room)
        kernel(&args, begin, end, reinterpret_cast<float*>(room));
      else
        no_memory = true;
    });
  });
  IPEX_CHECK(!no_memory, op, ": not enough memory for the products of one sample");
}

Tensor interaction(const std::vector<Tensor>& inputs) {
  check_inputs(kForward, inputs);
  const Tensor& first = inputs[0];
  const Inputs views(inputs);
  InteractionArgs args = views.args(first);
  const int64_t sizes[] = {args.batch, interaction_width(args.count, args.dim)};
  Tensor out = new_contiguous(sizes, 2, first.scalar_type());
  args.out = out.mutable_data_ptr();
  run(kForward, forward_kernels, first.scalar_type(), args);
  return out;
}

Tensor interaction_backward(const Tensor& grad, const std::vector<Tensor>& inputs) {
  check_inputs(kBackward, inputs);
  const Tensor& first = inputs[0];
  IPEX_CHECK(grad.is_cpu(), kBackward, ": grad must be on the device of inputs[0] = cpu");
  IPEX_CHECK(grad.scalar_type() == first.scalar_type(), kBackward, ": grad must have dtype ",
             dtype_name(first.scalar_type()), ", got ", dtype_name(grad.scalar_type()));
  const Inputs views(inputs);
  InteractionArgs args = views.args(first);
  IPEX_CHECK(grad.dim() >= 1, kBackward, ": grad must have at least 1 dimension(s), got ",
             grad.dim(), "-D");
  check_shape(kBackward, "grad", grad, {args.batch, interaction_width(args.count, args.dim)});
  const Rows rows = as_rows(grad);
  args.grad = rows.data;
  args.grad_stride = rows.stride;
  const int64_t sizes[] = {args.count, args.batch, args.dim};
  Tensor out = new_contiguous(sizes, 3, first.scalar_type());
  args.out = out.mutable_data_ptr();
  run(kBackward, backward_kernels, first.scalar_type(), args);
  return out;
}

}  // namespace
}  // namespace ipex

STABLE_TORCH_LIBRARY_IMPL(ipex, CPU, m) {
  IPEX_IMPL(m, "interaction", ipex::interaction);
  IPEX_IMPL(m, "interaction_backward", ipex::interaction_backward);
}
