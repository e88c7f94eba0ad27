// SPDX-License-Identifier: Apache-2.0
#include "fused_experts/fused_experts.h"

#include <algorithm>
#include <atomic>
#include <type_traits>
#include <vector>

#include "fused_experts/experts_check.h"
#include "fused_experts/experts_plan.h"
#include "fused_experts/experts_tasks.h"
#include "fused_experts/experts_woq.h"
#include "ipex/glue/dispatch.h"
#include "ipex/glue/gemm_schedule.h"
#include "runtime/scratch.h"

namespace ipex {
namespace {

const char* const kOp = "fused_experts";
const auto up_kernels = IPEX_KERNELS("fused_experts", experts_up);
const auto down_kernels = IPEX_KERNELS("fused_experts", experts_down);

ExpertActivation parse_activation(const std::string& name) {
  if (name == "silu") return ExpertActivation::kSilu;
  if (name == "gelu") return ExpertActivation::kGelu;
  if (name == "gelu_tanh") return ExpertActivation::kGeluTanh;
  if (name == "swigluoai") return ExpertActivation::kSwigluOai;
  if (name == "relu2") return ExpertActivation::kRelu2;
  fail(kOp, ": activation must be one of silu, gelu, gelu_tanh, swigluoai, relu2, got ", name);
}

void check_device(const char* name, const Tensor& value) {
  IPEX_CHECK(value.is_cpu(), kOp, ": ", name, " must be on the device of hidden_states = cpu");
}

void check_float_or(const char* name, const Tensor& value, const Tensor& x) {
  const ScalarType dtype = value.scalar_type();
  IPEX_CHECK(dtype == x.scalar_type() || dtype == ScalarType::Float, kOp, ": ", name,
             " must have the dtype of hidden_states = ", dtype_name(x.scalar_type()),
             " or float32, got ", dtype_name(dtype));
}

void check_bias(const char* name, const OptionalTensor& bias, const Tensor& x, int64_t experts,
                int64_t size) {
  if (!bias) return;
  check_device(name, *bias);
  check_float_or(name, *bias, x);
  IPEX_CHECK(bias->dim() == 2 && bias->size(0) == experts && bias->size(1) == size, kOp, ": ", name,
             " must have shape [", experts, ", ", size, "], got ", shape_text(*bias));
}

struct Call {
  const Tensor& x;
  const Tensor& w13;
  const Tensor& w2;
  const Tensor& topk_weights;
  const Tensor& topk_ids;
  int64_t inner;
  const OptionalTensor& w13_bias;
  const OptionalTensor& w2_bias;
  const OptionalTensor& shared_w13;
  const OptionalTensor& shared_w2;
  const OptionalTensor& shared_weights;
  int64_t shared_inner;
  int64_t start, total;
  bool quantized, gated;

