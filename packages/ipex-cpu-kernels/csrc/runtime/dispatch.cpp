// SPDX-License-Identifier: Apache-2.0
#include "ipex/glue/dispatch.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <limits>

#include "ipex/glue/tensor_pool.h"
#include "runtime/block_cache.h"

namespace ipex {
namespace {

const KernelBase* first_kernel = nullptr;
std::mutex resolve_mutex;

}  // namespace

KernelBase::KernelBase(const char* op, const char* symbol)
    : op_(op), symbol_(symbol), next_(first_kernel) {
  first_kernel = this;
}

const KernelBase* KernelBase::first() { return first_kernel; }

void* KernelBase::resolve() const {
  std::lock_guard lock(resolve_mutex);
  const uint64_t now = cpu::epoch();
  void* function = cpu::resolve(symbol_).function;
  function_.store(function, std::memory_order_relaxed);
  // Release: a reader that sees this epoch sees the pointer stored before it.
  epoch_.store(now, std::memory_order_release);
  return function;
}

int64_t& parallel_loops() noexcept {
  thread_local int64_t loops = 0;
  return loops;
}

namespace {

// The team of helpers of our own, if these are to take the places of torch's threads now.
Team* team_of_helpers(int64_t threads) {
  if (threads < 2 || threads > Team::kMaxThreads) return nullptr;
  Helpers& helpers = Helpers::mine();
  if (Team* const team = helpers.team(threads)) return team;
  std::vector<pid_t> twins(static_cast<size_t>(threads));
  torch::stable::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      twins[static_cast<size_t>(i)] = static_cast<pid_t>(syscall(SYS_gettid));
  });
  // Within a region of torch's all of them are the calling thread.
  return helpers.start(twins) ? helpers.team(threads) : nullptr;
}

int64_t torch_threads() { return static_cast<int64_t>(torch::stable::get_num_threads()); }

}  // namespace

void spread(int64_t n, int64_t grain, Team::Body body, const void* context) {
  Helpers& helpers = Helpers::mine();
  if (helpers.wanted())
    if (Team* const team = team_of_helpers(torch_threads()))
      return team->lead([&] { team->run(n, grain, body, context); });
  const int64_t called = nanoseconds();
  std::atomic<bool> late{false};
  torch::stable::parallel_for(0, n, grain, [&](int64_t begin, int64_t end) {
    if (nanoseconds() - called >= Helpers::kLate) late.store(true, std::memory_order_relaxed);
    body(begin, end, context);
  });
  if (late.load(std::memory_order_relaxed)) helpers.late();
}

void with_team(void (*f)(const void* context), const void* context) {
  const int64_t threads = torch_threads();
  if (threads < 2 || threads > Team::kMaxThreads || Team::current() || Team::in_chunk())
    return f(context);
  Helpers& helpers = Helpers::mine();
  if (helpers.wanted())
    if (Team* const team = team_of_helpers(threads)) return team->lead([&] { f(context); });
  Team team(threads);
  // torch would pass on the text of an exception, but not its type.
  std::exception_ptr error;
  int64_t waited = -nanoseconds();
  torch::stable::parallel_for(0, threads, 1, [&](int64_t index, int64_t) {
    if (index > 0) return team.help(index);
    waited += nanoseconds();
    try {
      team.lead([&] { f(context); });
    } catch (...) {
      error = std::current_exception();
    }
    team.end();
    waited -= nanoseconds();
  });
  waited += nanoseconds();
  if (waited >= Helpers::kLate) helpers.late();
  if (error) std::rethrow_exception(error);
}

const char* dtype_name(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Float:
      return "float32";
    case ScalarType::Double:
      return "float64";
    case ScalarType::Half:
      return "float16";
    case ScalarType::BFloat16:
      return "bfloat16";
    case ScalarType::Byte:
      return "uint8";
    case ScalarType::Char:
      return "int8";
    case ScalarType::Short:
      return "int16";
    case ScalarType::Int:
      return "int32";
    case ScalarType::Long:
      return "int64";
    case ScalarType::Bool:
      return "bool";
    case ScalarType::Float8_e5m2:
      return "float8_e5m2";
    case ScalarType::Float8_e4m3fn:
      return "float8_e4m3fn";
    case ScalarType::Float8_e8m0fnu:
      return "float8_e8m0fnu";
    case ScalarType::ComplexFloat:
      return "complex64";
    case ScalarType::ComplexDouble:
      return "complex128";
    default:
      return "another dtype";
  }
}

std::string shape_text(const Tensor& tensor) { return list_text(tensor.sizes()); }

void check_tensor(const char* op, const char* name, const Tensor& x, int64_t min_dim) {
  IPEX_CHECK(is_kernel_dtype(x.scalar_type()), op, ": ", name,
             " must have dtype float32, bfloat16, float16, got ", dtype_name(x.scalar_type()));
  IPEX_CHECK(x.dim() >= min_dim, op, ": ", name, " must have at least ", min_dim,
             " dimension(s), got ", x.dim(), "-D");
}

