// SPDX-License-Identifier: Apache-2.0
#include <tuple>

#include "optimizer_step/optimizer_step.h"

#include "ipex/glue/op_loops.h"

namespace ipex {
namespace {

constexpr int64_t kGrain = 16 * 1024;

const Kernel<decltype(ipex_k_split_bits_f32)> split_kernel("split_float_bfloat16",
                                                           "ipex_k_split_bits_f32");
const Kernel<decltype(ipex_k_join_bits_bf16)> join_kernel("cat_bfloat16_float",
                                                          "ipex_k_join_bits_bf16");

Tensor like(const Tensor& x, ScalarType dtype) {
  std::vector<int64_t> sizes;
  for (int64_t i = 0; i < x.dim(); ++i) sizes.push_back(x.size(i));
  return new_contiguous(sizes.data(), x.dim(), dtype);
}

std::tuple<Tensor, Tensor> split_float_bfloat16(const Tensor& x0) {
  IPEX_CHECK(x0.scalar_type() == ScalarType::Float,
             "split_float_bfloat16: x must have dtype float32, got ", dtype_name(x0.scalar_type()));
  const Tensor x = as_contiguous(x0);
  Tensor top = like(x, ScalarType::BFloat16), low = like(x, ScalarType::BFloat16);
  const auto* in = static_cast<const float*>(x.const_data_ptr());
  auto* upper = static_cast<uint16_t*>(top.mutable_data_ptr());
  auto* lower = static_cast<uint16_t*>(low.mutable_data_ptr());
  auto* kernel = split_kernel.get();
  parallel_for(x.numel(), kGrain, [&](int64_t begin, int64_t end) {
    kernel(in + begin, upper + begin, lower + begin, end - begin);
  });
  return {top, low};
}

Tensor cat_bfloat16_float(const Tensor& top0, const Tensor& low0) {
  constexpr char kOp[] = "cat_bfloat16_float";
  IPEX_CHECK(top0.scalar_type() == ScalarType::BFloat16, kOp,
             ": top must have dtype bfloat16, got ", dtype_name(top0.scalar_type()));
  check_like(kOp, "low", low0, top0, "top");
  const Tensor top = as_contiguous(top0), low = as_contiguous(low0);
  Tensor y = like(top, ScalarType::Float);
  const auto* upper = static_cast<const uint16_t*>(top.const_data_ptr());
  const auto* lower = static_cast<const uint16_t*>(low.const_data_ptr());
  auto* out = static_cast<float*>(y.mutable_data_ptr());
  auto* kernel = join_kernel.get();
  parallel_for(top.numel(), kGrain, [&](int64_t begin, int64_t end) {
    kernel(upper + begin, lower + begin, out + begin, end - begin);
  });
  return y;
}

}  // namespace
}  // namespace ipex

STABLE_TORCH_LIBRARY_IMPL(ipex, CPU, m) {
  IPEX_IMPL(m, "split_float_bfloat16", ipex::split_float_bfloat16);
  IPEX_IMPL(m, "cat_bfloat16_float", ipex::cat_bfloat16_float);
}