  // Rows of the first product of an expert.
  int64_t up_rows(int64_t size) const { return gated ? 2 * size : size; }
  int64_t tokens() const { return x.size(0); }
  int64_t hidden() const { return x.size(1); }
  int64_t experts() const { return w13.size(0); }
};

// The first expert of packed weights [E, n, k].
void check_weights(const Call& c, const char* name, const Tensor& packed, int64_t n, int64_t k,
                   bool gated) {
  check_device(name, packed);
  if (c.quantized)
    check_quantized_expert(kOp, name, packed, 0, n, k, gated);
  else
    check_experts(kOp, name, packed, n, k, c.x.scalar_type(), gated);
}

void check_routed(const Call& c) {
  check_tensor(kOp, "hidden_states", c.x);
  IPEX_CHECK(c.x.dim() == 2, kOp, ": hidden_states must be 2-D, got ", shape_text(c.x));
  IPEX_CHECK(c.hidden() > 0, kOp, ": hidden_states must have at least one feature, got ",
             shape_text(c.x));
  IPEX_CHECK(c.inner > 0, kOp, ": intermediate_size must be positive, got ", c.inner);
  check_weights(c, "w13", c.w13, c.up_rows(c.inner), c.hidden(), c.gated);
  check_weights(c, "w2", c.w2, c.hidden(), c.inner, false);
  IPEX_CHECK(c.w2.size(0) == c.experts(), kOp,
             ": w2 must have as many experts as w13 = ", c.experts(), ", got ", c.w2.size(0));
  check_device("topk_ids", c.topk_ids);
  const ScalarType ids = c.topk_ids.scalar_type();
  IPEX_CHECK(ids == ScalarType::Int || ids == ScalarType::Long, kOp,
             ": topk_ids must have dtype int32, int64, got ", dtype_name(ids));
  IPEX_CHECK(c.topk_ids.dim() == 2 && c.topk_ids.size(0) == c.tokens(), kOp,
             ": topk_ids must be 2-D with ", c.tokens(), " rows, got ", shape_text(c.topk_ids));
  check_device("topk_weights", c.topk_weights);
  check_float_or("topk_weights", c.topk_weights, c.x);
  IPEX_CHECK(c.topk_weights.dim() == 2 && c.topk_weights.size(0) == c.tokens() &&
                 c.topk_weights.size(1) == c.topk_ids.size(1),
             kOp, ": topk_weights must have the shape of topk_ids = ", shape_text(c.topk_ids),
             ", got ", shape_text(c.topk_weights));
  check_bias("w13_bias", c.w13_bias, c.x, c.experts(), c.up_rows(c.inner));
  check_bias("w2_bias", c.w2_bias, c.x, c.experts(), c.hidden());
}

void check_shared(const Call& c) {
  const bool both = c.shared_w13 && c.shared_w2;
  IPEX_CHECK(both || (!c.shared_w13 && !c.shared_w2), kOp,
             ": shared_w2 must be given if and only if shared_w13 is, got ",
             c.shared_w2 ? "a tensor" : "None");
  if (!both) {
    IPEX_CHECK(!c.shared_weights, kOp,
               ": shared_weights must be None without a shared expert, got a tensor");
    return;
  }
  IPEX_CHECK(c.shared_inner > 0, kOp, ": shared_intermediate_size must be positive, got ",
             c.shared_inner);
  check_weights(c, "shared_w13", *c.shared_w13, c.up_rows(c.shared_inner), c.hidden(), c.gated);
  check_weights(c, "shared_w2", *c.shared_w2, c.hidden(), c.shared_inner, false);
  IPEX_CHECK(c.shared_w13->size(0) == 1 && c.shared_w2->size(0) == 1, kOp,
             ": shared_w13 must hold one expert, got ",
             std::max(c.shared_w13->size(0), c.shared_w2->size(0)));
  if (!c.shared_weights) return;
  check_device("shared_weights", *c.shared_weights);
  check_float_or("shared_weights", *c.shared_weights, c.x);
  IPEX_CHECK(c.shared_weights->dim() == 1 && c.shared_weights->size(0) == c.tokens(), kOp,
             ": shared_weights must be 1-D of size ", c.tokens(), ", got ",
             shape_text(*c.shared_weights));
}

ExpertIds check_ids(const Call& c, const Tensor& ids) {
  const int64_t total = c.total ? c.total : c.experts();
  IPEX_CHECK(c.total >= 0, kOp, ": num_experts must be 0 or more, got ", c.total);
  IPEX_CHECK(c.start >= 0 && c.start <= total - c.experts(), kOp,
             ": experts_start_id must be between 0 and num_experts - ", c.experts(), " = ",
             total - c.experts(), ", got ", c.start);
  const ExpertIds view{ids.const_data_ptr(), ids.scalar_type() == ScalarType::Long, c.start,
                       c.experts(), total};
  const int64_t count = ids.numel();
  for (int64_t i = 0; i < count; ++i)
    IPEX_CHECK(view.valid(view.raw(i)), kOp, ": topk_ids must be -1 or in [0, ", total, "), got ",
               view.raw(i));
  return view;
}

// Jobs of all experts that have rows, with the memory they point to.
class Jobs {
 public:
  Jobs(const Call& c, const ExpertIds& ids)
      : pairs_(ids, c.topk_weights.const_data_ptr(), c.topk_weights.scalar_type(),
               c.topk_ids.numel(), c.topk_ids.size(1)) {
    for (size_t j = 0; j < pairs_.experts.size(); ++j) {
      const int64_t e = pairs_.experts[j];
      const auto first = static_cast<size_t>(pairs_.first[j]);
      ExpertJob job = make(c, c.w13, c.w2, e, c.inner, "w13", "w2");
      job.w13_bias = row_of(c.w13_bias, e);
      job.w2_bias = row_of(c.w2_bias, e);
      job.tokens = pairs_.tokens.data() + first;
      job.weights = pairs_.weights.data() + first;
      job.rows = pairs_.first[j + 1] - pairs_.first[j];
      list.push_back(job);
    }
    if (c.shared_w13) {
      ExpertJob job =
          make(c, *c.shared_w13, *c.shared_w2, 0, c.shared_inner, "shared_w13", "shared_w2");
      job.rows = c.tokens();
      if (c.shared_weights) {
        const void* data = c.shared_weights->const_data_ptr();
        for (int64_t t = 0; t < c.tokens(); ++t)
          shared_weights_.push_back(weight_at(data, c.shared_weights->scalar_type(), t));
        job.weights = shared_weights_.data();
      }
      list.push_back(job);
    }
    // Places in the memory for what goes from the first product to the second.
    const int64_t size = c.x.scalar_type() == ScalarType::Float ? 4 : 2;
    int64_t bytes = 0;
    for (const ExpertJob& job : list) bytes += job.rows * job.middle_stride * size;
    char* place = Scratch<Area::kExpertsMiddle>::get(std::max<int64_t>(64, bytes));
    IPEX_CHECK(place, kOp, ": out of memory");
    for (ExpertJob& job : list) {
      job.middle = place;
      place += job.rows * job.middle_stride * size;
    }
  }

