// SPDX-License-Identifier: Apache-2.0
// It uses the kernels of linear; the work here is to cut groups of unequal size into tasks.
#include <algorithm>
#include <vector>

#include "ipex/glue/dispatch.h"
#include "ipex/glue/gemm_schedule.h"
#include "ipex/kernel/gemm_sizes.h"
#include "linear/epilogue_check.h"
#include "linear/linear.h"
#include "linear/packed_check.h"
#include "runtime/scratch.h"

namespace ipex {
namespace {

const auto kernels = IPEX_KERNELS("grouped_linear", linear);
constexpr const char* kOp = "grouped_linear";

// The rows of each group are [offsets[g], offsets[g + 1]).
std::vector<int64_t> check_offsets(const Tensor& offsets, int64_t rows) {
  const ScalarType dtype = offsets.scalar_type();
  IPEX_CHECK(offsets.is_cpu(), kOp, ": offsets must be on the device of x = cpu");
  IPEX_CHECK(dtype == ScalarType::Int || dtype == ScalarType::Long, kOp,
             ": offsets must have dtype int32, int64, got ", dtype_name(dtype));
  IPEX_CHECK(offsets.dim() == 1 && offsets.size(0) > 0, kOp,
             ": offsets must be 1-D and not empty, got ", shape_text(offsets));
  const Tensor plain = as_contiguous(offsets);
  std::vector<int64_t> values(static_cast<size_t>(offsets.size(0)));
  for (size_t i = 0; i < values.size(); ++i)
    values[i] = dtype == ScalarType::Int ? static_cast<const int32_t*>(plain.const_data_ptr())[i]
                                         : static_cast<const int64_t*>(plain.const_data_ptr())[i];
  IPEX_CHECK(values[0] == 0, kOp, ": offsets must start with 0, got ", values[0]);
  for (size_t i = 1; i < values.size(); ++i)
    IPEX_CHECK(values[i - 1] <= values[i], kOp, ": offsets must not decrease, got ", values[i],
               " after ", values[i - 1]);
  IPEX_CHECK(values.back() == rows, kOp, ": offsets must end with x.shape[0] = ", rows, ", got ",
             values.back());
  return values;
}

struct Bias {
  Tensor tensor;
  const char* data = nullptr;
  int64_t bytes = 0;  // of a group
  bool is_f32 = false;
};

Bias check_bias(const OptionalTensor& bias, const Tensor& x, int64_t groups, int64_t n) {
  if (!bias) return {};
  const ScalarType dtype = bias->scalar_type();
  IPEX_CHECK(bias->is_cpu(), kOp, ": bias must be on the device of x = cpu");
  IPEX_CHECK(dtype == x.scalar_type() || dtype == ScalarType::Float, kOp,
             ": bias must have the dtype of x = ", dtype_name(x.scalar_type()), " or float32, got ",
             dtype_name(dtype));
  IPEX_CHECK(bias->dim() == 2 && bias->size(0) == groups && bias->size(1) == n, kOp,
             ": bias must have shape [", groups, ", ", n, "], got ", shape_text(*bias));
  Bias result{as_contiguous(*bias)};
  result.data = static_cast<const char*>(result.tensor.const_data_ptr());
  result.is_f32 = dtype == ScalarType::Float;
  result.bytes = n * (result.is_f32 ? 4 : 2);
  return result;
}

// The tasks of all groups, numbered through: groups one after the other, in each blocks of rows,
// in each chunks of panels.
struct Tasks {
  std::vector<int64_t> offsets, first;  // first task of each group, and their number
  int64_t panels, chunk;

  static constexpr int64_t kRows = 192;
  static_assert(kRows <= kTileRowsMost);

  Tasks(std::vector<int64_t> group_offsets, const GemmShape& shape)
      : offsets(std::move(group_offsets)), first(offsets.size()), panels(shape.panels) {
    const auto threads = static_cast<int64_t>(torch::stable::get_num_threads());
    int64_t blocks = 0;
    for (size_t g = 0; g + 1 < offsets.size(); ++g) {
      first[g] = blocks;
      blocks += (offsets[g + 1] - offsets[g] + kRows - 1) / kRows;
    }
    first.back() = blocks;
    // Panels in pairs, some tasks for each thread, and blocks of x that are worth their packing.
    const int64_t most = std::max<int64_t>(2, blocks * panels / (8 * threads) / 2 * 2);
    chunk = std::clamp<int64_t>(most, shape.tiles ? 8 : 2, kTilePanelsMost);
    for (int64_t& task : first) task *= across();
  }

