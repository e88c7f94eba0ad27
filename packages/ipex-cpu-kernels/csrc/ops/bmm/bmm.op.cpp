// SPDX-License-Identifier: Apache-2.0
// It uses the kernels of linear; here each second factor is packed just before it is used. With
// few rows it is not packed at all.
#include <algorithm>
#include <atomic>
#include <string>

#include "bmm/few_rows.h"
#include "ipex/glue/dispatch.h"
#include "linear/pack_panel.h"
#include "linear/packed_check.h"
#include "linear/run_linear.h"

namespace ipex {
namespace {

const auto kernels = IPEX_KERNELS("bmm", linear);
const auto few_rows = IPEX_KERNELS("bmm", bmm_few_rows);
constexpr int64_t kFewRows = 4;
constexpr const char* kOp = "bmm";
// Bytes up to which all of a second factor is packed at once: what such a block keeps.
constexpr int64_t kPackedAtOnce = int64_t{16} << 20;
// Rows from which b is packed as a whole. With fewer it is better to have a part of it in L2 and
// use it there.
constexpr int64_t kOneRows = 1024;
// Rows that are transposed at a time: a cache line of 16-bit numbers.
constexpr int64_t kTransposedRows = 32;

void check_batched(const char* name, const Tensor& value, const Tensor& a, int64_t d1, int64_t d2) {
  IPEX_CHECK(value.is_cpu(), kOp, ": ", name, " must be on the device of a = cpu");
  IPEX_CHECK(value.scalar_type() == a.scalar_type(), kOp, ": ", name,
             " must have the dtype of a = ", dtype_name(a.scalar_type()), ", got ",
             dtype_name(value.scalar_type()));
  IPEX_CHECK(value.dim() == 3 && value.size(0) == a.size(0) && value.size(1) == d1 &&
                 (d2 < 0 || value.size(2) == d2),
             kOp, ": ", name, " must have shape [", a.size(0), ", ", d1, ", ",
             d2 < 0 ? "N" : std::to_string(d2), "], got ", shape_text(value));
}

// A batch of matrices whose columns lie side by side.
Tensor with_rows(const Tensor& x) { return x.stride(2) == 1 ? x : as_contiguous(x); }

// How a batch of products is cut: each task packs some panels and multiplies them with some rows.
struct Plan {
  int64_t rows, panels;  // of a task
  int64_t down, across;  // tasks in a product

  Plan(int64_t batch, int64_t m, int64_t all_panels)
      : rows(m), panels(std::min<int64_t>(all_panels, 8)) {
    const auto threads = static_cast<int64_t>(torch::stable::get_num_threads());
    const auto parts = [](int64_t n, int64_t size) { return (n + size - 1) / size; };
    const auto tasks = [&] { return batch * parts(m, rows) * parts(all_panels, panels); };
    while (tasks() < 4 * threads && panels > 2) panels = (panels / 2 + 1) / 2 * 2;
    // Every block of rows packs the panels again, so it must have many.
    while (tasks() < 4 * threads && rows > 256) rows = parts(rows, 64) * 32;
    down = parts(m, rows);
    across = parts(all_panels, panels);
  }
};

// y = alpha * (a b) + add, with b where it lies: by rows, or by columns. `add` may be null.
void multiply_few_rows(const Tensor& a, const Tensor& b, bool by_column, const Tensor* add,
                       double alpha, Tensor& y) {
  const int64_t batch = y.size(0), m = y.size(1), n = y.size(2), k = a.size(2);
  // Pieces of whole cache lines, and wide ones: they are read row after row. Where the columns are
  // cut does not change the sums.
  const int64_t tasks = 4 * static_cast<int64_t>(torch::stable::get_num_threads());
  const auto across = [&](int64_t piece) { return (n + piece - 1) / piece; };
  int64_t piece = kFewRowsColumns;
  while (piece > 128 && batch * across(piece) < tasks) piece /= 2;
  const int64_t pieces = across(piece);
  few_rows.visit(y.scalar_type(), [&]<class T>(auto* kernel) {
    const auto at = [](const Tensor& x, int64_t i) {
      return static_cast<const T*>(x.const_data_ptr()) + i * x.stride(0);
    };
    T* const result = static_cast<T*>(y.mutable_data_ptr());
    run_tasks(batch * pieces, batch * m * n * k, false, [&](int64_t t) {
      const int64_t i = t / pieces, column = t % pieces * piece;
      FewRowsArgs args{};
      args.a = at(a, i);
      args.b = at(b, i);
      args.y = result + i * m * n;
      args.a_stride = a.stride(1);
      args.b_stride = b.stride(by_column ? 2 : 1);
      args.y_stride = n;
      args.m = m;
      args.k = k;
      args.alpha = static_cast<float>(alpha);
      args.by_column = by_column;
      if (add) {
        args.add = at(*add, i);
        args.add_stride = add->stride(1);
      }
      kernel(&args, column, std::min(n, column + piece));
    });
  });
}

// Rows [first, last) of a matrix whose columns lie side by side, row by row; null without memory.
const void* transposed_rows(const Tensor& a, int64_t first, int64_t last) {
  const int64_t k = a.size(2), size = static_cast<int64_t>(a.element_size());
  char* to = Scratch<Area::kBmmRows>::get((last - first) * k * size);
  if (!to) return nullptr;
  const char* from = static_cast<const char*>(a.const_data_ptr());
  const int64_t stride = a.stride(2) * size;
  const auto transpose = [&]<class W>(W* out, int64_t row, int64_t end) {
    pack_detail::pack_columns(from + row * size, stride, k, end - row, out + (row - first) * k, k);
  };
  const int64_t tasks = (last - first + kTransposedRows - 1) / kTransposedRows;
  parallel_for(tasks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = first + i * kTransposedRows, stop = std::min(last, row + kTransposedRows);
      if (size == 4)
        transpose(reinterpret_cast<uint32_t*>(to), row, stop);
      else
        transpose(reinterpret_cast<uint16_t*>(to), row, stop);
    }
  });
  return to;
}

