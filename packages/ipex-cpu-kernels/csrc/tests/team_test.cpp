// SPDX-License-Identifier: Apache-2.0
// Checks runtime/team.h alone, without torch: tests/test_team.py compiles it with and without the
// thread sanitizer. It prints what failed and returns the number of failures.
#include "runtime/team.h"

#include <sched.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace {

using ipex::Helpers;
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
    team.end();
    for (std::thread& helper : helpers) helper.join();
    throw;
  }
  team.end();
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
  team.end();
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

// The threads of a process but the calling one, as twins for helpers.
struct Sleepers {
  explicit Sleepers(int count) : ids(static_cast<size_t>(count) + 1) {
    ids[0] = id();
    for (int i = 1; i <= count; ++i)
      threads.emplace_back([this, i] {
        ids[static_cast<size_t>(i)] = id();
        ++started;
        while (!stop) usleep(1000);
      });
    while (started < count) usleep(100);
  }
  ~Sleepers() {
    stop = true;
    for (std::thread& thread : threads) thread.join();
  }
  static pid_t id() { return static_cast<pid_t>(syscall(SYS_gettid)); }

  std::vector<pid_t> ids;
  std::atomic<bool> stop{false};
  std::atomic<int> started{0};
  std::vector<std::thread> threads;
};

// Loops of a team of helpers, with two callers at once.
void with_helpers(int threads) {
  const Sleepers twins(threads - 1);
  std::vector<std::thread> callers;
  for (int i = 0; i < 2; ++i)
    callers.emplace_back([&] {
      Helpers& helpers = Helpers::mine();
      expect(!helpers.wanted() && !helpers.team(threads), "no helpers before a late region");
      helpers.late();
      expect(helpers.wanted(), "helpers after a late region");
      expect(helpers.start(twins.ids), "helpers start");
      Team* const team = helpers.team(threads);
      expect(team && !helpers.team(threads + 1), "a team of as many threads");
      for (int run = 0; run < 100; ++run)
        team->lead([&] {
          for (const int64_t n : {3, 100}) {
            std::atomic<int64_t> sum{0};
            loop(n, 1, [&](int64_t begin, int64_t end) { sum += end - begin; });
            expect(sum == n, "each index once with helpers");
          }
          if (run % 20 == 0) usleep(500);  // the helpers sleep
        });
      try {
        team->lead(
            [&] { loop(9, 1, [](int64_t, int64_t) { throw std::runtime_error("chunk"); }); });
        expect(false, "an exception of a chunk of helpers");
      } catch (const std::runtime_error&) {
      }
      expect(helpers.start(twins.ids) && helpers.team(threads), "others in their place");
    });
  for (std::thread& caller : callers) caller.join();
}

// A helper has the affinity of the thread that it stands for, also when that one changes.
void helpers_follow() {
  cpu_set_t all, one;
  sched_getaffinity(0, sizeof all, &all);
  CPU_ZERO(&one);
  for (int cpu = 0; CPU_COUNT(&one) == 0; ++cpu)
    if (CPU_ISSET(cpu, &all)) CPU_SET(cpu, &one);
  const Sleepers twins(1);
  Helpers& helpers = Helpers::mine();
  expect(helpers.start(twins.ids), "a helper starts");
  for (const cpu_set_t& want : {one, all, one}) {
    sched_setaffinity(twins.ids[1], sizeof want, &want);
    helpers.team(2)->lead([&] {
      std::atomic<int> arrived{0};
      const auto caller = std::this_thread::get_id();
      loop(2, 1, [&](int64_t, int64_t) {
        ++arrived;
        for (int i = 0; i < 30000 && arrived < 2; ++i) usleep(1000);
        cpu_set_t found;
        sched_getaffinity(0, sizeof found, &found);
        if (std::this_thread::get_id() != caller)
          expect(CPU_EQUAL(&found, &want), "a helper follows its twin");
      });
      expect(arrived == 2, "the helper came");
    });
  }
  expect(!helpers.start({twins.ids[0], twins.ids[0]}) && !helpers.team(2), "a thread twice");
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
  with_helpers(8);
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
  const Sleepers twins(1);
  Helpers& helpers = Helpers::mine();
  expect(helpers.start(twins.ids) && helpers.team(2), "a helper starts before a fork");
  const auto child = [] { expect(!Helpers::mine().team(2), "no helpers in a child"); };
  expect(in_child(child) == 0, "a child of a process with helpers");
#endif
}

}  // namespace

int main() {
  after_fork();  // first: helpers end some time after their team
  for (int threads = 1; threads <= 8; ++threads) {
    each_index_once(threads, 300);
    exceptions(threads);
    failures_everywhere(threads);
  }
  for (const int threads : {2, 8}) sleepers(threads);
  woken();
  no_helpers();
  two_callers(4, 4);
  with_helpers(2);
  with_helpers(8);
  helpers_follow();
  oversubscribed();
  std::printf("%d failures\n", failures.load());
  return failures.load() > 0;
}
