// SPDX-License-Identifier: Apache-2.0
// Memory that the processes of one host share to exchange tensors. Layout and protocol are as in
// ipex_core/ops/collective.py, so that ranks with and without native kernels understand
// each other.
#pragma once

#include <sched.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <vector>

#include "ipex/glue/dispatch.h"

namespace ipex {

// What the ranks of a call must agree about; as note_of in ipex_core/ops/collective.py.
inline int64_t note_of(int64_t size, ScalarType dtype, int64_t kind) {
  const int64_t code = dtype == ScalarType::Float ? 1 : dtype == ScalarType::BFloat16 ? 2 : 3;
  return size * 64 + code * 8 + kind;
}

inline std::string note_text(int64_t note) {
  const char* const dtypes[] = {"unknown", "float32", "bfloat16", "float16"};
  const auto code = static_cast<uint64_t>(note) / 8 % 8;
  return std::to_string(note / 64) + " elements of " + dtypes[code < 4 ? code : 0] +
         (note % 8 == 0 ? " to all_reduce_" : " to all_gather_columns");
}

class SharedBuffer {
 public:
  static constexpr int64_t kMostRanks = 64;

  SharedBuffer(const char* op, const Tensor& memory, int64_t rank, double timeout)
      : op_(op), base_(static_cast<char*>(memory.mutable_data_ptr())), timeout_(timeout) {
    const int64_t bytes = memory.numel();
    const auto* head = reinterpret_cast<const int64_t*>(base_);
    bool known = bytes >= kLine && reinterpret_cast<uintptr_t>(base_) % 8 == 0 && head[0] == kMagic;
    if (known) {
      ranks_ = head[1];
      slot_bytes_ = head[2];
      known = ranks_ > 0 && ranks_ <= kMostRanks && slot_bytes_ >= kLine && slot_bytes_ <= bytes &&
              ranks_ <= bytes / slot_bytes_ &&
              bytes == kLine * (1 + ranks_) + 2 * ranks_ * slot_bytes_;
    }
    IPEX_CHECK(known, op, ": memory must be the shared memory of a group, got ", bytes, " bytes");
    IPEX_CHECK(rank >= 0 && rank < ranks_, op, ": rank must be in [0, ", ranks_, "), got ", rank);
    rank_ = rank;
  }

  int64_t ranks() const { return ranks_; }
  int64_t slot_bytes() const { return slot_bytes_; }

  // Gives `bytes` at `mine` (at most a slot) to all ranks. Then slot(r) is what rank r gave, until
  // the next call.
  void exchange(const char* mine, int64_t bytes, int64_t note) {
    int64_t* own = line(rank_);
    const int64_t count = own[0] + 1;
    parity_ = count % 2;
    char* to = slot(rank_);
    parallel_for(bytes, kCopyGrain, [&](int64_t begin, int64_t end) {
      std::memcpy(to + begin, mine + begin, end - begin);
    });
    own[1 + parity_] = note;
    std::atomic_ref<int64_t>(own[0]).store(count, std::memory_order_release);
    for (int64_t r = 0; r < ranks_; ++r) wait(r, count);
    for (int64_t r = 0; r < ranks_; ++r)
      IPEX_CHECK(line(r)[1 + parity_] == note, op_,
                 ": x must have the same size and dtype on all ranks, got ",
                 note_text(line(r)[1 + parity_]), " on rank ", r, " and ", note_text(note),
                 " on rank ", rank_);
  }

  char* slot(int64_t rank) const {
    return base_ + kLine * (1 + ranks_) + (parity_ * ranks_ + rank) * slot_bytes_;
  }

 private:
  static constexpr int64_t kMagic = 0x4950455853484D31;
  static constexpr int64_t kLine = 64;
  static constexpr int64_t kCopyGrain = 64 * 1024;
  // Ranks of one model arrive within some ten microseconds of each other: it is not worth a system
  // call. Then the processor goes to ranks that are late, where there are more threads than
  // processors.
  static constexpr int kSpins = 2000;
  static constexpr int kYields = 200;
  static constexpr long kSleep = 50'000;  // nanoseconds

  int64_t* line(int64_t rank) const {
    return reinterpret_cast<int64_t*>(base_ + kLine * (1 + rank));
  }

  static double now() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
  }

  void wait(int64_t rank, int64_t count) {
    const std::atomic_ref<int64_t> entered(line(rank)[0]);
    const auto there = [&] { return entered.load(std::memory_order_acquire) >= count; };
    for (int i = 0; i < kSpins; ++i) {
      if (there()) return;
      __builtin_ia32_pause();
    }
    for (int i = 0; i < kYields; ++i) {
      if (there()) return;
      sched_yield();
    }
    const std::atomic_ref<int64_t> failed(reinterpret_cast<int64_t*>(base_)[3]);
    const double end = now() + timeout_;
    while (!there()) {
      const int64_t known = failed.load(std::memory_order_relaxed);
      IPEX_CHECK(known == 0, op_, ": rank ", known - 1, " of ", ranks_,
                 " is missing: another rank waited for it until its timeout;"
                 " all ranks must make the same calls");
      if (now() > end) {
        failed.store(1 + rank, std::memory_order_relaxed);
        fail(
            op_, ": rank ", rank, " of ", ranks_, " did not arrive within ", timeout_,
            " s: it has ended, hangs or called something else; all ranks must make the same calls");
      }
      const timespec pause{0, kSleep};
      nanosleep(&pause, nullptr);
    }
  }

  const char* op_;
  char* base_;
  double timeout_;
  int64_t ranks_ = 0, slot_bytes_ = 0, rank_ = 0, parity_ = 0;
};

}  // namespace ipex