bool by_columns(const Tensor& a) { return a.stride(1) == 1 && a.stride(2) != 1; }

// A single product: b is packed as a whole, as the weight of a linear layer would be, and then
// multiplied as one; a may lie by columns. Returns false where that would need too much memory.
bool multiply_one(const Tensor& a0, const Tensor& b, const Tensor* add, double alpha, Tensor& y) {
  const int64_t m = a0.size(1), k = a0.size(2), n = b.size(2);
  const ScalarType dtype = a0.scalar_type();
  const auto size = static_cast<int64_t>(a0.element_size());
  const uint32_t format = format_of(dtype);
  const int64_t inner = packed_inner(format), panels = (n + kPackedPanel - 1) / kPackedPanel;
  const int64_t panel_bytes = (k + inner - 1) / inner * inner * kPackedPanel * size;
  if (panels * panel_bytes > kPackedAtOnce) return false;
  char* packed = Scratch<Area::kBmmPanels>::get(panels * panel_bytes);
  if (!packed) return false;
  const MatrixView view{static_cast<const char*>(b.const_data_ptr()), k, n, b.stride(1) * size,
                        b.stride(2) * size};
  parallel_for(panels, 1, [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; ++p) pack_panel(view, format, p, packed + p * panel_bytes);
  });

  const bool transposed = by_columns(a0);
  const Tensor a = transposed ? a0 : with_rows(a0);
  const int64_t fit = kPackedAtOnce / std::max<int64_t>(1, k * size) / kTransposedRows;
  const int64_t step = transposed ? std::max<int64_t>(1, fit) * kTransposedRows : m;
  const auto at = [size](const Tensor& x, int64_t row) {
    return static_cast<const char*>(x.const_data_ptr()) + row * x.stride(1) * size;
  };
  LinearArgs args{};
  args.x_stride = transposed ? k : a.stride(1);
  args.weight = packed;
  args.n = args.y_stride = n;
  args.k = k;
  args.epilogue.alpha = static_cast<float>(alpha);
  if (add) args.epilogue.add_stride = add->stride(1);
  for (int64_t row = 0; row < m; row += step) {
    const int64_t end = std::min(m, row + step);
    args.x = transposed ? transposed_rows(a, row, end) : at(a, row);
    if (!args.x) return false;
    args.y = static_cast<char*>(y.mutable_data_ptr()) + row * n * size;
    if (add) args.epilogue.add = at(*add, row);
    run_linear(kernels, dtype, args, GemmShape{end - row, panels, k, 1, uses_tiles(dtype)});
  }
  return true;
}

