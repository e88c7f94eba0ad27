// SPDX-License-Identifier: Apache-2.0
// How the products of the experts are cut into tasks. For glue only.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstring>
#include <vector>

#include "fused_experts/fused_experts.h"
#include "ipex/glue/dispatch.h"
#include "ipex/glue/gemm_schedule.h"
#include "linear/packed.h"
#include "runtime/scratch.h"

namespace ipex {

// Rows of one expert that a task of the first product takes at most; their inputs are gathered.
inline constexpr int64_t kRowBlock = 192;
// Bytes of weights that a task reads where reading them is the work.
inline constexpr int64_t kTaskBytes = 768 * 1024;
// Rows of an expert up to which that is so.
inline constexpr int64_t kFewRows = 16;
// Rows of the result that a task of the second product takes at most: its sums stay in the L2
// cache.
inline constexpr int64_t kSumRows = 1024;

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Tasks of the first product: blocks of rows by chunks of panel pairs, expert after expert.
class UpTasks {
 public:
  UpTasks(const std::vector<ExpertJob>& jobs, int64_t pair_bytes, int64_t row_block = kRowBlock)
      : jobs_(jobs), row_block_(row_block) {
    const auto threads = static_cast<int64_t>(torch::stable::get_num_threads());
    int64_t units = 0;
    for (const ExpertJob& job : jobs) units += ceil_div(job.rows, row_block_) * pairs(job);
    const int64_t even = std::max<int64_t>(1, units / (8 * threads));
    for (const ExpertJob& job : jobs) {
      const int64_t most =
          job.rows <= kFewRows ? std::max<int64_t>(1, kTaskBytes / pair_bytes) : 32;
      chunk_.push_back(std::min({even, most, pairs(job)}));
      first_.push_back(count_);
      count_ += ceil_div(job.rows, row_block_) * chunks(first_.size() - 1);
      work_ += job.rows * job.middle_stride;
    }
  }

  int64_t count() const { return count_; }
  int64_t work() const { return work_; }  // rows times features of the middle

  struct Task {
    size_t job;
    int64_t row, rows, pair_begin, pair_end;
  };
  Task at(int64_t task) const {
    const auto after = std::upper_bound(first_.begin(), first_.end(), task);
    const auto j = static_cast<size_t>(after - first_.begin()) - 1;
    const int64_t local = task - first_[j], per_block = chunks(j);
    const int64_t row = local / per_block * row_block_, pair = local % per_block * chunk_[j];
    return {j, row, std::min(row_block_, jobs_[j].rows - row), pair,
            std::min(pairs(jobs_[j]), pair + chunk_[j])};
  }

 private:
  static int64_t pairs(const ExpertJob& job) { return ceil_div(job.inner, kPackedPanel); }
  int64_t chunks(size_t j) const { return ceil_div(pairs(jobs_[j]), chunk_[j]); }

  const std::vector<ExpertJob>& jobs_;
  int64_t row_block_;
  std::vector<int64_t> chunk_, first_;
  int64_t count_ = 0, work_ = 0;
};

// The inputs of a task's rows, gathered if they do not lie side by side. A thread mostly gets tasks
// with the rows of its last one and finds them gathered; it starts with none.
template <class T>
class Gather {
 public:
  Gather(const Rows& x, const std::vector<ExpertJob>& jobs) : x_(x), jobs_(jobs) {}

  // False if there is no memory.
  bool get(const UpTasks::Task& task, const T** a, int64_t* lda) {
    const T* x = static_cast<const T*>(x_.data);
    const int32_t* tokens = jobs_[task.job].tokens;
    const int64_t first = tokens ? tokens[task.row] : task.row;
    const int64_t last = tokens ? tokens[task.row + task.rows - 1] : first + task.rows - 1;
    // Tokens rise, and only duplicates of a token make them stand still.
    bool side_by_side = last - first == task.rows - 1;
    for (int64_t i = 1; tokens && side_by_side && i < task.rows; ++i)
      side_by_side = tokens[task.row + i] == first + i;
    if (side_by_side) {
      *a = x + first * x_.stride;
      *lda = x_.stride;
      return true;
    }
    if (task.job != job_ || task.row != row_ || !memory_) {
      const int64_t size = x_.columns * static_cast<int64_t>(sizeof(T));
      memory_ = reinterpret_cast<T*>(Scratch<Area::kExpertsTask>::get(kRowBlock * size));
      if (!memory_) return false;
      for (int64_t i = 0; i < task.rows; ++i)
        std::memcpy(memory_ + i * x_.columns, x + tokens[task.row + i] * x_.stride,
                    static_cast<size_t>(size));
      job_ = task.job;
      row_ = task.row;
    }
    *a = memory_;
    *lda = x_.columns;
    return true;
  }

 private:
  const Rows& x_;
  const std::vector<ExpertJob>& jobs_;
  T* memory_ = nullptr;
  size_t job_ = 0;
  int64_t row_ = 0;
};

// Whether an expert has so many rows that arithmetic is what takes time.
inline bool has_many_rows(const std::vector<ExpertJob>& jobs) {
  return std::any_of(jobs.begin(), jobs.end(),
                     [](const ExpertJob& job) { return job.rows >= kComputeBound; });
}

// The second products of all jobs, added up to `rows` rows of the result.
template <class Down>
void run_down(const char* op, Down* down, const ExpertsArgs& args, int64_t rows, int64_t work,
              bool many, bool limited) {
  const auto threads = static_cast<int64_t>(torch::stable::get_num_threads());
  const int64_t panels = ceil_div(args.hidden, kPackedPanel);
  const int64_t block = std::min(rows, kSumRows), blocks = ceil_div(rows, block);
  // Two panels at a time are faster where there are many rows; single ones spread better.
  const int64_t step = !many && blocks * panels < 8 * threads ? 1 : 2;
  const int64_t chunks = ceil_div(panels, step);
  const int64_t bytes = block * 2 * kPackedPanel * static_cast<int64_t>(sizeof(float));
  std::atomic<bool> no_memory{false};
  run_workers(blocks * chunks, work, limited, [&](const auto& next) {
    auto* sums = reinterpret_cast<float*>(Scratch<Area::kExpertsTask>::get(bytes));
    if (!sums) no_memory = true;
    for (int64_t t; (t = next()) < blocks * chunks && sums;) {
      const int64_t row = t / chunks * block, panel = t % chunks * step;
      down(&args, row, std::min(rows, row + block), panel, std::min(panels, panel + step), sums);
    }
  });
  IPEX_CHECK(!no_memory, op, ": out of memory");
}

}  // namespace ipex
