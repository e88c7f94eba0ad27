// SPDX-License-Identifier: Apache-2.0
// Experts of quantized weights: the products of woq_linear, for each expert and its rows. For glue
// only.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstring>
#include <string>
#include <vector>

#include "fused_experts/experts_plan.h"
#include "fused_experts/experts_tasks.h"
#include "ipex/glue/gemm_schedule.h"
#include "woq_linear/woq_linear.h"

namespace ipex {
namespace {

constexpr const char* kWoqOp = "fused_experts";  // and of expert_linear
const Kernel<decltype(ipex_k_woq_operand)> woq_operand_kernel(kWoqOp, "ipex_k_woq_operand");
const Kernel<decltype(ipex_k_experts_add)> add_kernel(kWoqOp, "ipex_k_experts_add");
const auto woq_prepare_kernels = IPEX_KERNELS(kWoqOp, woq_prepare);
const auto woq_few_kernels = IPEX_KERNELS(kWoqOp, woq_few);
const auto woq_many_kernels = IPEX_KERNELS(kWoqOp, woq_many);
const auto store_kernels = IPEX_KERNELS(kWoqOp, experts_store);
const auto square_kernels = IPEX_KERNELS(kWoqOp, experts_square);

// Rows that share decoded panels.
constexpr int64_t kWoqRows = 768;

WoqCompute parse_lowp(const char* op, const std::string& mode, ScalarType dtype, bool quantized) {
  const bool known = mode == "none" || mode == "fp16" || mode == "bf16";
  IPEX_CHECK(known, op, ": lowp_mode must be one of none, fp16, bf16, got ", mode);
  IPEX_CHECK(quantized || mode == "none", op,
             ": lowp_mode must be none for weights that are not quantized, got ", mode);
  if (mode == "fp16" || (mode == "none" && dtype == ScalarType::Half)) return WoqCompute::kHalf;
  if (mode == "bf16" || (mode == "none" && dtype == ScalarType::BFloat16))
    return WoqCompute::kBFloat16;
  return WoqCompute::kFloat;
}

// One of the two products of an expert.
struct WoqProduct {
  WoqLinearArgs args;
  int64_t rows;
  bool few;      // decoded as they are read
  char* memory;  // for the prepared activations

  int64_t few_bytes() const {
    WoqLinearArgs a = args;
    return woq_few_layout(a, rows, false) + woq_round_up(rows * args.at.groups * 4, 64) +
           2 * woq_round_up(rows * args.chunks * 4, 64);
  }
  int64_t many_stride() const { return woq_round_up(args.k, 32); }
  int64_t many_bytes() const {
    return rows * many_stride() * (args.compute == WoqCompute::kFloat ? 4 : 2);
  }
  int64_t bytes() const { return woq_round_up(std::max(few_bytes(), many_bytes()), 64); }

  void init(const void* packed, int64_t row_count, int64_t columns, WoqCompute compute) {
    args = WoqLinearArgs{};
    args.packed = static_cast<const char*>(packed);
    std::memcpy(&args.header, packed, sizeof(PackedHeader));
    args.at = woq_layout(args.header);
    args.n = columns;
    args.k = args.header.k;
    args.compute = compute;
    args.kind = static_cast<WoqOperand>(
        woq_operand_kernel.get()(&args.header, static_cast<int32_t>(compute)));
    args.chunk = std::min<int64_t>(args.header.group, kWoqChunk);
    args.chunks = args.at.groups > 1 ? args.at.groups : ceil_div(args.k, args.chunk);
    rows = row_count;
    const bool tiles = uses_tiles(ScalarType::BFloat16);
    woq_choose_operand(args, rows, tiles);
    const int64_t limit = args.kind == WoqOperand::kFloat            ? 16
                          : args.kind != WoqOperand::kInt16 && tiles ? 4
                                                                     : kWoqFewRows;
    few = rows <= limit && !(args.header.flags & kFlagSpecial);
  }

  // Converts the rows of x. Numbers that are not finite need exact products.
  template <class Prepare>
  void prepare(Prepare* kernel, bool same_type) {
    if (few) {
      char* place = memory;
      args.operand = place;
      place += woq_few_layout(args, rows, false);
      args.sums = reinterpret_cast<float*>(place);
      place += woq_round_up(rows * args.at.groups * 4, 64);
      args.chunk_scales = reinterpret_cast<float*>(place);
      place += woq_round_up(rows * args.chunks * 4, 64);
      args.chunk_sums = reinterpret_cast<float*>(place);
      few = kernel(&args, false, 0, rows) == 0;
      if (few) return;
    }
    if (same_type && !args.at.permutation) {
      args.operand = const_cast<void*>(args.x);
      args.operand_stride = args.x_stride;
      return;
    }
    args.operand = memory;
    args.operand_stride = many_stride();
    kernel(&args, true, 0, rows);
  }

