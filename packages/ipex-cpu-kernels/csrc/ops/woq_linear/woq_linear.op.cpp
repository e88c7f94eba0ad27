// SPDX-License-Identifier: Apache-2.0
#include "woq_linear/woq_linear.h"

#include <algorithm>
#include <atomic>

#include "ipex/glue/dispatch.h"
#include "ipex/glue/gemm_schedule.h"
#include "linear/epilogue_check.h"
#include "runtime/scratch.h"
#include "woq_linear/woq_check.h"
#include "woq_linear/woq_int8.h"

namespace ipex {
namespace {

constexpr const char* kOp = "woq_linear";

const Kernel<decltype(ipex_k_woq_operand)> operand_kernel(kOp, "ipex_k_woq_operand");
const Kernel<decltype(ipex_k_woq_few_limit)> limit_kernel(kOp, "ipex_k_woq_few_limit");
const auto prepare_kernels = IPEX_KERNELS(kOp, woq_prepare);
const auto few_kernels = IPEX_KERNELS(kOp, woq_few);
const auto many_kernels = IPEX_KERNELS(kOp, woq_many);
const auto dequantize_kernels = IPEX_KERNELS("dequantize_woq_weight", woq_dequantize);

enum class Lowp { kNone, kHalf, kBFloat16, kInt8 };

Lowp parse_modes(const std::string& lowp, const std::string& act_quant) {
  constexpr const char* kLowp[] = {"none", "fp16", "bf16", "int8"};
  constexpr const char* kModes[] = {"none",
                                    "per_tensor",
                                    "per_ic_block",
                                    "per_batch",
                                    "per_batch_ic_block",
                                    "per_tensor_sym",
                                    "per_ic_block_sym",
                                    "per_batch_sym",
                                    "per_batch_ic_block_sym"};
  const auto* mode = std::find(std::begin(kLowp), std::end(kLowp), lowp);
  IPEX_CHECK(mode != std::end(kLowp), kOp,
             ": lowp_mode must be one of none, fp16, bf16, int8, got ", lowp);
  if (std::find(std::begin(kModes), std::end(kModes), act_quant) == std::end(kModes)) {
    std::string names;
    for (const char* name : kModes) names += (names.empty() ? "" : ", ") + std::string(name);
    fail(kOp, ": act_quant_mode must be one of ", names, ", got ", act_quant);
  }
  IPEX_CHECK((act_quant != "none") == (lowp == "int8"), kOp, ": act_quant_mode must be ",
             lowp == "int8" ? "given for lowp_mode int8" : "none for lowp_mode " + lowp, ", got ",
             act_quant);
  return static_cast<Lowp>(mode - kLowp);
}

WoqCompute compute_type(Lowp lowp, ScalarType dtype) {
  if (lowp == Lowp::kHalf || (lowp == Lowp::kNone && dtype == ScalarType::Half))
    return WoqCompute::kHalf;
  if (lowp == Lowp::kBFloat16 || (lowp == Lowp::kNone && dtype == ScalarType::BFloat16))
    return WoqCompute::kBFloat16;
  return WoqCompute::kFloat;
}

ScalarType dtype_of(WoqCompute compute) {
  if (compute == WoqCompute::kHalf) return ScalarType::Half;
  return compute == WoqCompute::kBFloat16 ? ScalarType::BFloat16 : ScalarType::Float;
}

// Rows up to which decoding each code for a few rows at a time is faster than decoded panels.
int64_t few_limit(const WoqLinearArgs& args, int64_t rows) {
  const bool other = args.kind == WoqOperand::kFloat || args.kind == WoqOperand::kInt16;
  if (!other && uses_tiles(ScalarType::BFloat16))
    return woq_takes_tiles(args, rows) ? kWoqFewRows : 4;
  return limit_kernel.get()(static_cast<int32_t>(args.kind));
}

// Rows that meet the weights of a task, where there are more than kWoqFewRows: their activations
// stay in L2.
constexpr int64_t kFewBlock = 96;

// Rows of x for few_kernels; false if a number is not finite.
template <class Prepare>
bool prepare_few(WoqLinearArgs& args, int64_t rows, Prepare* prepare) {
  const bool fixed = args.kind == WoqOperand::kInt16 || args.kind == WoqOperand::kPlanes;
  args.chunk = std::min<int64_t>(args.header.group, kWoqChunk);
  args.chunks = args.at.groups > 1 ? args.at.groups : (args.k + args.chunk - 1) / args.chunk;
  const int64_t operand = woq_few_layout(args, rows, uses_tiles(ScalarType::BFloat16));
  const int64_t sums = woq_round_up(rows * args.at.groups * 4, 64);
  const int64_t chunks = fixed ? woq_round_up(rows * args.chunks * 4, 64) : 0;
  char* memory = Scratch<Area::kWoqOperand>::get(operand + sums + 2 * chunks);
  IPEX_CHECK(memory, kOp, ": not enough memory for the activations");
  args.operand = memory;
  args.sums = reinterpret_cast<float*>(memory + operand);
  args.chunk_scales = reinterpret_cast<float*>(memory + operand + sums);
  args.chunk_sums = reinterpret_cast<float*>(memory + operand + sums + chunks);
  std::atomic<int32_t> bad{0};
  parallel_for(rows, std::max<int64_t>(1, 16384 / args.k), [&](int64_t begin, int64_t end) {
    if (prepare(&args, false, begin, end)) bad = 1;
  });
  return bad == 0;
}

// Rows of x for many_kernels: x itself where it is what they take.
template <class Prepare>
void prepare_many(WoqLinearArgs& args, int64_t rows, ScalarType dtype, Prepare* prepare) {
  if (dtype == dtype_of(args.compute) && !args.at.permutation) {
    args.operand = const_cast<void*>(args.x);
    args.operand_stride = args.x_stride;
    return;
  }
  args.operand_stride = woq_round_up(args.k, 32);
  const int64_t element = args.compute == WoqCompute::kFloat ? 4 : 2;
  args.operand = Scratch<Area::kWoqOperand>::get(rows * args.operand_stride * element);
  IPEX_CHECK(args.operand, kOp, ": not enough memory for the activations");
  parallel_for(rows, std::max<int64_t>(1, 16384 / args.k),
               [&](int64_t begin, int64_t end) { prepare(&args, true, begin, end); });
}

void run(WoqLinearArgs& args, const GemmShape& shape, ScalarType dtype) {
  decltype(ipex_k_woq_prepare_f32)* prepare = nullptr;
  decltype(ipex_k_woq_few_f32)* few = nullptr;
  decltype(ipex_k_woq_many_f32)* many = nullptr;
  prepare_kernels.visit(dtype, [&]<class>(auto* kernel) { prepare = kernel; });
  few_kernels.visit(dtype, [&]<class>(auto* kernel) { few = kernel; });
  many_kernels.visit(dtype, [&]<class>(auto* kernel) { many = kernel; });
  const bool decodable = !(args.header.flags & kFlagSpecial);
  if (decodable && shape.rows <= few_limit(args, shape.rows) &&
      prepare_few(args, shape.rows, prepare)) {
    // Only the operand of rows that one task has may lie in another order than rows.
    run_gemm(shape, shape.rows > kWoqFewRows ? kFewBlock : kWoqFewRows, 1 << 20,
             [&](int64_t row_begin, int64_t row_end, int64_t panel_begin, int64_t panel_end) {
               few(&args, row_begin, row_end, panel_begin, panel_end);
             });
    return;
  }
  prepare_many(args, shape.rows, dtype, prepare);
  // A block of rows shares decoded panels: as many rows as fit beside them into the cache.
  constexpr int64_t kRows = 768;
  std::atomic<bool> no_memory{false};
  run_gemm(shape, kRows, 1 << 20,
           [&](int64_t row_begin, int64_t row_end, int64_t panel_begin, int64_t panel_end) {
             char* memory = Scratch<Area::kWoqPanels>::get(woq_panel_scratch(row_end - row_begin));
             if (memory)
               many(&args, memory, row_begin, row_end, panel_begin, panel_end);
             else
               no_memory = true;
           });
  IPEX_CHECK(!no_memory, kOp, ": not enough memory for decoded weights");
}

Tensor woq_linear(const Tensor& x, const Tensor& packed_weight, int64_t out_features,
                  const OptionalTensor& bias, const OptionalTensor& residual,
                  std::string activation, const OptionalTensor& mul,
                  const OptionalTensor& residual2, std::string gate, std::string lowp_mode,
                  std::string act_quant_mode) {
  check_tensor(kOp, "x", x);
  IPEX_CHECK(out_features > 0, kOp, ": out_features must be positive, got ", out_features);
  const int64_t k = x.size(x.dim() - 1);
  CheckedEpilogue epilogue(kOp, {bias, mul, residual, residual2, activation, gate});
  const Lowp lowp = parse_modes(lowp_mode, act_quant_mode);
  const int64_t n = epilogue.weight_rows(out_features);
  const PackedHeader& header = check_woq_packed(kOp, "packed_weight", packed_weight, n, k);
  const bool vnni = header.order == kOrderVnni;
  IPEX_CHECK(vnni == (lowp == Lowp::kInt8), kOp, ": packed_weight must be packed with order ",
             lowp == Lowp::kInt8 ? "vnni" : "dot", " for lowp_mode ", lowp_mode, ", got ",
             vnni ? "vnni" : "dot");
  epilogue.check(x, out_features);
  if (lowp == Lowp::kInt8)
    return woq_linear_int8(x, packed_weight, header, out_features, epilogue.args, act_quant_mode);

  Tensor y = new_like(x, out_features);
  const Rows rows = as_rows(x);
  if (rows.rows == 0) return y;
  WoqLinearArgs args{};
  args.packed = static_cast<const char*>(packed_weight.const_data_ptr());
  args.x = rows.data;
  args.y = y.mutable_data_ptr();
  args.x_stride = rows.stride;
  args.n = out_features;
  args.k = k;
  args.header = header;
  args.at = woq_layout(header);
  args.epilogue = epilogue.args;
  args.compute = compute_type(lowp, x.scalar_type());
  args.kind = static_cast<WoqOperand>(
      operand_kernel.get()(&args.header, static_cast<int32_t>(args.compute)));
  woq_choose_operand(args, rows.rows, uses_tiles(ScalarType::BFloat16));
  const GemmShape shape{rows.rows, args.at.strips / 2, k, epilogue.args.gated ? 2 : 1,
                        uses_tiles(dtype_of(args.compute))};
  run(args, shape, x.scalar_type());
  return y;
}

// Moves a decoded panel to rows of the plain weight.
template <class T>
void move_panel(const T* panel, const PackedHeader& header, const int32_t* places, int64_t columns,
                int64_t inner, T* to) {
  for (int64_t i = 0; i < header.k; ++i) {
    const T* from = panel + i / inner * inner * kPackedPanel + i % inner;
    const int64_t place = places ? places[i] : i;
    for (int64_t c = 0; c < columns; ++c) to[c * header.k + place] = from[c * inner];
  }
}

Tensor dequantize(const Tensor& packed, int64_t n, int64_t k, ScalarType dtype) {
  const char* op = "dequantize_woq_weight";
  IPEX_CHECK(is_kernel_dtype(dtype), op, ": dtype must be float32, bfloat16 or float16, got ",
             dtype_name(dtype));
  IPEX_CHECK(n > 0, op, ": out_features must be positive, got ", n);
  IPEX_CHECK(k > 0, op, ": in_features must be positive, got ", k);
  const PackedHeader& header = check_woq_packed(op, "packed", packed, n, k);
  const WoqLayout at = woq_layout(header);
  const int64_t sizes[2] = {n, k};
  Tensor weight = new_contiguous(sizes, 2, dtype);
  const char* from = static_cast<const char*>(packed.const_data_ptr());
  const auto* places =
      at.permutation ? reinterpret_cast<const int32_t*>(from + at.permutation) : nullptr;
  std::atomic<bool> no_memory{false};
  dequantize_kernels.visit(dtype, [&]<class T>(auto* kernel) {
    T* to = static_cast<T*>(weight.mutable_data_ptr());
    const int64_t inner = dtype == ScalarType::BFloat16 ? 2 : 1;
    parallel_for(at.strips / 2, 1, [&](int64_t begin, int64_t end) {
      auto* panel = reinterpret_cast<T*>(Scratch<Area::kWoqPanels>::get(
          kPackedPanel * at.k_padded * static_cast<int64_t>(sizeof(T))));
      if (!panel) {
        no_memory = true;
        return;
      }
      for (int64_t p = begin; p < end; ++p) {
        kernel(from, p, panel);
        const int64_t columns = std::min(kPackedPanel, n - p * kPackedPanel);
        move_panel(panel, header, places, columns, inner, to + p * kPackedPanel * k);
      }
    });
  });
  IPEX_CHECK(!no_memory, op, ": not enough memory for decoded weights");
  return weight;
}

}  // namespace
}  // namespace ipex

STABLE_TORCH_LIBRARY_IMPL(ipex, CPU, m) {
  IPEX_IMPL(m, "woq_linear", ipex::woq_linear);
  IPEX_IMPL(m, "dequantize_woq_weight", ipex::dequantize);
}
