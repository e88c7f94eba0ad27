// SPDX-License-Identifier: Apache-2.0
// Which CPUs are hyper-threads of one core. Two of them share one AMX unit, and two threads on it
// are slower than one.
#pragma once

#include <atomic>
#include <cstdint>

namespace ipex::cpu {

// True if some core of the machine shows more than one CPU. False where the operating system or a
// hypervisor hides it.
bool has_shared_cores();

// The core the calling thread runs on, 0 .. kMaxCores - 1, or -1 if that is not known.
inline constexpr int kMaxCores = 1024;
int current_core() noexcept;

// Lets one thread per core take part in a parallel loop. The first thread on a core gets it and the
// others should leave the work to the rest. If threads are not bound and the system puts two on one
// core, nothing is lost: they would have shared its unit.
class CorePerThread {
 public:
  // `limited` false: every thread may take part.
  explicit CorePerThread(bool limited) : limited_(limited && has_shared_cores()) {}

  bool claim() noexcept {
    if (!limited_) return true;
    const int core = current_core();
    if (core < 0) return true;
    const uint64_t bit = uint64_t{1} << (core % 64);
    return !(taken_[core / 64].fetch_or(bit, std::memory_order_relaxed) & bit);
  }

 private:
  bool limited_;
  std::atomic<uint64_t> taken_[kMaxCores / 64] = {};
};

}  // namespace ipex::cpu