  // The same product for the rows from `row` on and the columns from panel `panel` on alone, as
  // [rows][columns] in `to`.
  WoqLinearArgs part(int64_t row, int64_t panel, int64_t columns, float* to) const {
    WoqLinearArgs a = args;
    const bool planes = few && args.kind == WoqOperand::kPlanes;
    const bool wide = few ? args.kind == WoqOperand::kFloat : args.compute == WoqCompute::kFloat;
    const int64_t element = planes ? 1 : wide ? 4 : 2;
    a.operand = static_cast<char*>(args.operand) + row * args.operand_stride * element;
    a.sums += few ? row * args.at.groups : 0;
    if (planes || (few && args.kind == WoqOperand::kInt16)) {
      a.chunk_scales += row * args.chunks;
      a.chunk_sums += row * args.chunks;
    }
    a.at.first_strip += 2 * panel * args.at.strip_bytes;
    a.n = columns;
    a.y = to;
    if (a.epilogue.bias) a.epilogue.bias = static_cast<const float*>(a.epilogue.bias) + panel * 32;
    return a;
  }
};

// Rows of a bias as float: for the first product in the order of its panels.
inline std::vector<float> bias_as_float(const void* bias, ScalarType dtype, int64_t size,
                                        bool gated) {
  if (!gated) {
    std::vector<float> out(static_cast<size_t>(size));
    for (int64_t i = 0; i < size; ++i) out[static_cast<size_t>(i)] = weight_at(bias, dtype, i);
    return out;
  }
  const int64_t half = size / 2;
  std::vector<float> out(static_cast<size_t>(ceil_div(half, 32) * 64), 0.0f);
  for (int64_t i = 0; i < size; ++i) {
    const int64_t feature = i % half, at = feature / 32 * 64 + i / half * 32 + feature % 32;
    out[static_cast<size_t>(at)] = weight_at(bias, dtype, i);
  }
  return out;
}

class WoqExperts {
 public:
  WoqExperts(const char* op, const ExpertsArgs& args, const std::vector<ExpertJob>& jobs,
             const Rows& x, ScalarType dtype, WoqCompute compute)
      : op_(op),
        args_(args),
        jobs_(jobs),
        x_(x),
        dtype_(dtype),
        ups_(jobs.size()),
        downs_(jobs.size()) {
    // The last one is squared where it lies.
    constexpr Activation kNames[] = {Activation::kSilu, Activation::kGelu, Activation::kGeluTanh,
                                     Activation::kSwigluOai, Activation::kRelu};
    const bool gated = is_gated(args.activation);
    const int64_t element = dtype == ScalarType::Float ? 4 : 2;
    int64_t bytes = 0;
    for (size_t j = 0; j < jobs.size(); ++j) {
      const ExpertJob& job = jobs[j];
      downs_[j].init(job.w2, job.rows, args.hidden, compute);
      bytes += downs_[j].bytes();
      most_rows_ = std::max(most_rows_, job.rows);
      Epilogue& down = downs_[j].args.epilogue;
      down.bias = as_float(job.w2_bias, args.w2_bias_is_f32, args.hidden, false);
      down.bias_is_f32 = true;
      work_ += job.rows * job.inner;
      if (!job.w13) continue;
      ups_[j].init(job.w13, job.rows, job.inner, compute);
      bytes += ups_[j].bytes() + gathered_bytes(job, element);
      Epilogue& up = ups_[j].args.epilogue;
      up.gated = gated;
      up.activation = kNames[static_cast<int>(args.activation)];
      up.swiglu_alpha = args.alpha;
      up.swiglu_limit = args.limit;
      const int64_t up_rows = gated ? 2 * job.inner : job.inner;
      up.bias = as_float(job.w13_bias, args.w13_bias_is_f32, up_rows, gated);
      up.bias_is_f32 = true;
    }
    char* memory = Scratch<Area::kExpertsWoq>::get(std::max<int64_t>(64, bytes));
    IPEX_CHECK(memory, op_, ": out of memory");
    for (size_t j = 0; j < jobs.size(); ++j) {
      const ExpertJob& job = jobs[j];
      downs_[j].memory = memory;
      memory += downs_[j].bytes();
      WoqLinearArgs &up = ups_[j].args, &down = downs_[j].args;
      down.x = job.middle;
      down.x_stride = job.middle_stride;
      if (!job.w13) continue;
      ups_[j].memory = memory;
      memory += ups_[j].bytes();
      up.x = memory;
      up.x_stride = x.columns;
      memory += gathered_bytes(job, element);
      if (job.rows == 1 || !job.tokens) {
        const int64_t first = job.tokens ? job.tokens[0] : 0;
        up.x = static_cast<const char*>(x.data) + first * x.stride * element;
        up.x_stride = x.stride;
      }
      up.y = job.middle;
    }
    const ScalarType products = compute == WoqCompute::kFloat  ? ScalarType::Float
                                : compute == WoqCompute::kHalf ? ScalarType::Half
                                                               : ScalarType::BFloat16;
    same_type_ = products == dtype;
    limited_ = most_rows_ >= kComputeBound && uses_tiles(products);
  }

