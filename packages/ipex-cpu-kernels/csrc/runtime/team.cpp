// SPDX-License-Identifier: Apache-2.0
#include "runtime/team.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <cstring>
#include <system_error>
#include <thread>
#include <utility>

namespace ipex {
namespace {

// Chunks for each thread: enough that the others can take over most of what a thread without a core
// has left, few enough that claiming costs nothing.
constexpr int64_t kChunksPerThread = 8;
static_assert(kChunksPerThread * Team::kMaxThreads <= 0xffff, "a share counts chunks in 16 bits");

// How long a thread without work looks for some before it sleeps. Waking costs about as much.
constexpr int64_t kSpinNanoseconds = 50000;

// How long helpers of our own take the places of torch's threads before these are tried again: at
// first, and at most where each trial was late.
constexpr int64_t kFirstLength = 250000000, kLastLength = 16 * kFirstLength;

thread_local Team* leading_team = nullptr;
thread_local bool inside_chunk = false;

void futex_wait(std::atomic<uint32_t>& word, uint32_t seen) noexcept {
  syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
}

void futex_wake(std::atomic<uint32_t>& word, int count) noexcept {
  syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, count, nullptr, nullptr, 0);
}

// Gives the calling thread the affinity of another one, unless that one has ended. `last` is what
// it has been given so.
void follow(pid_t thread, cpu_set_t& last) noexcept {
  cpu_set_t cpus;
  if (sched_getaffinity(thread, sizeof cpus, &cpus) != 0 || CPU_EQUAL(&cpus, &last)) return;
  if (sched_setaffinity(0, sizeof cpus, &cpus) == 0) last = cpus;
}

// Forks of this process and of its parents since the first helper was started.
std::atomic<uint32_t> forks{0};

// Looks until ready() or the time is over; returns ready().
template <class F>
bool spin(const F& ready) noexcept {
  for (int i = 0; i < 64; ++i) {
    if (ready()) return true;
    __builtin_ia32_pause();
  }
  for (const int64_t end = nanoseconds() + kSpinNanoseconds; nanoseconds() < end;)
    for (int i = 0; i < 16; ++i) {
      if (ready()) return true;
      __builtin_ia32_pause();
    }
  return ready();
}

// A share: number of the loop, end and next chunk.
constexpr uint64_t share_word(uint32_t loop, int64_t next, int64_t end) {
  return uint64_t{loop} << 32 | static_cast<uint64_t>(end) << 16 | static_cast<uint64_t>(next);
}

}  // namespace

int64_t nanoseconds() noexcept {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return int64_t{1000000000} * now.tv_sec + now.tv_nsec;
}

Team* Team::current() noexcept { return leading_team; }
bool Team::in_chunk() noexcept { return inside_chunk; }

Team::Team(int64_t threads) : threads_(threads), shares_(new Share[static_cast<size_t>(threads)]) {}

Team::Leading::Leading(Team& t) : team(t) {
  leading_team = &team;
  team.leads_.fetch_add(1, std::memory_order_relaxed);
}

Team::Leading::~Leading() { leading_team = nullptr; }

void Team::end() noexcept {
  over_.store(true, std::memory_order_release);
  loop_.fetch_add(1, std::memory_order_seq_cst);
  if (asleep_.load(std::memory_order_seq_cst) > 0) futex_wake(loop_, INT_MAX);
}

void Team::help(int64_t index, pid_t twin) noexcept {
  uint32_t seen = 0, lead = 0;
  cpu_set_t cpus;
  CPU_ZERO(&cpus);
  while (!over_.load(std::memory_order_acquire)) {
    if (spin([&] { return loop_.load(std::memory_order_acquire) != seen; })) {
      seen = loop_.load(std::memory_order_acquire);
      const uint32_t now = leads_.load(std::memory_order_relaxed);
      if (twin != 0 && std::exchange(lead, now) != now) follow(twin, cpus);
      drain(index);
      continue;
    }
    asleep_.fetch_add(1, std::memory_order_seq_cst);
    if (loop_.load(std::memory_order_seq_cst) == seen) futex_wait(loop_, seen);
    asleep_.fetch_sub(1, std::memory_order_relaxed);
  }
}

void Team::drain(int64_t index) noexcept {
  int64_t begin, end;
  while (claim(index, true, begin, end)) work(begin, end);
  for (int64_t i = 1; i < threads_; ++i) {
    const int64_t other = (index + i) % threads_;
    while (claim(other, false, begin, end)) work(begin, end);
  }
}

