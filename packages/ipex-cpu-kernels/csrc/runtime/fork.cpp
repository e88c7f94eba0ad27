// SPDX-License-Identifier: Apache-2.0
// Keeps the child of a fork from waiting for threads that it does not have.
//
// libgomp keeps the threads of a parallel region for the next region of the same thread, and it
// waits for them in a child too, where fork() has left them behind. In the child the thread that
// forked therefore works alone, if it has run loops of ours with others before. Its own threads
// have teams of their own.
#include <dlfcn.h>
#include <pthread.h>

#include "ipex/glue/dispatch.h"

namespace ipex {
namespace {

void (*set_threads)(int) = nullptr;
int (*set_mkl_threads)(int) = nullptr;

void in_child() {
  if (parallel_loops() == 0) return;
  set_threads(1);
  if (set_mkl_threads != nullptr) set_mkl_threads(1);
}

// The functions are looked up before: a child may not.
[[maybe_unused]] const bool registered = [] {
  // The runtime of LLVM and Intel starts afresh in a child.
  if (dlsym(RTLD_DEFAULT, "__kmpc_fork_call") != nullptr) return false;
  set_threads = reinterpret_cast<void (*)(int)>(dlsym(RTLD_DEFAULT, "omp_set_num_threads"));
  if (set_threads == nullptr) return false;
  if (void* const torch = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD))
    set_mkl_threads = reinterpret_cast<int (*)(int)>(dlsym(torch, "MKL_Set_Num_Threads_Local"));
  return pthread_atfork(nullptr, nullptr, in_child) == 0;
}();

}  // namespace
}  // namespace ipex
