// SPDX-License-Identifier: Apache-2.0
#include "moe_routing/moe_routing.h"

#include <algorithm>
#include <atomic>
#include <tuple>

#include "ipex/glue/dispatch.h"
#include "runtime/scratch.h"

namespace ipex {
namespace {

const auto kernels = IPEX_KERNELS("moe_routing", moe_routing);

void check_groups(int64_t experts, int64_t top_k, int64_t groups, int64_t top_groups) {
  const char* op = "moe_routing";
  if (groups <= 1) {
    IPEX_CHECK(groups >= 0, op, ": num_expert_group must be 0 or more, got ", groups);
    return;
  }
  IPEX_CHECK(experts % groups == 0, op,
             ": num_expert_group must divide the number of experts = ", experts, ", got ", groups);
  IPEX_CHECK(top_groups > 0 && top_groups <= groups, op,
             ": topk_group must be between 1 and num_expert_group = ", groups, ", got ",
             top_groups);
  const int64_t most = top_groups * (experts / groups);
  IPEX_CHECK(top_k <= most, op, ": top_k must be at most the ", most,
             " experts of topk_group, got ", top_k);
}

void check_bias(const OptionalTensor& bias, int64_t experts) {
  if (!bias) return;
  const char* op = "moe_routing";
  IPEX_CHECK(bias->is_cpu(), op,
             ": e_score_correction_bias must be on the device of router_logits = cpu");
  IPEX_CHECK(
      bias->scalar_type() == ScalarType::Float && bias->dim() == 1 && bias->size(0) == experts, op,
      ": e_score_correction_bias must be float32 of shape [", experts, "], got ",
      dtype_name(bias->scalar_type()), " ", shape_text(*bias));
}

std::tuple<Tensor, Tensor> moe_routing(const Tensor& logits, int64_t top_k, bool renormalize,
                                       std::string scoring_func, int64_t num_expert_group,
                                       int64_t topk_group, const OptionalTensor& bias,
                                       double factor, double jitter) {
  const char* op = "moe_routing";
  check_tensor(op, "router_logits", logits);
  IPEX_CHECK(logits.dim() == 2, op, ": router_logits must be 2-D, got ", shape_text(logits));
  const int64_t tokens = logits.size(0), experts = logits.size(1);
  const bool sparsemixer = scoring_func == "sparsemixer";
  IPEX_CHECK(scoring_func == "softmax" || scoring_func == "sigmoid" || sparsemixer, op,
             ": scoring_func must be one of softmax, sigmoid, sparsemixer, got ", scoring_func);
  IPEX_CHECK(top_k > 0 && top_k <= experts, op,
             ": top_k must be between 1 and the number of experts = ", experts, ", got ", top_k);
  check_groups(experts, top_k, num_expert_group, topk_group);
  IPEX_CHECK(jitter >= 0, op, ": jitter must be 0 or more, got ", jitter);
  check_bias(bias, experts);
  IPEX_CHECK(!sparsemixer || (num_expert_group <= 1 && !bias), op,
             ": scoring_func must be softmax or sigmoid with groups or a bias, got sparsemixer");

  const int64_t sizes[2] = {tokens, top_k};
  Tensor weights = new_contiguous(sizes, 2, ScalarType::Float);
  Tensor ids = new_contiguous(sizes, 2, ScalarType::Int);
  if (tokens == 0) return {weights, ids};
  const Rows rows = as_rows(logits);
  Tensor plain_bias;
  if (bias) plain_bias = as_contiguous(*bias);
  const RoutingArgs args{
      .logits = rows.data,
      .bias = bias ? static_cast<const float*>(plain_bias.const_data_ptr()) : nullptr,
      .weights = static_cast<float*>(weights.mutable_data_ptr()),
      .ids = static_cast<int32_t*>(ids.mutable_data_ptr()),
      .stride = rows.stride,
      .experts = experts,
      .top_k = top_k,
      .groups = std::max<int64_t>(1, num_expert_group),
      .top_groups = topk_group,
      .factor = static_cast<float>(factor),
      .jitter = static_cast<float>(jitter),
      .sigmoid = scoring_func == "sigmoid",
      .sparsemixer = sparsemixer,
      .renormalize = renormalize,
  };
  const int64_t bytes = routing_scratch(args) * static_cast<int64_t>(sizeof(float));
  // About 8 nanoseconds per expert; a parallel region is worth it from some microseconds on.
  const int64_t grain = std::max<int64_t>(1, 4096 / experts);
  std::atomic<bool> no_memory{false};
  kernels.visit(logits.scalar_type(), [&]<class T>(auto* kernel) {
    parallel_for(tokens, grain, [&](int64_t begin, int64_t end) {
      char* scratch = Scratch<Area::kMoeRouting>::get(bytes);
      if (!scratch)
        no_memory = true;
      else
        kernel(&args, begin, end, reinterpret_cast<float*>(scratch));
    });
  });
  IPEX_CHECK(!no_memory, op, ": out of memory");
  return {weights, ids};
}

}  // namespace
}  // namespace ipex

STABLE_TORCH_LIBRARY_IMPL(ipex, CPU, m) { IPEX_IMPL(m, "moe_routing", ipex::moe_routing); }
