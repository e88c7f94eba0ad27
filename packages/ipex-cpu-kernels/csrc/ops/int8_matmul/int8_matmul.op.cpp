// SPDX-License-Identifier: Apache-2.0
#include "int8_matmul/int8_matmul.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <vector>

#include "ipex/glue/dispatch.h"
#include "ipex/glue/gemm_schedule.h"
#include "runtime/scratch.h"

namespace ipex {
namespace {

constexpr const char* kOp = "int8_matmul";
constexpr int64_t kMostDepth = 32768, kMostDims = 16;
constexpr int64_t kRowsMost = 1024;       // of a task
constexpr int64_t kRowBytes = 512 << 10;  // their codes stay in L2

const auto kernels = IPEX_KERNELS("int8_matmul", int8_matmul);

void check_scale(const char* name, const char* zero_name, double scale, int64_t zero) {
  const auto narrow = static_cast<float>(scale);
  IPEX_CHECK(narrow >= 0x1p-120f && std::isfinite(narrow), kOp, ": ", name,
             " must be finite and at least 2^-120, got ", scale);
  IPEX_CHECK(zero >= 0 && zero <= 255, kOp, ": ", zero_name, " must be in [0, 255], got ", zero);
}

// Where the i-th matrix of the result finds its factor; `y` are the result's sizes. Leading
// dimensions may have any strides, and missing dimensions or dimensions of size 1 serve all.
int64_t offset_of(const Tensor& x, const std::vector<int64_t>& y, int64_t i) {
  int64_t offset = 0;
  const int64_t less = static_cast<int64_t>(y.size()) - x.dim();
  for (int64_t d = x.dim() - 3; d >= 0; --d) {
    const int64_t size = y[static_cast<size_t>(d + less)];
    if (x.size(d) > 1) offset += i % size * x.stride(d);
    i /= size;
  }
  return offset;
}

Tensor int8_matmul(const Tensor& a0, const Tensor& b0, double a_scale, int64_t a_zero,
                   double b_scale, int64_t b_zero) {
  check_tensor(kOp, "a", a0, 2);
  const ScalarType dtype = a0.scalar_type();
  IPEX_CHECK(b0.is_cpu(), kOp, ": b must be on the device of a = cpu");
  IPEX_CHECK(b0.scalar_type() == dtype, kOp, ": b must have the dtype of a = ", dtype_name(dtype),
             ", got ", dtype_name(b0.scalar_type()));
  const int64_t a_dim = a0.dim(), b_dim = b0.dim(), dim = std::max(a_dim, b_dim);
  const int64_t m = a0.size(a_dim - 2), k = a0.size(a_dim - 1);
  std::vector<int64_t> sizes(static_cast<size_t>(dim), m);
  bool fits = b_dim >= 2 && b0.size(b_dim - 2) == k;
  for (int64_t i = 3; fits && i <= dim; ++i) {
    const int64_t x = i <= a_dim ? a0.size(a_dim - i) : 1;
    const int64_t y = i <= b_dim ? b0.size(b_dim - i) : 1;
    fits = x == y || x == 1 || y == 1;
    sizes[static_cast<size_t>(dim - i)] = x == 1 ? y : x;
  }
  IPEX_CHECK(fits, kOp,
             ": b must have a.shape[-1] rows and leading sizes that broadcast with a of shape ",
             shape_text(a0), ", got ", shape_text(b0));
  IPEX_CHECK(dim <= kMostDims, kOp, ": a must have at most ", kMostDims, " dimensions, got ",
             a_dim);
  IPEX_CHECK(k <= kMostDepth, kOp, ": a must have at most ", kMostDepth, " columns, got ", k);
  check_scale("a_scale", "a_zero", a_scale, a_zero);
  check_scale("b_scale", "b_zero", b_scale, b_zero);

  const int64_t n = sizes.back() = b0.size(b_dim - 1);
  Tensor y = new_contiguous(sizes.data(), dim, dtype);
  if (y.numel() == 0) return y;
  if (k == 0) {  // kernels write sums of at least one product
    std::memset(y.mutable_data_ptr(), 0,
                static_cast<size_t>(y.numel() * (dtype == ScalarType::Float ? 4 : 2)));
    return y;
  }
  const int64_t batch = y.numel() / (m * n);
  const Tensor a = a0.stride(a_dim - 1) == 1 || k == 1 ? a0 : as_contiguous(a0);
  const bool by_column = b0.stride(b_dim - 2) == 1 && b0.stride(b_dim - 1) != 1;
  const Tensor b = by_column || b0.stride(b_dim - 1) == 1 || n == 1 ? b0 : as_contiguous(b0);

  // Every task packs b again, so it should have many rows.
  const auto threads = static_cast<int64_t>(torch::stable::get_num_threads());
  const auto parts = [](int64_t count, int64_t size) { return (count + size - 1) / size; };
  int64_t rows = std::min(m, kRowsMost);
  while (rows > 128 &&
         (batch * parts(m, rows) < 2 * threads || rows * int8_matmul_stride(k) > kRowBytes))
    rows = parts(rows, 48) * 24;  // halves, of whole register tiles
  const int64_t down = parts(m, rows), panels = parts(n, 32);
  const int64_t bytes = int8_matmul_scratch(rows, panels, k);
  std::atomic<bool> no_memory{false};
  kernels.visit(dtype, [&]<class T>(auto* kernel) {
    run_tasks(batch * down, batch * m * n * k, false, [&](int64_t t) {
      char* scratch = Scratch<Area::kInt8Matmul>::get(bytes);
      if (!scratch) {
        no_memory = true;
        return;
      }
      const int64_t i = t / down, row = t % down * rows;
      Int8MatmulArgs args{};
      args.a = static_cast<const T*>(a.const_data_ptr()) + offset_of(a, sizes, i);
      args.b = static_cast<const T*>(b.const_data_ptr()) + offset_of(b, sizes, i);
      args.y = static_cast<T*>(y.mutable_data_ptr()) + i * m * n;
      args.a_stride = a.stride(a_dim - 2);
      args.b_stride = b.stride(by_column ? b_dim - 1 : b_dim - 2);
      args.n = n;
      args.k = k;
      args.a_scale = static_cast<float>(a_scale);
      args.b_scale = static_cast<float>(b_scale);
      args.a_zero = static_cast<int32_t>(a_zero);
      args.b_zero = static_cast<int32_t>(b_zero);
      args.by_column = by_column;
      kernel(&args, row, std::min(m, row + rows), scratch);
    });
  });
  IPEX_CHECK(!no_memory, kOp, ": not enough memory for a part of b");
  return y;
}

}  // namespace
}  // namespace ipex

STABLE_TORCH_LIBRARY_IMPL(ipex, CPU, m) { IPEX_IMPL(m, "int8_matmul", ipex::int8_matmul); }
