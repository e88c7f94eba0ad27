// SPDX-License-Identifier: Apache-2.0
// A linear layer of each expert that a token goes to: the second product of fused_experts alone.
#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "fused_experts/experts_check.h"
#include "fused_experts/experts_plan.h"
#include "fused_experts/experts_tasks.h"
#include "fused_experts/experts_woq.h"
#include "fused_experts/fused_experts.h"
#include "ipex/glue/dispatch.h"
#include "ipex/glue/gemm_schedule.h"
#include "runtime/scratch.h"

namespace ipex {
namespace {

const char* const kOp = "expert_linear";
const auto down_kernels = IPEX_KERNELS("expert_linear", experts_down);

void check(const Tensor& x, const Tensor& packed, const Tensor& ids, int64_t n,
           const OptionalTensor& weights, bool quantized) {
  check_tensor(kOp, "x", x);
  IPEX_CHECK(x.dim() == 2 || x.dim() == 3, kOp, ": x must be 2-D or 3-D, got ", shape_text(x));
  const int64_t k = x.size(x.dim() - 1);
  IPEX_CHECK(k > 0, kOp, ": x must have at least one feature, got ", shape_text(x));
  IPEX_CHECK(n > 0, kOp, ": out_features must be positive, got ", n);
  if (quantized) {
    check_quantized_expert(kOp, "packed_weight", packed, 0, n, k, false);
  } else {
    const ScalarType dtype = x.scalar_type();
    check_experts(kOp, "packed_weight", packed, n, k, dtype, false);
    check_expert_header(kOp, "packed_weight", packed.const_data_ptr(), n, k, dtype, false);
  }
  IPEX_CHECK(ids.is_cpu(), kOp, ": ids must be on the device of x = cpu");
  const ScalarType type = ids.scalar_type();
  IPEX_CHECK(type == ScalarType::Int || type == ScalarType::Long, kOp,
             ": ids must have dtype int32, int64, got ", dtype_name(type));
  IPEX_CHECK(ids.dim() == 2 && ids.size(0) == x.size(0), kOp, ": ids must be 2-D with ", x.size(0),
             " rows, got ", shape_text(ids));
  IPEX_CHECK(x.dim() == 2 || x.size(1) == ids.size(1), kOp, ": x must have a row for each of ",
             ids.size(1), " ids, got ", shape_text(x));
  if (!weights) return;
  IPEX_CHECK(weights->is_cpu(), kOp, ": weights must be on the device of x = cpu");
  const ScalarType dtype = weights->scalar_type();
  IPEX_CHECK(dtype == x.scalar_type() || dtype == ScalarType::Float, kOp,
             ": weights must have the dtype of x = ", dtype_name(x.scalar_type()),
             " or float32, got ", dtype_name(dtype));
  IPEX_CHECK(
      weights->dim() == 2 && weights->size(0) == ids.size(0) && weights->size(1) == ids.size(1),
      kOp, ": weights must have shape ", shape_text(ids), ", got ", shape_text(*weights));
}

Tensor expert_linear(const Tensor& x, const Tensor& packed_weight, const Tensor& given_ids,
                     int64_t out_features, const OptionalTensor& given_weights,
                     std::string lowp_mode) {
  const bool quantized = quantized_header(packed_weight) != nullptr;
  check(x, packed_weight, given_ids, out_features, given_weights, quantized);
  const WoqCompute compute = parse_lowp(kOp, lowp_mode, x.scalar_type(), quantized);
  const int64_t experts = packed_weight.size(0), n = out_features;
  const Tensor ids = as_contiguous(given_ids);
  const ExpertIds view{ids.const_data_ptr(), ids.scalar_type() == ScalarType::Long, 0, experts,
                       experts};
  const int64_t count = ids.numel(), top_k = ids.size(1);
  for (int64_t i = 0; i < count; ++i)
    IPEX_CHECK(view.valid(view.raw(i)), kOp, ": ids must be -1 or in [0, ", experts, "), got ",
               view.raw(i));
  const bool sums = given_weights.has_value();
  const int64_t sizes[] = {ids.size(0), sums ? n : top_k, n};
  Tensor y = new_contiguous(sizes, sums ? 2 : 3, x.scalar_type());
  if (y.numel() == 0) return y;

  const OptionalTensor weights =
      sums ? OptionalTensor(as_contiguous(*given_weights)) : std::nullopt;
  const void* values = sums ? weights->const_data_ptr() : nullptr;
  // Each place of ids by itself, in rising order within an expert.
  SortedPairs pairs(view, values, sums ? weights->scalar_type() : ScalarType::Float, count, 1);
  const auto total = static_cast<int64_t>(pairs.tokens.size());
  const Rows rows = as_rows(x);
  const int64_t k = rows.columns, shared = x.dim() == 2 ? top_k : 1;
  const int64_t element = x.scalar_type() == ScalarType::Float ? 4 : 2;
  char* gathered = Scratch<Area::kExpertsMiddle>::get(std::max<int64_t>(64, total * k * element));
  IPEX_CHECK(gathered, kOp, ": out of memory");
  const char* from = static_cast<const char*>(rows.data);
  parallel_for(total, std::max<int64_t>(1, 65536 / k), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      std::memcpy(gathered + i * k * element,
                  from + pairs.tokens[static_cast<size_t>(i)] / shared * rows.stride * element,
                  static_cast<size_t>(k * element));
  });
  if (sums)
    for (int32_t& token : pairs.tokens) token = static_cast<int32_t>(token / top_k);

  std::vector<ExpertJob> jobs;
  for (size_t j = 0; j < pairs.experts.size(); ++j) {
    const auto first = static_cast<size_t>(pairs.first[j]);
    const char* weight = static_cast<const char*>(packed_weight.const_data_ptr()) +
                         pairs.experts[j] * packed_weight.size(1);
    ExpertJob job{};
    if (quantized) {
      check_quantized_expert(kOp, "packed_weight", packed_weight, pairs.experts[j], n, k, false);
      job.w2 = weight;
    } else {
      check_expert_header(kOp, "packed_weight", weight, n, k, x.scalar_type(), false);
      job.w2 = weight + sizeof(PackedHeader);
    }
    job.tokens = pairs.tokens.data() + first;
    job.weights = sums ? pairs.weights.data() + first : nullptr;
    job.middle = gathered + pairs.first[j] * k * element;
    job.rows = pairs.first[j + 1] - pairs.first[j];
    job.inner = job.middle_stride = k;
    jobs.push_back(job);
  }
  ExpertsArgs args{};
  args.jobs = jobs.data();
  args.job_count = static_cast<int64_t>(jobs.size());
  args.y = y.mutable_data_ptr();
  args.hidden = n;

  const int64_t result = sums ? ids.size(0) : count;
  if (quantized) {
    Rows places = rows;
    places.rows = result;
    run_woq(kOp, args, jobs, places, x.scalar_type(), compute);
    return y;
  }

  const bool many = has_many_rows(jobs), limited = many && uses_tiles(x.scalar_type());
  down_kernels.visit(x.scalar_type(), [&]<class>(auto* down) {
    run_down(kOp, down, args, result, total * k * n, many, limited);
  });
  return y;
}

}  // namespace
}  // namespace ipex

STABLE_TORCH_LIBRARY_IMPL(ipex, CPU, m) { IPEX_IMPL(m, "expert_linear", ipex::expert_linear); }
