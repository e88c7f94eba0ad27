// SPDX-License-Identifier: Apache-2.0
// What an op's glue (<op>.op.cpp) needs: argument checks, kernel handles, output tensors.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <initializer_list>
#include <mutex>
#include <sstream>
#include <stdexcept>
#include <string>

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include "ipex/glue/op_table.h"
#include "ipex/kernel.h"
#include "runtime/loader.h"
#include "runtime/team.h"

// Raises RuntimeError in Python with exactly this text. torch's own check macro adds the source
// position.
#define IPEX_CHECK(condition, ...)           \
  do {                                       \
    if (__builtin_expect(!(condition), 0)) { \
      ::ipex::fail(__VA_ARGS__);             \
    }                                        \
  } while (0)

// Calls a function of torch's C shim. torch's own macro for this has another name in each release.
#define IPEX_SHIM_CALL(call) IPEX_CHECK((call) == 0, "torch reported an error in " #call)

namespace ipex {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

template <class... Args>
[[noreturn]] void fail(const Args&... args) {
  std::ostringstream text;
  (text << ... << args);
  std::string message = text.str();
  if (message.ends_with("got ")) message += "''";  // an empty string
  throw std::runtime_error(message);
}

// "bfloat16", as users write it.
const char* dtype_name(ScalarType dtype);
// "[3, 4]"
template <class Numbers>
std::string list_text(const Numbers& numbers) {
  std::string text = "[";
  for (const auto number : numbers) text += (text.size() > 1 ? ", " : "") + std::to_string(number);
  return text + "]";
}
// The sizes of a tensor as a list.
std::string shape_text(const Tensor& tensor);

inline bool is_kernel_dtype(ScalarType dtype) {
  return dtype == ScalarType::Float || dtype == ScalarType::BFloat16 || dtype == ScalarType::Half;
}

// The checks that most ops share; the texts are as in ipex_core.library.checks.
void check_tensor(const char* op, const char* name, const Tensor& x, int64_t min_dim = 1);
void check_like(const char* op, const char* name, const Tensor& value, const Tensor& x,
                const char* of = "x");
// Optional per-feature vector: 1-D, size x.shape[-1], dtype of x or float32.
void check_vector(const char* op, const char* name, const OptionalTensor& value, const Tensor& x);

// A factor on scores: masks are minus infinity, which a negative factor would turn round.
void check_score_scale(const char* op, const char* name, double scale);

// New CPU tensors. empty_strided of the C shim costs a third of a dispatcher call.
Tensor new_tensor(const int64_t* sizes, const int64_t* strides, int64_t dim, ScalarType dtype);
Tensor new_contiguous(const int64_t* sizes, int64_t dim, ScalarType dtype);
Tensor new_contiguous_like(const Tensor& x);

// The tensor itself if it is contiguous, else a contiguous copy.
Tensor as_contiguous(const Tensor& x);

// A matrix view of x: rows = product of the leading dimensions, consecutive columns, rows `stride`
// elements apart. Copies x only if its rows are not equally spaced or its columns not consecutive.
struct Rows {
  Tensor tensor;  // keeps the memory alive
  const void* data = nullptr;
  int64_t rows = 0, columns = 0, stride = 0;
};
Rows as_rows(const Tensor& x);

// Every kernel handle of the library, for introspection.
class KernelBase {
 public:
  // Without a symbol: an op that is implemented in its glue, for all levels.
  explicit KernelBase(const char* op, const char* symbol = nullptr);
  const char* op() const { return op_; }
  const char* symbol() const { return symbol_; }
  static const KernelBase* first();
  const KernelBase* next() const { return next_; }

 protected:
  void* resolve() const;

  const char* op_;
  const char* symbol_;
  const KernelBase* next_;
  mutable std::atomic<uint64_t> epoch_{0};
  mutable std::atomic<void*> function_{nullptr};
};

// A kernel, found at its first use and again when the active level changes. Resolve it before a
// parallel loop: it may throw, and nothing may throw inside one.
template <class F>
class Kernel : public KernelBase {
 public:
  using KernelBase::KernelBase;
  F* get() const {
    if (__builtin_expect(epoch_.load(std::memory_order_acquire) == cpu::epoch(), 1))
      return reinterpret_cast<F*>(function_.load(std::memory_order_relaxed));
    return reinterpret_cast<F*>(resolve());
  }
};

// The kernels of one name for the three storage types.
template <class F32, class Bf16, class F16>
class Kernels {
 public:
  Kernels(const char* op, const char* f32, const char* bf16, const char* f16)
      : f32_(op, f32), bf16_(op, bf16), f16_(op, f16) {}

  // Calls f.operator()<T>(kernel) with the storage type T of `dtype`, which must be a kernel dtype.
  template <class F>
  void visit(ScalarType dtype, const F& f) const {
    if (dtype == ScalarType::Float)
      f.template operator()<float>(f32_.get());
    else if (dtype == ScalarType::BFloat16)
      f.template operator()<BFloat16>(bf16_.get());
    else
      f.template operator()<Half>(f16_.get());
  }

 private:
  Kernel<F32> f32_;
  Kernel<Bf16> bf16_;
  Kernel<F16> f16_;
};

// Handles of ipex_k_<name>_f32, _bf16 and _f16, which belong to the op `op`.
#define IPEX_KERNELS(op, name)                                                   \
  ::ipex::Kernels<decltype(ipex_k_##name##_f32), decltype(ipex_k_##name##_bf16), \
                  decltype(ipex_k_##name##_f16)>(op, "ipex_k_" #name "_f32",     \
                                                 "ipex_k_" #name "_bf16", "ipex_k_" #name "_f16")

// How many loops of the calling thread went to several threads.
int64_t& parallel_loops() noexcept;

// Runs body for ranges that cover [0, n) on torch's threads, or on helpers of our own in their
// place.
void spread(int64_t n, int64_t grain, Team::Body body, const void* context);

// Runs f(begin, end) over [0, n) on the team of the running program, or else on torch's threads; at
// least `grain` items go to one thread.
template <class F>
void parallel_for(int64_t n, int64_t grain, const F& f) {
  if (n <= 0) return;
  // No region for work that one thread does faster, and none within another.
  if (n <= grain || Team::in_chunk()) return f(int64_t{0}, n);
  ++parallel_loops();
  const auto body = [](int64_t begin, int64_t end, const void* context) {
    (*static_cast<const F*>(context))(begin, end);
  };
  if (Team* const team = Team::current()) return team->run(n, grain, body, &f);
  spread(n, grain, body, &f);
}

// Calls f(context) with one parallel region around it, whose threads share the parallel loops in f.
void with_team(void (*f)(const void* context), const void* context);

template <class F>
void with_team(const F& f) {
  with_team([](const void* context) { (*static_cast<const F*>(context))(); }, &f);
}

}  // namespace ipex
