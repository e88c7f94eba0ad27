// SPDX-License-Identifier: Apache-2.0
// The threads that run the parallel loops of one program run, without a barrier after each loop.
//
// A parallel region of OpenMP ends when all of its threads have come to the end. Where another
// process has the core of one of them, the others wait for a time slice, and a program has hundreds
// of loops. Here one region lasts for the whole run. A loop lies in chunks, and each thread that
// has a core claims the next ones: its own share first, so that it reads the memory that it read in
// the last run, then what is left of the other shares. A loop ends when its chunks are done; a
// thread that has claimed nothing is not waited for.
//
// The region itself still ends as OpenMP says. Where that takes long, threads of our own help for a
// while, whose end the caller does not wait for: Helpers.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <vector>

#include <sys/types.h>

namespace ipex {

class Team {
 public:
  using Body = void (*)(int64_t begin, int64_t end, const void* context);

  static constexpr int64_t kMaxThreads = 4096;

  // A team of 2 to kMaxThreads threads: one leads, the others help.
  explicit Team(int64_t threads);
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  // Calls f() in the calling thread, whose loops are for the team meanwhile. It waits for no
  // helper: what none has claimed is done by the others.
  template <class F>
  void lead(const F& f) noexcept(noexcept(f())) {
    const Leading leading(*this);
    f();
  }

  // Takes part until end(). `index` from 1 on, one for each helper. `twin` is a thread whose
  // affinity the calling one takes whenever a new lead() begins, 0 for none.
  void help(int64_t index, pid_t twin = 0) noexcept;

  // Sends the helpers away, and those that come later.
  void end() noexcept;

  // Calls body for ranges that cover [0, n) once, about `grain` or more at a time. For the leading
  // thread. Rethrows the first exception.
  void run(int64_t n, int64_t grain, Body body, const void* context);

  // The team that the calling thread leads, or nullptr.
  static Team* current() noexcept;
  // True inside a chunk, where a loop must run on the calling thread alone.
  static bool in_chunk() noexcept;

 private:
  struct Leading {
    explicit Leading(Team& team);
    ~Leading();
    Team& team;
  };

  // The first and the last chunk of one thread that are not claimed, and the number of their loop:
  // a claim must have seen all three.
  struct alignas(64) Share {
    std::atomic<uint64_t> word{0};
  };

  void drain(int64_t index) noexcept;
  bool claim(int64_t index, bool half, int64_t& begin, int64_t& end) noexcept;
  void work(int64_t begin, int64_t end) noexcept;
  void wait_for_chunks(uint32_t chunks) noexcept;

  const int64_t threads_;
  const std::unique_ptr<Share[]> shares_;

  // The loop, written before its shares.
  Body body_ = nullptr;
  const void* context_ = nullptr;
  int64_t n_ = 0, chunks_ = 0;
  std::exception_ptr error_;
  std::atomic<bool> failed_{false};

  alignas(64) std::atomic<uint32_t> loop_{0};  // number of the loop; helpers sleep on it
  std::atomic<uint32_t> asleep_{0};
  std::atomic<uint32_t> leads_{0};
  std::atomic<bool> over_{false};
  alignas(64) std::atomic<uint32_t> done_{0};  // chunks; the leading thread sleeps on it
  std::atomic<bool> waiting_{false};
};

// Threads of our own in place of torch's, for loops of the calling thread.
//
// Torch's come first, since the rest of the process runs on them: they spin for milliseconds after
// each region and would share their cores with ours. Only where a region of theirs kept its caller
// waiting, since other processes have the cores, ours take their places for a while.
class Helpers {
 public:
  // More than it takes to wake a thread of a quiet machine, less than a time slice.
  static constexpr int64_t kLate = 1000000;

  Helpers() = default;
  ~Helpers();
  Helpers(const Helpers&) = delete;
  Helpers& operator=(const Helpers&) = delete;

  // The helpers of the calling thread.
  static Helpers& mine() noexcept;

  // Whether a region of torch's threads was late a short while ago.
  bool wanted() const noexcept;
  // A region of torch's threads kept the calling thread waiting for kLate or longer.
  void late() noexcept;

  // The team of `threads` threads that start() made, or nullptr.
  Team* team(int64_t threads) const noexcept;
  // Starts a thread for each but the first of `twins`, the threads of torch's that they stand for,
  // whose affinity they follow. False if the system refuses or a thread is there twice.
  bool start(const std::vector<pid_t>& twins);

 private:
  void stop() noexcept;

  std::shared_ptr<Team> team_;
  int64_t threads_ = 0;
  uint32_t forks_ = 0;
  int64_t until_ = 0, length_ = 0;  // nanoseconds
};

// The clock that nothing sets, in nanoseconds.
int64_t nanoseconds() noexcept;

}  // namespace ipex
