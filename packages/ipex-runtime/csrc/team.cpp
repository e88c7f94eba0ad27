// SPDX-License-Identifier: Apache-2.0
// Affinity and memory policy of the threads of the caller's OpenMP team.
//
// Both belong to a thread. The affinity of another thread could be set from outside, its memory
// policy cannot: the code has to run in each thread of the team, which is why this is not Python.
// The team belongs to the OpenMP runtime in the process, found by name when it is needed.

#include <dlfcn.h>
#include <errno.h>
#include <sched.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <unistd.h>

#if defined(__linux__) && defined(__x86_64__)
// Not the newest version, which systems with a glibc before 2.34 do not have.
__asm__(".symver dlsym,dlsym@GLIBC_2.2.5");
#endif

namespace {

constexpr int kNodeWords = 16;  // 1024 NUMA nodes, what the kernel can be configured for

struct Exchange {
  int threads;
  int words;        // 64-bit words of one CPU mask
  uint64_t* masks;  // [threads][words]; all zero: leave the affinity
  int32_t* modes;   // [threads] memory policy; negative: leave it
  uint64_t* nodes;  // [threads][kNodeWords]
  int32_t*
      errors;  // [threads][2] errno of affinity and of memory policy, -1: the thread did not run
  int (*thread_number)();  // omp_get_thread_num
};

bool any(const uint64_t* words, int count) {
  for (int i = 0; i < count; ++i) {
    if (words[i] != 0) return true;
  }
  return false;
}

int exchange_affinity(uint64_t* mask, int words) {
  // The system calls, not the C library: its cpu_set_t ends at 1024 CPUs.
  constexpr int kMaxWords = 1024;
  const long bytes = static_cast<long>(words) * 8;
  uint64_t old[kMaxWords] = {};
  if (!any(mask, words)) return 0;
  if (words > kMaxWords || syscall(SYS_sched_getaffinity, 0, bytes, old) < 0) return errno;
  if (syscall(SYS_sched_setaffinity, 0, bytes, mask) < 0) return errno;
  for (int i = 0; i < words; ++i) mask[i] = old[i];
  return 0;
}

int exchange_policy(int32_t* mode, uint64_t* nodes) {
  if (*mode < 0) return 0;
  // The kernel counts one bit less than it is told.
  constexpr unsigned long kBits = kNodeWords * 64 + 1;
  int old_mode = 0;
  uint64_t old[kNodeWords + 1] = {};
  if (syscall(SYS_get_mempolicy, &old_mode, old, kBits, nullptr, 0) < 0) return errno;
  const bool named = any(nodes, kNodeWords);
  if (syscall(SYS_set_mempolicy, *mode, named ? nodes : nullptr, named ? kBits : 0) < 0)
    return errno;
  *mode = old_mode;
  for (int i = 0; i < kNodeWords; ++i) nodes[i] = old[i];
  return 0;
}

void exchange_here(void* data) {
  const Exchange& e = *static_cast<Exchange*>(data);
  const int i = e.thread_number();
  if (i < 0 || i >= e.threads) return;
  e.errors[2 * i] = exchange_affinity(e.masks + static_cast<int64_t>(i) * e.words, e.words);
  e.errors[2 * i + 1] =
      exchange_policy(e.modes + i, e.nodes + static_cast<int64_t>(i) * kNodeWords);
}

template <typename Function>
Function find(const char* name) {
  return reinterpret_cast<Function>(dlsym(RTLD_DEFAULT, name));
}

}  // namespace

// Gives each thread of the caller's team the affinity and the memory policy of its row, and puts
// the previous ones into the row: a second call with the same arrays restores them. A row that
// fails keeps its values. Returns 0, or ENOSYS if no OpenMP runtime is loaded.
extern "C" __attribute__((visibility("default"))) int ipex_runtime_exchange(
    int threads, int words, uint64_t* masks, int32_t* modes, uint64_t* nodes, int32_t* errors) {
  using Parallel = void (*)(void (*)(void*), void*, unsigned, unsigned);
  const auto parallel = find<Parallel>("GOMP_parallel");
  const auto thread_number = find<int (*)()>("omp_get_thread_num");
  if (parallel == nullptr || thread_number == nullptr) return ENOSYS;
  for (int i = 0; i < 2 * threads; ++i) errors[i] = -1;
  Exchange e{threads, words, masks, modes, nodes, errors, thread_number};
  parallel(exchange_here, &e, static_cast<unsigned>(threads), 0);
  return 0;
}