  int64_t across() const { return (panels + chunk - 1) / chunk; }
  int64_t count() const { return first.back(); }
  size_t group_of(int64_t task) const {
    return static_cast<size_t>(std::upper_bound(first.begin(), first.end(), task) - first.begin()) -
           1;
  }
};

Tensor grouped_linear(const Tensor& x, const Tensor& offsets, const Tensor& packed_weight,
                      int64_t out_features, const OptionalTensor& bias,
                      const OptionalTensor& residual, std::string activation,
                      const OptionalTensor& mul, const OptionalTensor& residual2,
                      std::string gate) {
  check_tensor(kOp, "x", x);
  IPEX_CHECK(x.dim() == 2, kOp, ": x must be 2-D, got ", shape_text(x));
  IPEX_CHECK(out_features > 0, kOp, ": out_features must be positive, got ", out_features);
  const ScalarType dtype = x.scalar_type();
  const int64_t k = x.size(1);
  const OptionalTensor none;
  CheckedEpilogue epilogue(kOp, {none, mul, residual, residual2, activation, gate});
  const int64_t n = epilogue.weight_rows(out_features);
  std::vector<int64_t> starts = check_offsets(offsets, x.size(0));
  const auto groups = static_cast<int64_t>(starts.size()) - 1;
  check_packed_rows(kOp, "packed_weight", packed_weight, groups, n, k, dtype);
  const Bias biases = check_bias(bias, x, groups, n);
  epilogue.check(x, out_features);

  Tensor y = new_like(x, out_features);
  const Rows rows = as_rows(x);
  GemmShape shape{rows.rows, (n + kPackedPanel - 1) / kPackedPanel, k, epilogue.args.gated ? 2 : 1,
                  uses_tiles(dtype)};
  const Tasks tasks(std::move(starts), shape);
  const char* weights = static_cast<const char*>(packed_weight.const_data_ptr());
  const int64_t weight_bytes = packed_bytes(n, k, format_of(dtype));
  // Groups with few rows are bound by the memory that the weights come from.
  const bool limited = shape.tiles && rows.rows >= kComputeBound * groups;
  kernels.visit(dtype, [&]<class T>(auto* kernel) {
    const int64_t scratch_from = shape.tiles ? kManyRows : widened_from<T>();
    const auto* operands = &epilogue.args;
    const auto shifted = [](const void* p, int64_t elements) -> const void* {
      return p ? static_cast<const T*>(p) + elements : nullptr;
    };
    run_tasks(tasks.count(), rows.rows * k * n, limited, [&](int64_t t) {
      const size_t g = tasks.group_of(t);
      const int64_t start = tasks.offsets[g], m = tasks.offsets[g + 1] - start;
      LinearArgs args{};
      args.x = static_cast<const T*>(rows.data) + start * rows.stride;
      args.x_stride = rows.stride;
      args.weight = weights + static_cast<int64_t>(g) * weight_bytes + sizeof(PackedHeader);
      args.y = static_cast<T*>(y.mutable_data_ptr()) + start * out_features;
      args.n = args.y_stride = out_features;
      args.k = k;
      args.epilogue = *operands;
      args.epilogue.mul = shifted(operands->mul, start * operands->mul_stride);
      args.epilogue.add = shifted(operands->add, start * operands->add_stride);
      args.epilogue.add2 = shifted(operands->add2, start * operands->add2_stride);
      args.epilogue.bias =
          biases.data ? biases.data + static_cast<int64_t>(g) * biases.bytes : nullptr;
      args.epilogue.bias_is_f32 = biases.is_f32;
      const int64_t task = t - tasks.first[g];
      const int64_t row = task / tasks.across() * Tasks::kRows;
      const int64_t panel = task % tasks.across() * tasks.chunk;
      kernel(&args, row, std::min(m, row + Tasks::kRows), panel,
             std::min(tasks.panels, panel + tasks.chunk), gemm_scratch(m >= scratch_from));
    });
  });
  return y;
}

}  // namespace
}  // namespace ipex

STABLE_TORCH_LIBRARY_IMPL(ipex, CPU, m) { IPEX_IMPL(m, "grouped_linear", ipex::grouped_linear); }