// Products of many rows: each task packs some panels of b, unless they are packed, and multiplies
// them with some rows of a.
void multiply_blocks(const Tensor& a, const Tensor& b, bool packed, const Tensor* add, double alpha,
                     Tensor& y) {
  const int64_t batch = a.size(0), m = a.size(1), k = a.size(2), n = y.size(2);
  const ScalarType dtype = a.scalar_type();
  const uint32_t format = format_of(dtype);
  const int64_t inner = packed_inner(format);
  const bool tiles = uses_tiles(dtype) && m >= kManyRows;
  const int64_t all_panels = (n + kPackedPanel - 1) / kPackedPanel;
  const Plan plan(batch, m, all_panels);
  std::atomic<bool> no_memory{false};
  kernels.visit(dtype, [&]<class T>(auto* kernel) {
    constexpr auto kSize = static_cast<int64_t>(sizeof(T));
    const bool scratch = tiles || m >= widened_from<T>();
    const int64_t panel_bytes = (k + inner - 1) / inner * inner * kPackedPanel * kSize;
    const auto at = [](const Tensor& x, int64_t i) {
      return static_cast<const T*>(x.const_data_ptr()) + i * x.stride(0);
    };
    // The panels of product i from `first` on; null without memory.
    const auto panels_of = [&](int64_t i, int64_t first, int64_t count) -> const char* {
      const int64_t item = packed ? 1 : kSize;
      const char* const from =
          static_cast<const char*>(b.const_data_ptr()) + i * b.stride(0) * item;
      if (packed) return from + static_cast<int64_t>(sizeof(PackedHeader)) + first * panel_bytes;
      char* const to = Scratch<Area::kBmmPanels>::get(plan.panels * panel_bytes);
      if (!to) return nullptr;
      const MatrixView view{from, k, n, b.stride(1) * kSize, b.stride(2) * kSize};
      for (int64_t p = 0; p < count; ++p) pack_panel(view, format, first + p, to + p * panel_bytes);
      return to;
    };
    const auto task = [&](int64_t t) {
      const int64_t i = t / (plan.down * plan.across);
      const int64_t row = t / plan.across % plan.down * plan.rows;
      const int64_t panel = t % plan.across * plan.panels;
      const int64_t panels = std::min(plan.panels, all_panels - panel);
      const int64_t column = panel * kPackedPanel;
      LinearArgs args{};
      args.weight = panels_of(i, panel, panels);
      if (!args.weight) {
        no_memory = true;
        return;
      }
      args.x = at(a, i);
      args.x_stride = a.stride(1);
      args.y = static_cast<T*>(y.mutable_data_ptr()) + i * m * n + column;
      args.y_stride = n;
      args.n = n - column;
      args.k = k;
      args.epilogue.alpha = static_cast<float>(alpha);
      if (add) {
        args.epilogue.add = at(*add, i) + column;
        args.epilogue.add_stride = add->stride(1);
      }
      // Rows in blocks that stay in L2 beside the panels.
      const int64_t end = std::min(m, row + plan.rows), step = tiles ? kTileRowsMost : 192;
      for (int64_t r = row; r < end; r += step)
        kernel(&args, r, std::min(end, r + step), 0, panels, gemm_scratch(scratch));
    };
    run_tasks(batch * plan.down * plan.across, batch * m * n * k,
              uses_tiles(dtype) && m >= kComputeBound, task);
  });
  IPEX_CHECK(!no_memory, "bmm: not enough memory to pack a part of b");
}

// Returns the columns of the result.
int64_t check_arguments(const Tensor& a, const Tensor& b, const OptionalTensor& add, bool packed,
                        int64_t out_features) {
  check_tensor(kOp, "a", a, 3);
  IPEX_CHECK(a.dim() == 3, kOp, ": a must be 3-D, got ", shape_text(a));
  const int64_t batch = a.size(0), m = a.size(1), k = a.size(2);
  if (packed) {
    IPEX_CHECK(out_features > 0, kOp, ": out_features must be positive where b is packed, got ",
               out_features);
    check_packed_rows(kOp, "b", b, batch, out_features, k, a.scalar_type());
  } else {
    check_batched("b", b, a, k, -1);
    IPEX_CHECK(out_features == 0 || out_features == b.size(2), kOp,
               ": out_features must be b.shape[2] = ", b.size(2), " or 0, got ", out_features);
  }
  const int64_t n = packed ? out_features : b.size(2);
  if (add) check_batched("add", *add, a, m, n);
  return n;
}

Tensor bmm(const Tensor& a0, const Tensor& b0, const OptionalTensor& add0, double alpha,
           int64_t out_features) {
  const bool packed = b0.scalar_type() == ScalarType::Byte;
  const int64_t n = check_arguments(a0, b0, add0, packed, out_features);
  const int64_t batch = a0.size(0), m = a0.size(1);
  const int64_t sizes[3] = {batch, m, n};
  Tensor y = new_contiguous(sizes, 3, a0.scalar_type());
  if (y.numel() == 0) return y;
  // A single column may count as either; only as a column its numbers lie side by side.
  const bool columns = !packed && b0.stride(1) == 1 && (b0.stride(2) != 1 || n == 1);
  const Tensor b = packed || columns ? b0 : with_rows(b0);
  const Tensor add = add0 ? with_rows(*add0) : Tensor();
  const Tensor* const addend = add0 ? &add : nullptr;
  const bool one = !packed && batch == 1 && (m >= kOneRows || (m > kFewRows && by_columns(a0)));
  if (one && multiply_one(a0, b, addend, alpha, y)) return y;
  const Tensor a = with_rows(a0);
  if (!packed && m <= kFewRows)
    multiply_few_rows(a, b, columns, addend, alpha, y);
  else
    multiply_blocks(a, b, packed, addend, alpha, y);
  return y;
}

}  // namespace
}  // namespace ipex

STABLE_TORCH_LIBRARY_IMPL(ipex, CPU, m) { IPEX_IMPL(m, "bmm", ipex::bmm); }
