// SPDX-License-Identifier: Apache-2.0
// Pinning and tasks of ipex/runtime.h. The OpenMP runtime is the one in the process, found by name.
#include "runtime/baseline.h"

#include "ipex/runtime.h"

#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <exception>
#include <mutex>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>

#include <torch/csrc/stable/c/shim.h>

// Members of exported classes that are not exported themselves.
#define IPEX_HIDDEN __attribute__((visibility("hidden")))

namespace ipex::runtime {
namespace {

constexpr int32_t kMaxCpus = 8192;
// The system calls, not the C library: its cpu_set_t ends at 1024 CPUs.
struct Mask {
  uint64_t words[kMaxCpus / 64] = {};
  void add(int32_t cpu) { words[cpu / 64] |= uint64_t{1} << cpu % 64; }
  bool has(int32_t cpu) const { return words[cpu / 64] >> cpu % 64 & 1; }
};

bool get_affinity(pid_t thread, Mask& mask) {
  return syscall(SYS_sched_getaffinity, thread, sizeof mask.words, mask.words) >= 0;
}

template <class Function>
Function find(const char* name) {
  return reinterpret_cast<Function>(dlsym(RTLD_DEFAULT, name));
}

using Parallel = void (*)(void (*)(void*), void*, unsigned, unsigned);

// With OMP_PROC_BIND the runtime binds the first thread to one place when it is loaded: then the
// places tell what the process may use.
void add_omp_places(Mask& mask) {
  const auto count = find<int (*)()>("omp_get_num_places");
  const auto size = find<int (*)(int)>("omp_get_place_num_procs");
  const auto ids = find<void (*)(int, int*)>("omp_get_place_proc_ids");
  if (count == nullptr || size == nullptr || ids == nullptr) return;
  for (int place = 0; place < count(); ++place) {
    std::vector<int> cpus(static_cast<size_t>(std::max(size(place), 0)));
    ids(place, cpus.data());
    for (int cpu : cpus) {
      if (cpu >= 0 && cpu < kMaxCpus) mask.add(cpu);
    }
  }
}

// CPUs of the main thread before it was pinned.
std::mutex main_mutex;
std::optional<Mask> main_before;

// Asks the main thread: the calling one may belong to an executor.
Mask process_cpus() {
  const std::lock_guard lock(main_mutex);
  if (main_before) return *main_before;
  Mask mask;
  get_affinity(getpid(), mask);
  add_omp_places(mask);
  return mask;
}

// "0-3,8"
std::string cpu_list(const Mask& mask) {
  std::string text;
  for (int32_t cpu = 0; cpu < kMaxCpus; ++cpu) {
    if (!mask.has(cpu)) continue;
    const int32_t first = cpu;
    while (cpu + 1 < kMaxCpus && mask.has(cpu + 1)) ++cpu;
    text += (text.empty() ? "" : ",") + std::to_string(first);
    if (cpu > first) text += "-" + std::to_string(cpu);
  }
  return text;
}

bool exists(int32_t cpu) {
  return access(("/sys/devices/system/cpu/cpu" + std::to_string(cpu)).c_str(), F_OK) == 0;
}

void check(const std::vector<int32_t>& cores) {
  const Mask allowed = process_cpus();
  const auto refuse = [&](const std::string& expected, const std::string& given) {
    throw std::invalid_argument("CPUPool: cpu_core_list must " + expected + ", got " + given +
                                ": choose from the cores that this process may use, " +
                                cpu_list(allowed));
  };
  if (cores.empty()) refuse("name at least one core", "none");
  std::set<int32_t> seen;
  for (const int32_t cpu : cores) {
    const std::string number = std::to_string(cpu);
    if (cpu < 0 || cpu >= kMaxCpus) refuse("lie in 0.." + std::to_string(kMaxCpus - 1), number);
    if (!seen.insert(cpu).second) refuse("name each core once", number + " more than once");
    if (allowed.has(cpu)) continue;
    if (!exists(cpu)) refuse("name cores of this machine", number);
    refuse("name cores that this process may use", number);
  }
}

struct Exchange {
  std::vector<Mask>& masks;  // of each thread
  std::vector<int> errors;   // errno; -1: the thread did not run
  int (*thread_number)();
};

int exchange_affinity(Mask& mask) {
  Mask old;
  if (!get_affinity(0, old)) return errno;
  if (syscall(SYS_sched_setaffinity, 0, sizeof mask.words, mask.words) < 0) return errno;
  mask = old;
  return 0;
}

void exchange_here(void* data) {
  Exchange& e = *static_cast<Exchange*>(data);
  const auto i = static_cast<size_t>(e.thread_number());
  if (i < e.masks.size()) e.errors[i] = exchange_affinity(e.masks[i]);
}

// Gives each thread of the caller's team its affinity and puts the previous ones into `masks`: a
// second call restores them. A row that fails keeps its value. Returns the first errno.
int exchange(std::vector<Mask>& masks) {
  const auto parallel = find<Parallel>("GOMP_parallel");
  const auto thread_number = find<int (*)()>("omp_get_thread_num");
  if (parallel == nullptr || thread_number == nullptr) return exchange_affinity(masks[0]);
  Exchange e{masks, std::vector<int>(masks.size(), -1), thread_number};
  parallel(exchange_here, &e, static_cast<unsigned>(masks.size()), 0);
  const auto error = std::find_if(e.errors.begin(), e.errors.end(), [](int c) { return c > 0; });
  return error == e.errors.end() ? 0 : *error;
}

struct Threads {
  int torch = 1;
  int mkl = 0;
};

// Sets how many threads torch and MKL use in the calling thread, and returns the previous numbers.
// at::set_num_threads would also change what threads that start later find.
Threads set_threads(Threads wanted) {
  Threads before;
  uint32_t count = 1;
  torch_get_num_threads(&count);  // also gives this thread the settings of the process
  before.torch = static_cast<int>(count);
  if (const auto set = find<void (*)(int)>("omp_set_num_threads")) set(wanted.torch);
  static void* const torch = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
  if (torch != nullptr) {
    const auto set = reinterpret_cast<int (*)(int)>(dlsym(torch, "MKL_Set_Num_Threads_Local"));
    if (set != nullptr) before.mkl = set(wanted.mkl);
  }
  return before;
}

bool on_main_thread() { return syscall(SYS_gettid) == getpid(); }

}  // namespace

bool is_runtime_ext_enabled() { return find<Parallel>("GOMP_parallel") != nullptr; }

CPUPool::CPUPool(std::vector<int32_t> cpu_core_list) : cpu_core_list_(std::move(cpu_core_list)) {
  check(cpu_core_list_);
}

struct IPEX_HIDDEN WithCPUPool::State {
  std::vector<Mask> masks;
  Threads threads;
  bool outermost = false;  // of the main thread