  // Both products, or the second one alone of jobs without w13: their rows are what it reads.
  void run() {
    woq_prepare_kernels.visit(dtype_, [&]<class>(auto* prepare) {
      const auto grain =
          std::max<int64_t>(1, 65536 / (args_.hidden * std::max<int64_t>(1, most_rows_)));
      if (!jobs_.empty() && jobs_[0].w13) {
        each_job(grain, [&](size_t j) {
          gather(j);
          ups_[j].prepare(prepare, same_type_);
        });
        first_product();
      }
      each_job(grain, [&](size_t j) { downs_[j].prepare(prepare, same_type_); });
    });
    second_product();
    IPEX_CHECK(!no_memory_, op_, ": out of memory");
  }

 private:
  int64_t gathered_bytes(const ExpertJob& job, int64_t element) const {
    return job.rows == 1 || !job.tokens ? 0 : woq_round_up(job.rows * x_.columns * element, 64);
  }

  const float* as_float(const void* bias, bool is_f32, int64_t size, bool gated) {
    if (!bias) return nullptr;
    biases_.push_back(bias_as_float(bias, is_f32 ? ScalarType::Float : dtype_, size, gated));
    return biases_.back().data();
  }

  template <class F>
  void each_job(int64_t grain, const F& f) {
    parallel_for(static_cast<int64_t>(jobs_.size()), grain, [&](int64_t begin, int64_t end) {
      for (int64_t j = begin; j < end; ++j) f(static_cast<size_t>(j));
    });
  }

  void gather(size_t j) {
    const ExpertJob& job = jobs_[j];
    if (job.rows == 1 || !job.tokens) return;
    const int64_t element = dtype_ == ScalarType::Float ? 4 : 2, size = x_.columns * element;
    char* to = static_cast<char*>(const_cast<void*>(ups_[j].args.x));
    for (int64_t r = 0; r < job.rows; ++r)
      std::memcpy(to + r * size,
                  static_cast<const char*>(x_.data) + job.tokens[r] * x_.stride * element,
                  static_cast<size_t>(size));
  }

  void first_product() {
    decltype(ipex_k_woq_few_f32)* few = nullptr;
    decltype(ipex_k_woq_many_f32)* many = nullptr;
    woq_few_kernels.visit(dtype_, [&]<class>(auto* kernel) { few = kernel; });
    woq_many_kernels.visit(dtype_, [&]<class>(auto* kernel) { many = kernel; });
    decltype(ipex_k_experts_square_f32)* square = nullptr;
    square_kernels.visit(dtype_, [&]<class>(auto* kernel) { square = kernel; });
    const bool gated = is_gated(args_.activation);
    const int64_t panels = gated ? 2 : 1;  // of one panel of features
    const int64_t pair_bytes = jobs_.empty() ? 1 : 2 * panels * ups_[0].args.at.strip_bytes;
    const UpTasks tasks(jobs_, pair_bytes, kWoqRows);
    const int64_t element = dtype_ == ScalarType::Float ? 4 : 2;
    const auto finish = [&](const UpTasks::Task& task, int64_t row, int64_t rows) {
      if (gated) return;
      const ExpertJob& job = jobs_[task.job];
      const int64_t column = task.pair_begin * kPackedPanel;
      const int64_t last = std::min(job.inner, task.pair_end * kPackedPanel);
      square(static_cast<char*>(job.middle) + (row * job.middle_stride + column) * element, rows,
             last - column, job.middle_stride);
    };
    const int64_t flops = panels * tasks.work() * args_.hidden;
    run_workers(tasks.count(), flops, limited_, [&](const auto& next) {
      char* scratch = nullptr;
      for (int64_t t; (t = next()) < tasks.count();) {
        const UpTasks::Task task = tasks.at(t);
        const WoqProduct& up = ups_[task.job];
        if (up.few) {
          few(&up.args, 0, up.rows, panels * task.pair_begin, panels * task.pair_end);
          finish(task, 0, up.rows);
          continue;
        }
        if (!scratch)
          scratch =
              Scratch<Area::kExpertsTask>::get(woq_panel_scratch(std::min(kWoqRows, most_rows_)));
        if (scratch)
          many(&up.args, scratch, task.row, task.row + task.rows, panels * task.pair_begin,
               panels * task.pair_end);
        else
          no_memory_ = true;
        if (scratch) finish(task, task.row, task.rows);
      }
    });
  }

