// SPDX-License-Identifier: Apache-2.0
// Pools of cores, and tasks that run on them: what ipex.runtime has in Python, for C++ programs.
// Link IPEX::ipex. Needs C++17 and neither torch nor Python.
//
//   using namespace ipex::runtime;
//   WithCPUPool pinned(CPUPool({0, 1}));  // until the end of the block
//
//   auto executor = std::make_shared<TaskExecutor>(std::vector<int32_t>{0, 1});
//   auto forward = [&](at::Tensor x) { return module.forward({x}).toTensor(); };
//   Task task(forward, executor);
//   std::future<at::Tensor> future = task(x);
#pragma once

#include <cstdint>
#include <functional>
#include <future>
#include <memory>
#include <stdexcept>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#if __has_include(<ATen/ThreadLocalState.h>) && !defined(TORCH_TARGET_VERSION) && !defined(TORCH_STABLE_ONLY)
#include <ATen/ThreadLocalState.h>
#define IPEX_RUNTIME_WITH_TORCH
#endif

#define IPEX_CPP_API __attribute__((visibility("default")))

namespace ipex::runtime {

// Whether the threads of the OpenMP team can be pinned. Otherwise only the calling thread is.
IPEX_CPP_API bool is_runtime_ext_enabled();

// A set of cores for threads to run on: one thread on each.
class IPEX_CPP_API CPUPool {
 public:
  // CPU numbers, all different, that exist and that the process may use.
  // Throws std::invalid_argument.
  explicit CPUPool(std::vector<int32_t> cpu_core_list);

  const std::vector<int32_t>& get_cpu_core_list() const { return cpu_core_list_; }

 private:
  std::vector<int32_t> cpu_core_list_;
};

// Pins the calling thread and the threads that it computes with to a pool, as long as the object
// lives. Afterwards affinity and number of threads are what they were. Objects of one thread nest:
// destroy them in the reverse order, in that thread.
class IPEX_CPP_API WithCPUPool {
 public:
  // Throws std::runtime_error if the system refuses the affinity.
  explicit WithCPUPool(CPUPool cpu_pool);
  ~WithCPUPool();
  WithCPUPool(const WithCPUPool&) = delete;
  WithCPUPool& operator=(const WithCPUPool&) = delete;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// A thread that is pinned to cores, with an OpenMP team of its own there. It runs calls in the
// order in which they were queued. The destructor waits until the queue is empty.
class IPEX_CPP_API TaskExecutor {
 public:
  // Throws what CPUPool and WithCPUPool throw.
  explicit TaskExecutor(std::vector<int32_t> cpu_core_list);
  ~TaskExecutor();
  TaskExecutor(const TaskExecutor&) = delete;
  TaskExecutor& operator=(const TaskExecutor&) = delete;

  // Queues a call, which must not throw. Task is the safer way.
  void submit(std::function<void()> call);

 private:
  struct Worker;
  std::shared_ptr<Worker> worker_;
};

// Runs a callable on the thread of an executor.
//
// F is its type. Args, if given, are the types of the arguments, else each call has its own. The
// callable is copied, and the arguments of a call are. Where the headers of torch are found, calls
// see the grad mode, the inference mode and the autocast of their callers.
//
// A call must not wait for a later call of its own executor, which would never begin.
template <class F, class... Args>
class Task {
 public:
  // Throws std::invalid_argument without an executor.
  explicit Task(F f, std::shared_ptr<TaskExecutor> task_executor)
      : function_(std::make_shared<std::decay_t<F>>(std::forward<F>(f))),
        executor_(std::move(task_executor)) {
    if (!executor_) {
      throw std::invalid_argument(
          "Task: task_executor must point to a TaskExecutor, got a null pointer: create one with"
          " std::make_shared<TaskExecutor>(cores)");
    }
  }

  // Queues a call and returns its future at once. get() returns the result, or throws what the call
  // threw.
  template <class... A>
  auto operator()(A&&... args) {
    if constexpr (sizeof...(Args) == 0) {
      return queue(std::tuple<std::decay_t<A>...>(std::forward<A>(args)...));
    } else {
      static_assert(sizeof...(A) == sizeof...(Args), "Task: Args must name each argument");
      return queue(std::tuple<std::decay_t<Args>...>(std::forward<A>(args)...));
    }
  }

 private:
  using Function = std::decay_t<F>;

  // A function that takes references to what it changes gets the copies as lvalues.
  template <class... S>
  static decltype(auto) invoke(Function& function, std::tuple<S...>& arguments) {
    return std::apply(
        [&](S&... values) -> decltype(auto) {
          if constexpr (std::is_invocable_v<Function&, S&&...>) {
            return std::invoke(function, std::move(values)...);
          } else {
            static_assert(std::is_invocable_v<Function&, S&...>,
                          "Task: the callable must take the arguments of the call");
            return std::invoke(function, values...);
          }
        },
        arguments);
  }

  template <class Arguments>
  auto queue(Arguments arguments) {
    using Result = decltype(invoke(std::declval<Function&>(), std::declval<Arguments&>()));
    // std::function copies, and a result cannot be copied.
    auto call = std::make_shared<std::packaged_task<Result()>>([function = function_,
                                                                arguments = std::move(arguments)
#ifdef IPEX_RUNTIME_WITH_TORCH
                                                                    ,
                                                                state = at::ThreadLocalState()
#endif
    ]() mutable -> Result {
#ifdef IPEX_RUNTIME_WITH_TORCH
      const at::ThreadLocalStateGuard guard(state);
#endif
      return invoke(*function, arguments);
    });
    std::future<Result> future = call->get_future();
    executor_->submit([call] { (*call)(); });
    return future;
  }

  std::shared_ptr<Function> function_;
  std::shared_ptr<TaskExecutor> executor_;
};

template <class F>
Task(F, std::shared_ptr<TaskExecutor>) -> Task<F>;

}  // namespace ipex::runtime

// The names of IPEX.
namespace torch_ipex {
namespace runtime = ::ipex::runtime;
}
