// SPDX-License-Identifier: Apache-2.0
// Checks runtime/team.h alone, without torch: tests/test_team.py compiles it with and without the
// thread sanitizer. It prints what failed and returns the number of failures.
#include "runtime/team.h"

#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace {

using ipex::Team;

std::atomic<int> failures{0};

void expect(bool ok, const char* what) {
  if (ok) return;
  failures.fetch_add(1);
  std::printf("FAIL %s\n", what);
}

// As with_team() of ipex/glue/dispatch.h, with threads of this file in place of torch's.
template <class F>
void with_team(int threads, const F& f) {
  Team team(threads);
  std::vector<std::thread> helpers;
  for (int i = 1; i < threads; ++i) helpers.emplace_back([&team, i] { team.help(i); });
  try {
    team.lead(f);
  } catch (...) {
    for (std::thread& helper : helpers) helper.join();
    throw;
  }
  for (std::thread& helper : helpers) helper.join();
}

template <class F>
void loop(int64_t n, int64_t grain, const F& f) {
  Team::current()->run(
      n, grain,
      [](int64_t begin, int64_t end, const void* context) {
        (*static_cast<const F*>(context))(begin, end);
      },
      &f);
}

// Every index once, in loops of many sizes, one after the other: each reads what the last one
// wrote.
void each_index_once(int threads, int loops) {
  with_team(threads, [&] {
    expect(Team::current() != nullptr, "the leading thread has a team");
    std::vector<int> values(1000);
    for (int i = 0; i < loops; ++i) {
      const int64_t n = 2 + (i * 7919) % 999, grain = 1 + i % 3;
      loop(n, grain, [&](int64_t begin, int64_t end) {
        expect(Team::in_chunk(), "a chunk knows that it is one");
        for (int64_t k = begin; k < end; ++k) ++values[static_cast<size_t>(k)];
      });
      bool once = true;
      for (int64_t k = 0; k < n; ++k) {
        once &= values[static_cast<size_t>(k)] == 1;
        values[static_cast<size_t>(k)] = 0;
      }
      expect(once, "each index once");
    }
    expect(!Team::in_chunk(), "no chunk outside of loops");
  });
  expect(Team::current() == nullptr, "no team after its end");
}

void exceptions(int threads) {
  with_team(threads, [&] {
    for (int i = 0; i < 200; ++i) {
      std::string text;
      try {
        loop(64, 1, [&](int64_t begin, int64_t end) {
          if (begin <= i % 64 && i % 64 < end) throw std::runtime_error("chunk");
        });
      } catch (const std::runtime_error& error) {
        text = error.what();
      }
      expect(text == "chunk", "an exception of a chunk comes out of its loop");
    }
    std::atomic<int64_t> sum{0};
    loop(64, 1, [&](int64_t begin, int64_t end) { sum += end - begin; });
    expect(sum == 64, "a loop after one that failed");
  });
  std::string text;
  try {
    with_team(threads, [] { throw std::runtime_error("run"); });
  } catch (const std::runtime_error& error) {
    text = error.what();
  }
  expect(text == "run", "an exception of the run ends the team");
}

// The loop ends without threads that have claimed nothing, and those that sleep are woken.
void sleepers(int threads) {
  with_team(threads, [&] {
    for (int i = 0; i < 20; ++i) {
      usleep(200 * static_cast<useconds_t>(i % 4));  // some sleep by then, some still look
      std::atomic<int64_t> sum{0};
      loop(100, 1, [&](int64_t begin, int64_t end) {
        if (begin == 0) usleep(300);  // and the leading thread sleeps for others, or they for it
        sum += end - begin;
      });
      expect(sum == 100, "a loop whose threads sleep");
    }
  });
}

// A helper that sleeps is woken for a loop: each of two chunks waits for the other.
void woken() {
  with_team(2, [&] {
    usleep(5000);
    std::atomic<int> arrived{0};
    loop(2, 1, [&](int64_t, int64_t) {
      ++arrived;
      for (int i = 0; i < 30000 && arrived < 2; ++i) usleep(1000);
      expect(arrived == 2, "a helper that sleeps is woken");
    });
  });
}

// Helpers that never come, or come after the end.
void no_helpers() {
  Team team(4);
  std::atomic<int64_t> sum{0};
  team.lead([&] { loop(100, 1, [&](int64_t begin, int64_t end) { sum += end - begin; }); });
  expect(sum == 100, "a loop without helpers");
  team.help(1);
}

// Every chunk fails, in all threads at once: one of the exceptions comes out, and nothing of it
// reaches the next loop.
void failures_everywhere(int threads) {
  with_team(threads, [&] {
    for (int i = 0; i < 50; ++i) {
      bool caught = false;
      try {
        loop(64, 1, [](int64_t, int64_t) { throw std::runtime_error("chunk"); });
      } catch (const std::runtime_error&) {
        caught = true;
      }
      expect(caught, "an exception comes out if all chunks fail");
      std::atomic<int64_t> sum{0};
      loop(64, 1, [&](int64_t begin, int64_t end) { sum += end - begin; });
      expect(sum == 64, "a loop after one whose chunks all failed");
    }
  });
}

// Programs of two threads at once, with teams of their own.
void two_callers(int first, int second) {
  std::vector<std::thread> callers;
  for (const int threads : {first, second})
    callers.emplace_back([=] {
      each_index_once(threads, 150);
      exceptions(threads);
    });
  for (std::thread& caller : callers) caller.join();
}

// More threads than the CPUs that they may use.
void oversubscribed() {
  cpu_set_t before, one;
  expect(sched_getaffinity(0, sizeof before, &before) == 0, "the affinity is read");
  CPU_ZERO(&one);
  for (int cpu = 0; CPU_COUNT(&one) == 0; ++cpu)
    if (CPU_ISSET(cpu, &before)) CPU_SET(cpu, &one);
  expect(sched_setaffinity(0, sizeof one, &one) == 0, "the affinity is set");
  for (const int threads : {2, 8}) {
    each_index_once(threads, 100);
    exceptions(threads);
    sleepers(threads);
  }
  two_callers(3, 8);
  expect(sched_setaffinity(0, sizeof before, &before) == 0, "the affinity is set back");
}

int in_child(void (*f)()) {
  std::fflush(stdout);
  const pid_t child = fork();
  if (child == 0) {
    failures = 0;
    f();
    std::fflush(stdout);
    _exit(failures.load() > 0);
  }
  int status = -1;
  waitpid(child, &status, 0);
  return status;
}

// The child has the memory of the parent, without the threads: of a run that is over, and of one
// that another thread is in.
void after_fork() {
  const auto run = [] {
    each_index_once(4, 100);
    exceptions(4);
  };
  run();
  expect(in_child(run) == 0, "a run in the child of a process that ran before");
#ifndef __SANITIZE_THREAD__  // It takes the child's threads for the ones that the fork left behind.
  std::atomic<bool> stop{false}, started{false};
  std::thread other([&] {
    while (!stop) {
      each_index_once(3, 20);
      started = true;
    }
  });
  while (!started) std::this_thread::yield();
  expect(in_child(run) == 0, "a run in the child of a process that runs meanwhile");
  stop = true;
  other.join();
#endif
}

}  // namespace

int main() {
  for (int threads = 1; threads <= 8; ++threads) {
    each_index_once(threads, 300);
    exceptions(threads);
    failures_everywhere(threads);
  }
  for (const int threads : {2, 8}) sleepers(threads);
  woken();
  no_helpers();
  two_callers(4, 4);
  oversubscribed();
  after_fork();
  std::printf("%d failures\n", failures.load());
  return failures.load() > 0;
}