  std::vector<ExpertJob> list;

 private:
  static ExpertJob make(const Call& c, const Tensor& w13, const Tensor& w2, int64_t e,
                        int64_t inner, const char* w13_name, const char* w2_name) {
    const char* first = static_cast<const char*>(w13.const_data_ptr()) + e * w13.size(1);
    const char* second = static_cast<const char*>(w2.const_data_ptr()) + e * w2.size(1);
    ExpertJob job{};
    job.inner = inner;
    if (c.quantized) {
      check_quantized_expert(kOp, w13_name, w13, e, c.up_rows(inner), c.hidden(), c.gated);
      check_quantized_expert(kOp, w2_name, w2, e, c.hidden(), inner, false);
      job.w13 = first;
      job.w2 = second;
      job.middle_stride = inner;
      return job;
    }
    const ScalarType dtype = c.x.scalar_type();
    check_expert_header(kOp, w13_name, first, c.up_rows(inner), c.hidden(), dtype, c.gated);
    check_expert_header(kOp, w2_name, second, c.hidden(), inner, dtype, false);
    job.w13 = first + sizeof(PackedHeader);
    job.w2 = second + sizeof(PackedHeader);
    job.middle_stride = ceil_div(inner, kPackedPanel) * kPackedPanel;
    return job;
  }

  static const void* row_of(const OptionalTensor& bias, int64_t e) {
    if (!bias) return nullptr;
    const int64_t size = bias->scalar_type() == ScalarType::Float ? 4 : 2;
    return static_cast<const char*>(bias->const_data_ptr()) + e * bias->size(1) * size;
  }