// Half of what is left of one's own share, or one chunk of another's.
bool Team::claim(int64_t index, bool half, int64_t& begin, int64_t& end) noexcept {
  std::atomic<uint64_t>& word = shares_[static_cast<size_t>(index)].word;
  uint64_t seen = word.load(std::memory_order_acquire);
  for (;;) {
    const int64_t next = static_cast<int64_t>(seen & 0xffff);
    const int64_t left = static_cast<int64_t>(seen >> 16 & 0xffff) - next;
    if (left <= 0) return false;
    const int64_t count = half ? (left + 1) / 2 : 1;
    if (word.compare_exchange_weak(seen, seen + static_cast<uint64_t>(count),
                                   std::memory_order_acq_rel, std::memory_order_acquire)) {
      begin = next;
      end = next + count;
      return true;
    }
  }
}

// The loop cannot end before these chunks are done, so its description stands.
void Team::work(int64_t begin, int64_t end) noexcept {
  const bool outer = inside_chunk;
  inside_chunk = true;
  try {
    if (!failed_.load(std::memory_order_relaxed))
      body_(n_ * begin / chunks_, n_ * end / chunks_, context_);
  } catch (...) {
    if (!failed_.exchange(true)) error_ = std::current_exception();
  }
  inside_chunk = outer;
  done_.fetch_add(static_cast<uint32_t>(end - begin), std::memory_order_seq_cst);
  if (waiting_.load(std::memory_order_seq_cst)) futex_wake(done_, 1);
}

void Team::run(int64_t n, int64_t grain, Body body, const void* context) {
  const int64_t parts = (n + grain - 1) / grain;
  const int64_t chunks = std::min(parts, kChunksPerThread * threads_);
  body_ = body;
  context_ = context;
  n_ = n;
  chunks_ = chunks;
  done_.store(0, std::memory_order_relaxed);
  const uint32_t loop = loop_.load(std::memory_order_relaxed) + 1;
  for (int64_t i = 0; i < threads_; ++i)
    shares_[static_cast<size_t>(i)].word.store(
        share_word(loop, chunks * i / threads_, chunks * (i + 1) / threads_),
        std::memory_order_release);
  loop_.store(loop, std::memory_order_seq_cst);
  if (asleep_.load(std::memory_order_seq_cst) > 0) futex_wake(loop_, INT_MAX);
  drain(0);
  wait_for_chunks(static_cast<uint32_t>(chunks));
  if (failed_.load(std::memory_order_relaxed)) {
    failed_.store(false, std::memory_order_relaxed);
    std::rethrow_exception(std::exchange(error_, nullptr));
  }
}

void Team::wait_for_chunks(uint32_t chunks) noexcept {
  const auto ready = [&] { return done_.load(std::memory_order_acquire) == chunks; };
  if (spin(ready)) return;
  waiting_.store(true, std::memory_order_seq_cst);
  for (uint32_t seen; (seen = done_.load(std::memory_order_seq_cst)) != chunks;)
    futex_wait(done_, seen);
  waiting_.store(false, std::memory_order_relaxed);
}

Helpers& Helpers::mine() noexcept {
  thread_local Helpers helpers;
  return helpers;
}

Helpers::~Helpers() { stop(); }

bool Helpers::wanted() const noexcept { return until_ != 0 && nanoseconds() < until_; }

void Helpers::late() noexcept {
  const int64_t now = nanoseconds();
  const bool again = now < until_ + length_;  // soon after the last time was over
  length_ = again ? std::min(2 * length_, kLastLength) : kFirstLength;
  until_ = now + length_;
}

Team* Helpers::team(int64_t threads) const noexcept {
  const bool here = forks_ == forks.load(std::memory_order_relaxed);
  return here && threads == threads_ ? team_.get() : nullptr;
}

bool Helpers::start(const std::vector<pid_t>& twins) {
  stop();
  if (std::adjacent_find(twins.begin(), twins.end()) != twins.end()) return false;
  [[maybe_unused]] static const int registered =
      pthread_atfork(nullptr, nullptr, [] { forks.fetch_add(1, std::memory_order_relaxed); });
  const auto threads = static_cast<int64_t>(twins.size());
  const auto team = std::make_shared<Team>(threads);
  // Signals are for the threads of the program. On Linux this is the mask of the calling thread;
  // pthread_sigmask is in another library in older releases of glibc.
  sigset_t all, before;
  sigfillset(&all);
  sigprocmask(SIG_SETMASK, &all, &before);
  try {
    for (int64_t i = 1; i < threads; ++i)
      std::thread([team, i, twin = twins[static_cast<size_t>(i)]] {
        team->help(i, twin);
      }).detach();
    team_ = team;
    threads_ = threads;
    forks_ = forks.load(std::memory_order_relaxed);
  } catch (const std::system_error&) {
    team->end();
  }
  sigprocmask(SIG_SETMASK, &before, nullptr);
  return team_ != nullptr;
}

// The threads may outlast this by a moment: the team is theirs too. In the child of a fork there
// are none, and their places in the team are lost with it.
void Helpers::stop() noexcept {
  if (team_) team_->end();
  team_.reset();
  threads_ = 0;
}

}  // namespace ipex
