// SPDX-License-Identifier: Apache-2.0
#include "all_reduce.h"

#include <array>
#include <cmath>
#include <numeric>
#include <vector>

#include "ipex/glue/in_place.h"
#include "ipex/glue/op_loops.h"
#include "shared_buffer.h"

namespace ipex {
namespace {

const auto kernels = IPEX_KERNELS("all_reduce_", sum_sources);
const KernelBase gather_in_glue("all_gather_columns");

constexpr int64_t kSumGrain = 16 * 1024;

void check_group(const char* op, const OptionalTensor& memory, int64_t rank, double timeout,
                 const std::string& group) {
  if (memory.has_value()) {
    IPEX_CHECK(memory->is_cpu(), op, ": memory must be on the device of x = cpu");
    IPEX_CHECK(memory->scalar_type() == ScalarType::Byte, op,
               ": memory must have dtype uint8, got ", dtype_name(memory->scalar_type()));
    IPEX_CHECK(memory->dim() == 1 && memory->is_contiguous(), op,
               ": memory must be 1-D and contiguous, got ", shape_text(*memory),
               memory->is_contiguous() ? "" : " that is not contiguous");
  } else {
    IPEX_CHECK(!group.empty(), op, ": memory must be given where group is empty, got None");
  }
  IPEX_CHECK(rank >= 0, op, ": rank must be >= 0, got ", rank);
  IPEX_CHECK(timeout > 0, op, ": timeout must be positive, got ", timeout);
}

// The float32 sum of x over a group of torch.distributed. Only core can name a group.
Tensor sum_over_backend(const Tensor& x, const std::string& group) {
  std::array<StableIValue, 2> stack{torch::stable::detail::from(x),
                                    torch::stable::detail::from(group)};
  IPEX_SHIM_CALL(
      torch_call_dispatcher("ipex::_sum_over_backend", "", stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

void all_reduce_(const Tensor& x, const OptionalTensor& memory, int64_t rank, double timeout,
                 const std::string& group) {
  const char* op = "all_reduce_";
  check_tensor(op, "x", x, 0);
  check_not_expanded(op, "x", x);
  check_group(op, memory, rank, timeout, group);
  Tensor target = x;
  if (!memory.has_value()) {
    torch::stable::copy_(target, sum_over_backend(x, group));
    return;
  }
  SharedBuffer buffer(op, *memory, rank, timeout);
  const Tensor flat = as_contiguous(x);
  const int64_t size = x.numel(), note = note_of(size, x.scalar_type(), 0);
  kernels.visit(x.scalar_type(), [&]<class T>(auto* kernel) {
    T* data = static_cast<T*>(flat.mutable_data_ptr());
    const int64_t step = buffer.slot_bytes() / static_cast<int64_t>(sizeof(T));
    for (int64_t from = 0; from == 0 || from < size; from += step) {
      const int64_t n = std::min(step, size - from);
      buffer.exchange(reinterpret_cast<const char*>(data + from),
                      n * static_cast<int64_t>(sizeof(T)), note);
      parallel_for(n, kSumGrain, [&](int64_t begin, int64_t end) {
        const T* sources[SharedBuffer::kMostRanks];
        const int64_t ranks = buffer.ranks();
        for (int64_t r = 0; r < ranks; ++r)
          sources[r] = reinterpret_cast<const T*>(buffer.slot(r)) + begin;
        kernel(sources, ranks, data + from + begin, end - begin);
      });
    }
  });
  if (!x.is_contiguous()) torch::stable::copy_(target, flat);
}

Tensor all_gather_columns(const Tensor& x, const std::vector<int64_t>& sizes,
                          const OptionalTensor& memory, int64_t rank, double timeout,
                          const std::string& group) {
  const char* op = "all_gather_columns";
  check_tensor(op, "x", x);
  check_group(op, memory, rank, timeout, group);
  const int64_t count = static_cast<int64_t>(sizes.size());
  bool fine = rank < count;
  for (int64_t size : sizes) fine = fine && size >= 0 && size <= INT32_MAX;
  IPEX_CHECK(fine, op, ": sizes must have an entry in [0, 2^31) for each rank, got ",
             list_text(sizes));
  const int64_t mine = sizes[static_cast<size_t>(rank)], dim = x.dim();
  IPEX_CHECK(x.size(dim - 1) == mine, op, ": x must have sizes[rank] = ", mine, " columns, got ",
             x.size(dim - 1));
  int64_t rows = 1;
  std::vector<int64_t> shape(static_cast<size_t>(dim));
  for (int64_t i = 0; i + 1 < dim; ++i) rows *= (shape[static_cast<size_t>(i)] = x.size(i));
  const int64_t total = std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
  shape.back() = total;
  Tensor y = new_contiguous(shape.data(), dim, x.scalar_type());
  char* to = static_cast<char*>(y.mutable_data_ptr());
  const int64_t width = x.scalar_type() == ScalarType::Float ? 4 : 2;
  if (!memory.has_value()) {
    // Backends gather parts of one size only: the sum of what is padded with zeros is the same.
    torch::stable::zero_(y);
    int64_t before = 0;
    for (int64_t r = 0; r < rank; ++r) before += sizes[static_cast<size_t>(r)];
    Tensor part = torch::stable::narrow(y, dim - 1, before, mine);
    torch::stable::copy_(part, x);
    torch::stable::copy_(y, sum_over_backend(y, group));
    return y;
  }
  SharedBuffer buffer(op, *memory, rank, timeout);
  IPEX_CHECK(count == buffer.ranks(), op, ": sizes must have one entry per rank = ", buffer.ranks(),
             ", got ", count);
  const Tensor flat = as_contiguous(x);
  const char* data = static_cast<const char*>(flat.const_data_ptr());
  const int64_t note = note_of(rows * total, x.scalar_type(), 1);
  const int64_t longest = rows * *std::max_element(sizes.begin(), sizes.end());
  const int64_t step = buffer.slot_bytes() / width;
  for (int64_t from = 0; from == 0 || from < longest; from += step) {
    const int64_t n = std::max(int64_t{0}, std::min(step, rows * mine - from));
    buffer.exchange(data + from * width, n * width, note);
    int64_t column = 0;
    for (int64_t r = 0; r < count; ++r) {
      const int64_t size = sizes[static_cast<size_t>(r)];
      const int64_t end = std::min(from + step, rows * size);
      // Elements [from, end) of the rank's rows, which may begin and end amid one.
      for (int64_t i = from; i < end;) {
        const int64_t row = i / size, inside = i % size;
        const int64_t length = std::min(size - inside, end - i);
        std::memcpy(to + (row * total + column + inside) * width,
                    buffer.slot(r) + (i - from) * width, static_cast<size_t>(length * width));
        i += length;
      }
      column += size;
    }
  }
  return y;
}

}  // namespace
}  // namespace ipex

STABLE_TORCH_LIBRARY_IMPL(ipex, CPU, m) {
  IPEX_IMPL(m, "all_reduce_", ipex::all_reduce_);
  IPEX_IMPL(m, "all_gather_columns", ipex::all_gather_columns);
}