  explicit State(const std::vector<int32_t>& cores) : masks(cores.size()) {
    for (size_t i = 0; i < cores.size(); ++i) masks[i].add(cores[i]);
    if (on_main_thread()) {
      const Mask before = process_cpus();
      const std::lock_guard lock(main_mutex);
      outermost = !main_before;
      if (outermost) main_before = before;
    }
    const int count = static_cast<int>(cores.size());
    threads = set_threads({count, count});
    if (const int error = exchange(masks)) {
      restore();
      throw std::runtime_error(
          std::string("WithCPUPool: the system must let threads be pinned, got ") +
          std::strerror(error) + ": allow sched_setaffinity in this container, or use no pool");
    }
  }

  void restore() {
    exchange(masks);
    set_threads(threads);
    if (!outermost) return;
    const std::lock_guard lock(main_mutex);
    main_before.reset();
  }
};

WithCPUPool::WithCPUPool(CPUPool cpu_pool)
    : state_(std::make_unique<State>(cpu_pool.get_cpu_core_list())) {}

WithCPUPool::~WithCPUPool() { state_->restore(); }

// A condition variable; std::condition_variable is newer than the oldest libstdc++ in
// manylinux_2_28, and so is what std::promise is made of.
class Signal {
 public:
  ~Signal() { pthread_cond_destroy(&condition_); }
  void send() { pthread_cond_broadcast(&condition_); }
  template <class Predicate>
  void wait(std::unique_lock<std::mutex>& lock, const Predicate& done) {
    while (!done()) pthread_cond_wait(&condition_, lock.mutex()->native_handle());
  }

 private:
  pthread_cond_t condition_ = PTHREAD_COND_INITIALIZER;
};

struct IPEX_HIDDEN TaskExecutor::Worker {
  std::mutex mutex;
  Signal changed;
  std::deque<std::function<void()>> calls;
  bool started = false, closed = false;
  std::exception_ptr error;  // why the thread could not start
  std::thread thread;

  void run(const CPUPool& pool) {
    std::optional<WithCPUPool> pin;
    try {
      pin.emplace(pool);
    } catch (...) {
      error = std::current_exception();
    }
    std::unique_lock lock(mutex);
    started = true;
    changed.send();
    while (!error) {
      changed.wait(lock, [&] { return closed || !calls.empty(); });
      if (calls.empty()) return;
      std::function<void()> call = std::move(calls.front());
      calls.pop_front();
      lock.unlock();
      call();
      call = nullptr;  // its arguments end here, without the lock
      lock.lock();
    }
  }
};

TaskExecutor::TaskExecutor(std::vector<int32_t> cpu_core_list)
    : worker_(std::make_shared<Worker>()) {
  CPUPool pool(std::move(cpu_core_list));
  worker_->thread = std::thread([worker = worker_, pool] { worker->run(pool); });
  {
    std::unique_lock lock(worker_->mutex);
    worker_->changed.wait(lock, [&] { return worker_->started; });
  }
  if (worker_->error) {
    worker_->thread.join();
    std::rethrow_exception(worker_->error);
  }
}

TaskExecutor::~TaskExecutor() {
  {
    const std::lock_guard lock(worker_->mutex);
    worker_->closed = true;
  }
  worker_->changed.send();
  // The last owner may be a call that it runs.
  if (worker_->thread.get_id() == std::this_thread::get_id())
    worker_->thread.detach();
  else
    worker_->thread.join();
}

void TaskExecutor::submit(std::function<void()> call) {
  {
    const std::lock_guard lock(worker_->mutex);
    worker_->calls.push_back(std::move(call));
  }
  worker_->changed.send();
}

}  // namespace ipex::runtime
