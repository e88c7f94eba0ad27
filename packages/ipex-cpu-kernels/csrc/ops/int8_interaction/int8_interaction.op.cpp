// SPDX-License-Identifier: Apache-2.0
#include "int8_interaction/int8_interaction.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <optional>
#include <string>
#include <vector>

#include "int8_linear/activations.h"
#include "ipex/glue/argument_checks.h"
#include "runtime/scratch.h"

namespace ipex {
namespace {

constexpr char kOp[] = "int8_interaction";
constexpr int64_t kMostDim = 32768, kMostInputs = 4096;

const auto kernels = IPEX_KERNELS(kOp, int8_interaction);

void check_inputs(const std::vector<Tensor>& inputs) {
  IPEX_CHECK(!inputs.empty(), kOp, ": inputs must hold at least 1 tensor, got 0");
  const auto count = static_cast<int64_t>(inputs.size());
  IPEX_CHECK(count <= kMostInputs, kOp, ": inputs must hold at most ", kMostInputs,
             " tensors, got ", count);
  const Tensor& first = inputs[0];
  IPEX_CHECK(is_kernel_dtype(first.scalar_type()) || first.scalar_type() == ScalarType::Char, kOp,
             ": inputs[0] must have dtype float32, bfloat16, float16, int8, got ",
             dtype_name(first.scalar_type()));
  IPEX_CHECK(first.dim() == 2, kOp, ": inputs[0] must be 2-D [B, D], got ", first.dim(), "-D");
  IPEX_CHECK(first.size(1) <= kMostDim, kOp, ": inputs[0] must have at most ", kMostDim,
             " columns, got ", first.size(1));
  for (size_t i = 1; i < inputs.size(); ++i)
    check_like(kOp, ("inputs[" + std::to_string(i) + "]").c_str(), inputs[i], first, "inputs[0]");
}

Tensor int8_interaction(const std::vector<Tensor>& inputs, const Tensor& scales0,
                        std::optional<ScalarType> dtype, double output_scale, int64_t output_zero) {
  check_inputs(inputs);
  const Tensor& first = inputs[0];
  const auto count = static_cast<int64_t>(inputs.size());
  check_float32(kOp, "scales", scales0, {count}, "inputs[0]");
  const Tensor scales = as_contiguous(scales0);
  const auto* by = static_cast<const float*>(scales.const_data_ptr());
  for (int64_t i = 0; i < count; ++i)
    IPEX_CHECK(by[i] >= 0x1p-120f && std::isfinite(by[i]), kOp,
               ": scales must be finite and at least 2^-120, got ", by[i]);
  const bool codes = first.scalar_type() == ScalarType::Char;
  const ScalarType out = dtype ? *dtype : codes ? ScalarType::Float : first.scalar_type();
  IPEX_CHECK(is_kernel_dtype(out) || is_code_dtype(out), kOp,
             ": dtype must be float32, bfloat16, float16, int8 or uint8, got ", dtype_name(out));
  const bool to_codes = is_code_dtype(out);
  IPEX_CHECK(codes || to_codes || out == first.scalar_type(), kOp,
             ": dtype must be the dtype of inputs[0] = ", dtype_name(first.scalar_type()),
             ", int8 or uint8, got ", dtype_name(out));
  const auto out_scale = static_cast<float>(output_scale);
  const int64_t low = out == ScalarType::Char ? -128 : 0;
  if (to_codes) {
    IPEX_CHECK(out_scale >= 0x1p-120f && std::isfinite(out_scale), kOp,
               ": output_scale must be finite and at least 2^-120, got ", output_scale);
    IPEX_CHECK(output_zero >= low && output_zero <= low + 255, kOp, ": output_zero must be in [",
               low, ", ", low + 255, "], got ", output_zero);
  }

  std::vector<Rows> rows;  // keep the memory alive
  std::vector<const void*> data;
  std::vector<int64_t> strides;
  for (const Tensor& input : inputs) {
    rows.push_back(as_rows(input));
    data.push_back(rows.back().data);
    strides.push_back(rows.back().stride);
  }
  const int64_t batch = first.size(0), dim = first.size(1);
  const int64_t sizes[] = {batch, dim + count * (count - 1) / 2};
  Tensor y = new_contiguous(sizes, 2, out);
  if (y.numel() == 0) return y;
  Int8InteractionArgs args{};
  args.inputs = data.data();
  args.strides = strides.data();
  args.scales = by;
  args.out = y.mutable_data_ptr();
  args.count = count;
  args.dim = dim;
  args.codes = codes;
  args.to_codes = to_codes;
  args.is_signed = out == ScalarType::Char;
  args.out_scale = out_scale;
  args.out_zero = static_cast<int32_t>(output_zero);
  const int64_t work = count * dim + count * count;
  const int64_t bytes = int8_interaction_scratch(count, dim);
  std::atomic<bool> no_memory{false};
  kernels.visit(codes && to_codes ? ScalarType::Float
                : codes           ? out
                                  : first.scalar_type(),
                [&]<class T>(auto* kernel) {
                  parallel_for(batch, std::max<int64_t>(1, 65536 / work),
                               [&](int64_t begin, int64_t end) {
                                 char* scratch = Scratch<Area::kInt8Interaction>::get(bytes);
                                 if (scratch)
                                   kernel(&args, begin, end, scratch);
                                 else
                                   no_memory = true;
                               });
                });
  IPEX_CHECK(!no_memory, kOp, ": not enough memory for the products of one sample");
  return y;
}

}  // namespace
}  // namespace ipex

STABLE_TORCH_LIBRARY_IMPL(ipex, CPU, m) {
  IPEX_IMPL(m, "int8_interaction", ipex::int8_interaction);
}
