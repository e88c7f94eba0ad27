// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <atomic>
#include <vector>

#include "ipex/dispatch.h"
#include "linear.h"
#include "packed_check.h"

namespace ipex {
namespace {

const auto kernels = IPEX_KERNELS("linear", linear);

Activation parse_activation(const std::string& name) {
  if (name == "none") return Activation::kNone;
  if (name == "relu") return Activation::kRelu;
  if (name == "gelu") return Activation::kGelu;
  if (name == "gelu_tanh") return Activation::kGeluTanh;
  if (name == "silu") return Activation::kSilu;
  fail("linear: activation must be one of none, relu, gelu, gelu_tanh, silu, got ", name);
}

void check_bias(const Tensor& x, const OptionalTensor& bias, int64_t n) {
  if (!bias) return;
  const ScalarType dtype = bias->scalar_type();
  IPEX_CHECK(bias->is_cpu(), "linear: bias must be on the device of x = cpu, got another");
  IPEX_CHECK(dtype == x.scalar_type() || dtype == ScalarType::Float,
             "linear: bias must have the dtype of x = ", dtype_name(x.scalar_type()),
             " or float32, got ", dtype_name(dtype));
  IPEX_CHECK(bias->dim() == 1 && bias->size(0) == n,
             "linear: bias must be 1-D of size out_features = ", n, ", got ", shape_text(*bias));
}

void check_residual(const Tensor& x, const OptionalTensor& residual,
                    const std::vector<int64_t>& shape) {
  if (!residual) return;
  IPEX_CHECK(residual->is_cpu(), "linear: residual must be on the device of x = cpu, got another");
  IPEX_CHECK(residual->scalar_type() == x.scalar_type(),
             "linear: residual must have the dtype of x = ", dtype_name(x.scalar_type()), ", got ",
             dtype_name(residual->scalar_type()));
  bool same = residual->dim() == static_cast<int64_t>(shape.size());
  for (int64_t i = 0; same && i < residual->dim(); ++i)
    same = residual->size(i) == shape[static_cast<size_t>(i)];
  if (same) return;
  std::string text;
  for (int64_t size : shape) text += (text.empty() ? "" : ", ") + std::to_string(size);
  fail("linear: residual must have shape [", text, "], got ", shape_text(*residual));
}

// Spreads the rows and panels over torch's threads.
void run_parallel(const LinearArgs& args, decltype(ipex_k_linear_f32)* kernel, int64_t m) {
  const int64_t panels = (args.n + kPackedPanel - 1) / kPackedPanel;
  const auto threads = static_cast<int64_t>(torch::stable::get_num_threads());
  // A region costs about as much as 60 thousand multiplications on one thread.
  constexpr int64_t kRegion = 60000;
  // Blocks of rows are multiples of every tile height. Small products get smaller blocks so that
  // all threads have work.
  int64_t block = 192;
  while (block > 24 && (m + block - 1) / block * panels < 4 * threads) block /= 2;
  const int64_t blocks = (m + block - 1) / block;
  if (blocks == 1) {
    // The partition of packing: a thread reads the panels whose memory it touched first.
    const int64_t work = std::max<int64_t>(1, m * args.k * kPackedPanel);
    parallel_for(panels, std::max<int64_t>(1, kRegion / work),
                 [&](int64_t begin, int64_t end) { kernel(&args, 0, m, begin, end); });
    return;
  }
  // Blocks of unequal size and threads of unequal speed: tasks are taken from a counter. Which
  // thread computes a task does not change its bits.
  int64_t chunk = panels;
  const auto chunks = [&] { return (panels + chunk - 1) / chunk; };
  while (chunk > 2 && blocks * chunks() < 8 * threads) chunk = (chunk / 2 + 1) / 2 * 2;
  const int64_t tasks = blocks * chunks(), per_block = chunks();
  const int64_t workers =
      std::clamp<int64_t>(m * args.k * args.n / kRegion, 1, std::min(threads, tasks));
  std::atomic<int64_t> next{0};
  parallel_for(workers, 1, [&](int64_t, int64_t) {
    for (int64_t t; (t = next.fetch_add(1, std::memory_order_relaxed)) < tasks;) {
      const int64_t row = t / per_block * block, panel = t % per_block * chunk;
      kernel(&args, row, std::min(m, row + block), panel, std::min(panels, panel + chunk));
    }
  });
}

Tensor linear(const Tensor& x, const Tensor& packed_weight, int64_t out_features,
              const OptionalTensor& bias, const OptionalTensor& residual, std::string activation) {
  check_tensor("linear", "x", x);
  IPEX_CHECK(out_features > 0, "linear: out_features must be positive, got ", out_features);
  const int64_t k = x.size(x.dim() - 1);
  check_packed("linear", "packed_weight", packed_weight, out_features, k, x.scalar_type());

  check_bias(x, bias, out_features);
  std::vector<int64_t> shape(x.sizes().begin(), x.sizes().end());
  shape.back() = out_features;
  check_residual(x, residual, shape);

  LinearArgs args{};
  args.activation = parse_activation(activation);
  Tensor y = new_contiguous(shape.data(), static_cast<int64_t>(shape.size()), x.scalar_type());
  const Rows rows = as_rows(x);
  Rows residual_rows;
  if (residual) residual_rows = as_rows(*residual);
  Tensor bias_contiguous;
  if (bias) bias_contiguous = as_contiguous(*bias);
  args.x = rows.data;
  args.x_stride = rows.stride;
  args.weight = static_cast<const char*>(packed_weight.const_data_ptr()) + sizeof(PackedHeader);
  args.bias = bias ? bias_contiguous.const_data_ptr() : nullptr;
  args.bias_is_f32 = bias && bias->scalar_type() == ScalarType::Float;
  args.residual = residual_rows.data;
  args.residual_stride = residual_rows.stride;
  args.y = y.mutable_data_ptr();
  args.n = out_features;
  args.k = k;

  kernels.visit(x.scalar_type(),
                [&]<class T>(auto* kernel) { run_parallel(args, kernel, rows.rows); });
  return y;
}

}  // namespace
}  // namespace ipex

STABLE_TORCH_LIBRARY_IMPL(ipex, CPU, m) { m.impl("linear", TORCH_BOX(&ipex::linear)); }