  SortedPairs pairs_;
  std::vector<float> shared_weights_;
};

template <class T, class Up, class Down>
void run(const ExpertsArgs& args, const std::vector<ExpertJob>& jobs, const Rows& x, Up* up,
         Down* down) {
  const int64_t hidden = args.hidden;
  const int64_t panel_bytes = hidden * kPackedPanel * static_cast<int64_t>(sizeof(T));
  const bool gated = is_gated(args.activation);
  const UpTasks tasks(jobs, (gated ? 2 : 1) * panel_bytes);
  const bool many = has_many_rows(jobs);
  constexpr bool kTiles = std::is_same_v<T, BFloat16>;
  const bool limited = kTiles && many && uses_tiles(ScalarType::BFloat16);
  std::atomic<bool> no_memory{false};
  run_workers(
      tasks.count(), (gated ? 2 : 1) * tasks.work() * hidden, limited, [&](const auto& next) {
        Gather<T> gather(x, jobs);
        for (int64_t t; (t = next()) < tasks.count();) {
          const UpTasks::Task task = tasks.at(t);
          const T* a;
          int64_t lda;
          if (gather.get(task, &a, &lda))
            up(&args, &jobs[task.job], a, lda, task.row, task.rows, task.pair_begin, task.pair_end);
          else
            no_memory = true;
        }
      });
  IPEX_CHECK(!no_memory, kOp, ": out of memory");
  run_down(kOp, down, args, x.rows, tasks.work() * hidden, many, limited);
}

Tensor fused_experts(const Tensor& x, const Tensor& w13, const Tensor& w2,
                     const Tensor& topk_weights, const Tensor& topk_ids, int64_t intermediate_size,
                     std::string activation, const OptionalTensor& w13_bias,
                     const OptionalTensor& w2_bias, const OptionalTensor& shared_w13,
                     const OptionalTensor& shared_w2, const OptionalTensor& shared_weights,
                     int64_t shared_intermediate_size, int64_t experts_start_id,
                     int64_t num_experts, double swiglu_alpha, double swiglu_limit,
                     std::string lowp_mode) {
  const auto contiguous = [](const OptionalTensor& value) {
    return value ? OptionalTensor(as_contiguous(*value)) : std::nullopt;
  };
  const bool quantized = quantized_header(w13) != nullptr;
  ExpertsArgs args{};
  args.activation = parse_activation(activation);
  const bool gated = is_gated(args.activation);
  const Call given{x,
                   w13,
                   w2,
                   topk_weights,
                   topk_ids,
                   intermediate_size,
                   w13_bias,
                   w2_bias,
                   shared_w13,
                   shared_w2,
                   shared_weights,
                   shared_intermediate_size,
                   experts_start_id,
                   num_experts,
                   quantized,
                   gated};
  check_routed(given);
  check_shared(given);
  const Tensor ids = as_contiguous(topk_ids), weights = as_contiguous(topk_weights);
  const WoqCompute compute = parse_lowp(kOp, lowp_mode, x.scalar_type(), quantized);
  const ExpertIds checked = check_ids(given, ids);

  Tensor y = new_contiguous_like(x);
  if (y.numel() == 0) return y;
  const OptionalTensor bias13 = contiguous(w13_bias), bias2 = contiguous(w2_bias);
  const OptionalTensor shared = contiguous(shared_weights);
  const Jobs jobs(
      {x, w13, w2, weights, ids, intermediate_size, bias13, bias2, shared_w13, shared_w2, shared,
       shared_intermediate_size, experts_start_id, num_experts, quantized, gated},
      checked);
  args.jobs = jobs.list.data();
  args.job_count = static_cast<int64_t>(jobs.list.size());
  args.y = y.mutable_data_ptr();
  args.hidden = x.size(1);
  args.alpha = static_cast<float>(swiglu_alpha);
  args.limit = static_cast<float>(swiglu_limit);
  args.w13_bias_is_f32 = bias13 && bias13->scalar_type() == ScalarType::Float;
  args.w2_bias_is_f32 = bias2 && bias2->scalar_type() == ScalarType::Float;
  const Rows rows = as_rows(x);
  if (quantized) {
    run_woq(kOp, args, jobs.list, rows, x.scalar_type(), compute);
    return y;
  }
  up_kernels.visit(x.scalar_type(), [&]<class T>(auto* up) {
    down_kernels.visit(x.scalar_type(), [&]<class U>(auto* down) {
      if constexpr (std::is_same_v<T, U>) run<T>(args, jobs.list, rows, up, down);
    });
  });
  return y;
}

}  // namespace
}  // namespace ipex

STABLE_TORCH_LIBRARY_IMPL(ipex, CPU, m) { IPEX_IMPL(m, "fused_experts", ipex::fused_experts); }
