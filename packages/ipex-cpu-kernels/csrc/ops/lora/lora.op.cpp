// SPDX-License-Identifier: Apache-2.0
#include "lora/lora.h"

#include <algorithm>
#include <atomic>
#include <vector>

#include "ipex/glue/argument_checks.h"
#include "runtime/scratch.h"

namespace ipex {
namespace {

// The handles of one op: its kernel is the one of all ops of its kind.
#define IPEX_LORA_KERNELS(op, kind) const auto op##_kernels = IPEX_KERNELS(#op, lora_##kind)
IPEX_LORA_KERNELS(bgmv_shrink, shrink);
IPEX_LORA_KERNELS(sgmv_shrink, shrink);
IPEX_LORA_KERNELS(bgmv_expand, expand);
IPEX_LORA_KERNELS(sgmv_expand, expand);
IPEX_LORA_KERNELS(bgmv_expand_slice, expand);
IPEX_LORA_KERNELS(sgmv_expand_slice, expand);
#undef IPEX_LORA_KERNELS

// -- checks ---------------------------------------------------------------------------------------

void check_integers(const char* op, const char* name, const Tensor& value) {
  IPEX_CHECK(value.is_cpu(), op, ": ", name, " must be on the device of weights = cpu");
  const ScalarType dtype = value.scalar_type();
  IPEX_CHECK(dtype == ScalarType::Int || dtype == ScalarType::Long, op, ": ", name,
             " must have dtype int32 or int64, got ", dtype_name(dtype));
  IPEX_CHECK(value.dim() == 1, op, ": ", name, " must be 1-D, got ", shape_text(value));
}

void check_operands(const char* op, const Tensor& out, const Tensor& input, const Tensor& weights,
                    const Tensor& indices) {
  check_tensor(op, "weights", weights);
  const int64_t dim = weights.dim();
  IPEX_CHECK(dim == 3 || (dim == 4 && weights.size(1) == 1), op,
             ": weights must have shape [adapters, outputs, inputs] or [adapters, 1, outputs, "
             "inputs], got ",
             shape_text(weights));
  check_kind(op, "input", input, weights, "weights", true);
  const int64_t inputs = weights.size(dim - 1);
  IPEX_CHECK(input.dim() == 2 && input.size(1) == inputs, op, ": input must have shape [rows, ",
             inputs, "], got ", shape_text(input));
  check_kind(op, "out", out, weights, "weights", true);
  IPEX_CHECK(out.dim() == 2 && out.size(0) == input.size(0), op, ": out must have shape [",
             input.size(0), ", outputs], got ", shape_text(out));
  check_writable(op, "out", out);
  check_integers(op, "indices", indices);
}

void check_sequence(const char* op, const char* name, const OptionalTensor& value,
                    const Tensor& indices) {
  if (!value) return;
  check_integers(op, name, *value);
  check_shape(op, name, *value, {indices.size(0)});
}

int64_t outputs_of(const Tensor& weights) { return weights.size(weights.dim() - 2); }

void check_shrink(const char* op, const Tensor& out, const Tensor& weights) {
  IPEX_CHECK(out.size(1) >= outputs_of(weights), op, ": out must have at least the ",
             outputs_of(weights), " columns of weights, got ", shape_text(out));
}

void check_slice(const char* op, const Tensor& out, const Tensor& weights, int64_t offset,
                 int64_t size) {
  const int64_t outputs = outputs_of(weights), columns = out.size(1);
  IPEX_CHECK(size >= 0 && size <= outputs, op, ": slice_size must be in [0, ", outputs,
             "], the rows of each matrix of weights, got ", size);
  IPEX_CHECK(offset >= 0 && offset <= columns - size, op, ": slice_offset must be in [0, ",
             columns - size, "] for ", size, " of ", columns, " columns, got ", offset);
}

// -- which rows have which adapter ----------------------------------------------------------------

std::vector<int64_t> values_of(const Tensor& x) {
  const Tensor whole = as_contiguous(x);
  const int64_t n = whole.numel();
  std::vector<int64_t> values(static_cast<size_t>(n));
  if (whole.scalar_type() == ScalarType::Long)
    std::copy_n(static_cast<const int64_t*>(whole.const_data_ptr()), n, values.begin());
  else
    std::copy_n(static_cast<const int32_t*>(whole.const_data_ptr()), n, values.begin());
  return values;
}

std::vector<int64_t> checked_indices(const char* op, const Tensor& indices, int64_t adapters) {
  std::vector<int64_t> values = values_of(indices);
  for (const int64_t value : values)
    IPEX_CHECK(value >= -1 && value < adapters, op, ": indices must be in [-1, ", adapters,
               "), got ", value);
  return values;
}

// The adapter of each row, -1 for those without.
std::vector<int64_t> adapter_of_rows(const char* op, const Tensor& indices, const Tensor& seq_lens,
                                     const OptionalTensor& seq_starts, int64_t adapters,
                                     int64_t rows) {
  const std::vector<int64_t> numbers = checked_indices(op, indices, adapters);
  const std::vector<int64_t> lengths = values_of(seq_lens);
  std::vector<int64_t> starts;
  if (seq_starts) starts = values_of(*seq_starts);
  std::vector<int64_t> adapter(static_cast<size_t>(rows), -1);
  int64_t end = 0;
  for (size_t i = 0; i < numbers.size(); ++i) {
    IPEX_CHECK(lengths[i] >= 0, op, ": seq_lens must not be negative, got ", lengths[i]);
    const int64_t start = seq_starts ? starts[i] : end;
    IPEX_CHECK(start >= end, op, ": seq_starts must be ascending without overlap, got ", start,
               " after row ", end);
    IPEX_CHECK(start <= rows && lengths[i] <= rows - start, op, ": seq_lens must stay within the ",
               rows, " rows of input, got ", lengths[i], " from row ", start);
    end = start + lengths[i];
    std::fill(adapter.begin() + start, adapter.begin() + end, numbers[i]);
  }
  return adapter;
}

// Rows sorted by adapter, in groups of at most `most` with one adapter.
struct Groups {
  std::vector<int64_t> rows;
  std::vector<LoraGroup> groups;