void check_like(const char* op, const char* name, const Tensor& value, const Tensor& x,
                const char* of) {
  IPEX_CHECK(value.is_cpu(), op, ": ", name, " must be on the device of ", of, " = cpu");
  IPEX_CHECK(value.scalar_type() == x.scalar_type(), op, ": ", name, " must have the dtype of ", of,
             " = ", dtype_name(x.scalar_type()), ", got ", dtype_name(value.scalar_type()));
  bool same = value.dim() == x.dim();
  for (int64_t i = 0; same && i < x.dim(); ++i) same = value.size(i) == x.size(i);
  IPEX_CHECK(same, op, ": ", name, " must have the shape of ", of, " = ", shape_text(x), ", got ",
             shape_text(value));
}

void check_score_scale(const char* op, const char* name, double scale) {
  IPEX_CHECK(scale >= 0.0 && scale <= std::numeric_limits<double>::max(), op, ": ", name,
             " must be a finite number, 0 or more, got ", scale);
}

void check_vector(const char* op, const char* name, const OptionalTensor& value, const Tensor& x) {
  if (!value) return;
  IPEX_CHECK(value->is_cpu(), op, ": ", name, " must be on the device of x = cpu");
  const ScalarType dtype = value->scalar_type();
  IPEX_CHECK(dtype == x.scalar_type() || dtype == ScalarType::Float, op, ": ", name,
             " must have the dtype of x = ", dtype_name(x.scalar_type()), " or float32, got ",
             dtype_name(dtype));
  const int64_t size = x.size(x.dim() - 1);
  IPEX_CHECK(value->dim() == 1 && value->size(0) == size, op, ": ", name,
             " must be 1-D of size x.shape[-1] = ", size, ", got ", shape_text(*value));
}

namespace {

size_t item_size(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Float:
    case ScalarType::Int:
      return 4;
    case ScalarType::BFloat16:
    case ScalarType::Half:
      return 2;
    case ScalarType::Double:
    case ScalarType::Long:
      return 8;
    case ScalarType::Byte:
    case ScalarType::Char:
    case ScalarType::Bool:
      return 1;
    default:
      return 0;
  }
}

// Bytes from the first to the last element, 0 if they are not worth a block.
size_t dense_bytes(const int64_t* sizes, const int64_t* strides, int64_t dim, ScalarType dtype) {
  int64_t last = 0;
  for (int64_t i = 0; i < dim; ++i) {
    if (sizes[i] == 0) return 0;
    last += (sizes[i] - 1) * strides[i];
  }
  return static_cast<size_t>(last + 1) * item_size(dtype);
}

torch::stable::Device cpu_device() {
  return torch::stable::Device(torch::headeronly::DeviceType::CPU);
}

}  // namespace

Tensor new_tensor(const int64_t* sizes, const int64_t* strides, int64_t dim, ScalarType dtype) {
  if (TensorPool* pool = TensorPool::current()) {
    OptionalTensor recycled;
    if (pool->take(sizes, strides, dim, dtype, recycled)) return *std::move(recycled);
    const size_t bytes = dense_bytes(sizes, strides, dim, dtype);
    if (bytes >= blocks::kLeast) {
      if (void* const data = blocks::take(bytes))
        return torch::stable::from_blob(data, {sizes, static_cast<size_t>(dim)},
                                        {strides, static_cast<size_t>(dim)}, cpu_device(), dtype,
                                        &blocks::give);
    }
  }
  AtenTensorHandle handle;
  const auto shim_dtype = torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype));
  IPEX_SHIM_CALL(aoti_torch_empty_strided(dim, sizes, strides, shim_dtype,
                                          aoti_torch_device_type_cpu(), 0, &handle));
  return Tensor(handle);
}

Tensor new_contiguous(const int64_t* sizes, int64_t dim, ScalarType dtype) {
  constexpr int64_t kMaxDim = 64;
  IPEX_CHECK(dim <= kMaxDim, "tensors of more than ", kMaxDim, " dimensions are not supported");
  int64_t strides[kMaxDim];
  int64_t stride = 1;
  for (int64_t i = dim - 1; i >= 0; --i) {
    strides[i] = stride;
    // As torch does: a dimension of size 0 counts as 1, so strides stay positive.
    stride *= sizes[i] > 0 ? sizes[i] : 1;
  }
  return new_tensor(sizes, strides, dim, dtype);
}

Tensor new_contiguous_like(const Tensor& x) {
  return new_contiguous(x.sizes().data(), x.dim(), x.scalar_type());
}

Rows as_rows(const Tensor& x) {
  Rows view{x};  // an empty tensor would be an allocation
  const int64_t dim = x.dim();
  if (dim == 0) {
    return {x, x.const_data_ptr(), 1, 1, 1};
  }
  view.columns = x.size(dim - 1);
  view.rows = 1;
  for (int64_t i = 0; i + 1 < dim; ++i) view.rows *= x.size(i);
  bool equal = x.stride(dim - 1) == 1 || view.columns <= 1;
  view.stride = view.columns;
  int64_t next = -1;  // stride that the next outer dimension must have
  for (int64_t i = dim - 2; equal && i >= 0; --i) {
    if (x.size(i) == 1) continue;
    if (next < 0) {
      view.stride = x.stride(i);
      next = view.stride;
    } else {
      equal = x.stride(i) == next;
    }
    next *= x.size(i);
  }
  if (!equal && !x.is_contiguous()) {
    view.tensor = as_contiguous(x);
    view.stride = view.columns;
  }
  view.data = view.tensor.const_data_ptr();
  return view;
}

}  // namespace ipex