  void second_product() {
    const int64_t hidden = args_.hidden, tokens = x_.rows;
    const int64_t block = std::min(tokens, kSumRows), blocks = ceil_div(tokens, block);
    const int64_t pairs = ceil_div(hidden, 2 * kPackedPanel);
    // An expert can have a token several times.
    const int64_t rows = std::min(most_rows_, kWoqRows);
    const int64_t sums_bytes = block * 256, c_bytes = rows * 256;
    const int64_t bytes = sums_bytes + c_bytes + woq_panel_scratch(rows);
    auto* few = few_f32();
    auto* many = many_f32();
    auto* add = add_kernel.get();
    store_kernels.visit(dtype_, [&]<class T>(auto* store) {
      run_workers(blocks * pairs, work_ * hidden, limited_, [&](const auto& next) {
        char* memory = Scratch<Area::kExpertsTask>::get(bytes);
        if (!memory) no_memory_ = true;
        for (int64_t t; (t = next()) < blocks * pairs && memory;) {
          const int64_t token = t / pairs * block, end = std::min(tokens, token + block);
          const int64_t column = t % pairs * 2 * kPackedPanel;
          const int64_t columns = std::min(2 * kPackedPanel, hidden - column);
          auto* sums = reinterpret_cast<float*>(memory);
          auto* c = reinterpret_cast<float*>(memory + sums_bytes);
          char* scratch = memory + sums_bytes + c_bytes;
          std::memset(sums, 0, static_cast<size_t>(sums_bytes));
          for (size_t j = 0; j < jobs_.size(); ++j) {
            const ExpertJob& job = jobs_[j];
            int64_t row = first_row(job, token);
            const int64_t last = first_row(job, end);
            for (; row < last; row += rows) {
              const int64_t n = std::min(rows, last - row);
              const WoqLinearArgs a = downs_[j].part(row, column / kPackedPanel, columns, c);
              const int64_t panels = ceil_div(columns, kPackedPanel);
              if (downs_[j].few)
                few(&a, 0, n, 0, panels);
              else
                many(&a, scratch, 0, n, 0, panels);
              add(c, n, columns, job.tokens ? job.tokens + row : nullptr, token,
                  job.weights ? job.weights + row : nullptr,
                  job.tokens ? sums : sums + (row - token) * 64);
            }
          }
          store(sums, end - token, columns, static_cast<T*>(args_.y) + token * hidden + column,
                hidden);
        }
      });
    });
  }

  static int64_t first_row(const ExpertJob& job, int64_t token) {
    if (!job.tokens) return std::min(token, job.rows);
    return std::lower_bound(job.tokens, job.tokens + job.rows, token) - job.tokens;
  }

  // The second product leaves its results in float, whatever its inputs are.
  static decltype(ipex_k_woq_few_f32)* few_f32() {
    decltype(ipex_k_woq_few_f32)* found = nullptr;
    woq_few_kernels.visit(ScalarType::Float, [&]<class>(auto* kernel) { found = kernel; });
    return found;
  }
  static decltype(ipex_k_woq_many_f32)* many_f32() {
    decltype(ipex_k_woq_many_f32)* found = nullptr;
    woq_many_kernels.visit(ScalarType::Float, [&]<class>(auto* kernel) { found = kernel; });
    return found;
  }

  const char* op_;
  const ExpertsArgs& args_;
  const std::vector<ExpertJob>& jobs_;
  const Rows& x_;
  ScalarType dtype_;
  std::vector<WoqProduct> ups_, downs_;
  std::vector<std::vector<float>> biases_;
  int64_t most_rows_ = 0, work_ = 0;
  bool same_type_ = false, limited_ = false;
  std::atomic<bool> no_memory_{false};
};

void run_woq(const char* op, const ExpertsArgs& args, const std::vector<ExpertJob>& jobs,
             const Rows& x, ScalarType dtype, WoqCompute compute) {
  WoqExperts(op, args, jobs, x, dtype, compute).run();
}

}  // namespace
}  // namespace ipex