  Groups(const std::vector<int64_t>& adapter, int64_t most) {
    for (size_t row = 0; row < adapter.size(); ++row)
      if (adapter[row] >= 0) rows.push_back(static_cast<int64_t>(row));
    const auto of = [&](int64_t row) { return adapter[static_cast<size_t>(row)]; };
    std::stable_sort(rows.begin(), rows.end(), [&](int64_t a, int64_t b) { return of(a) < of(b); });
    for (int64_t i = 0; i < static_cast<int64_t>(rows.size()); ++i) {
      const int64_t number = of(rows[static_cast<size_t>(i)]);
      if (groups.empty() || groups.back().adapter != number || groups.back().count == most)
        groups.push_back({number, i, 0});
      ++groups.back().count;
    }
  }
};

// -- running --------------------------------------------------------------------------------------

// Multiplications that are worth a thread: some microseconds.
constexpr int64_t kGrain = 100000;

Tensor rows_contiguous(const Tensor& x) {
  const int64_t last = x.dim() - 1;
  return x.size(last) <= 1 || x.stride(last) == 1 ? x : torch::stable::contiguous(x);
}

// Columns [offset, offset + count) of out. `kernels` decides between shrink and expand.
template <bool kShrink, class K>
void run(const char* op, const K& kernels, const Tensor& out0, const Tensor& input0,
         const Tensor& weights0, const std::vector<int64_t>& adapter, int64_t offset, int64_t count,
         double scale, bool add) {
  const Groups found(adapter, kShrink ? kShrinkRows : kExpandRows);
  if (found.groups.empty() || count == 0) return;
  const Tensor input = rows_contiguous(input0), weights = rows_contiguous(weights0);
  const Tensor out = rows_contiguous(out0);
  LoraArgs args{};
  args.input = input.const_data_ptr();
  args.weights = weights.const_data_ptr();
  args.input_is_f32 = input.scalar_type() == ScalarType::Float;
  args.out_is_f32 = out.scalar_type() == ScalarType::Float;
  args.out = static_cast<char*>(out.mutable_data_ptr()) + offset * (args.out_is_f32 ? 4 : 2);
  args.input_row = input.stride(0);
  args.adapter = weights.stride(0);
  args.weight_row = weights.stride(weights.dim() - 2);
  args.out_row = out.stride(0);
  args.inputs = weights.size(weights.dim() - 1);
  args.outputs = count;
  args.groups = found.groups.data();
  args.rows = found.rows.data();
  args.scale = static_cast<float>(scale);
  args.add = add;

  constexpr int64_t kOutputs = kShrink ? kShrinkOutputs : kExpandOutputs;
  const int64_t tasks =
      static_cast<int64_t>(found.groups.size()) * ((count + kOutputs - 1) / kOutputs);
  const int64_t work = found.groups[0].count * std::min(count, kOutputs) * (args.inputs + 1);
  const int64_t grain = std::max<int64_t>(1, kGrain / work);
  std::atomic<bool> no_memory{false};
  kernels.visit(weights.scalar_type(), [&]<class T>(auto* kernel) {
    parallel_for(tasks, grain, [&](int64_t begin, int64_t end) {
      if constexpr (kShrink) {
        kernel(&args, begin, end);
      } else {
        char* room = Scratch<Area::kLora>::get(lora_expand_scratch_bytes(args.inputs));
        if (room)
          kernel(&args, begin, end, room);
        else
          no_memory = true;
      }
    });
  });
  IPEX_CHECK(!no_memory, op, ": not enough memory for a tile of weights");
  if (out.const_data_ptr() != out0.const_data_ptr()) {
    Tensor target = out0;
    torch::stable::copy_(target, out);
  }
}

void bgmv_shrink(const Tensor& out, const Tensor& input, const Tensor& weights,
                 const Tensor& indices, double scale) {
  constexpr char op[] = "bgmv_shrink";
  check_operands(op, out, input, weights, indices);
  check_shape(op, "indices", indices, {input.size(0)});
  check_shrink(op, out, weights);
  run<true>(op, bgmv_shrink_kernels, out, input, weights,
            checked_indices(op, indices, weights.size(0)), 0, outputs_of(weights), scale, false);
}

void bgmv_expand(const Tensor& out, const Tensor& input, const Tensor& weights,
                 const Tensor& indices, bool add) {
  constexpr char op[] = "bgmv_expand";
  check_operands(op, out, input, weights, indices);
  check_shape(op, "indices", indices, {input.size(0)});
  run<false>(op, bgmv_expand_kernels, out, input, weights,
             checked_indices(op, indices, weights.size(0)), 0,
             std::min(out.size(1), outputs_of(weights)), 1.0, add);
}

void bgmv_expand_slice(const Tensor& out, const Tensor& input, const Tensor& weights,
                       const Tensor& indices, int64_t offset, int64_t size, bool add) {
  constexpr char op[] = "bgmv_expand_slice";
  check_operands(op, out, input, weights, indices);
  check_shape(op, "indices", indices, {input.size(0)});
  check_slice(op, out, weights, offset, size);
  run<false>(op, bgmv_expand_slice_kernels, out, input, weights,
             checked_indices(op, indices, weights.size(0)), offset, size, 1.0, add);
}

void check_sequences(const char* op, const Tensor& indices, const Tensor& seq_lens,
                     const OptionalTensor& seq_starts) {
  check_sequence(op, "seq_lens", seq_lens, indices);
  check_sequence(op, "seq_starts", seq_starts, indices);
}

void sgmv_shrink(const Tensor& out, const Tensor& input, const Tensor& weights,
                 const Tensor& indices, const Tensor& seq_lens, double scale,
                 const OptionalTensor& seq_starts) {
  constexpr char op[] = "sgmv_shrink";
  check_operands(op, out, input, weights, indices);
  check_sequences(op, indices, seq_lens, seq_starts);
  check_shrink(op, out, weights);
  run<true>(op, sgmv_shrink_kernels, out, input, weights,
            adapter_of_rows(op, indices, seq_lens, seq_starts, weights.size(0), input.size(0)), 0,
            outputs_of(weights), scale, false);
}

void sgmv_expand(const Tensor& out, const Tensor& input, const Tensor& weights,
                 const Tensor& indices, const Tensor& seq_lens, bool add,
                 const OptionalTensor& seq_starts) {
  constexpr char op[] = "sgmv_expand";
  check_operands(op, out, input, weights, indices);
  check_sequences(op, indices, seq_lens, seq_starts);
  run<false>(op, sgmv_expand_kernels, out, input, weights,
             adapter_of_rows(op, indices, seq_lens, seq_starts, weights.size(0), input.size(0)), 0,
             std::min(out.size(1), outputs_of(weights)), 1.0, add);
}

void sgmv_expand_slice(const Tensor& out, const Tensor& input, const Tensor& weights,
                       const Tensor& indices, const Tensor& seq_lens, int64_t offset, int64_t size,
                       bool add, const OptionalTensor& seq_starts) {
  constexpr char op[] = "sgmv_expand_slice";
  check_operands(op, out, input, weights, indices);
  check_sequences(op, indices, seq_lens, seq_starts);
  check_slice(op, out, weights, offset, size);
  run<false>(op, sgmv_expand_slice_kernels, out, input, weights,
             adapter_of_rows(op, indices, seq_lens, seq_starts, weights.size(0), input.size(0)),
             offset, size, 1.0, add);
}

}  // namespace
}  // namespace ipex

STABLE_TORCH_LIBRARY_IMPL(ipex, CPU, m) {
  IPEX_IMPL(m, "bgmv_shrink", ipex::bgmv_shrink);
  IPEX_IMPL(m, "bgmv_expand", ipex::bgmv_expand);
  IPEX_IMPL(m, "bgmv_expand_slice", ipex::bgmv_expand_slice);
  IPEX_IMPL(m, "sgmv_shrink", ipex::sgmv_shrink);
  IPEX_IMPL(m, "sgmv_expand", ipex::sgmv_expand);
  IPEX_IMPL(m, "sgmv_expand_slice", ipex::sgmv_expand_slice);
}
