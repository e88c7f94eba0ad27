// SPDX-License-Identifier: Apache-2.0
#include "program/pointwise.h"

#include <algorithm>
#include <array>
#include <atomic>

#include "ipex/glue/image.h"
#include "ipex/glue/op_loops.h"
#include "program/convert.h"
#include "runtime/scratch.h"

namespace ipex::program {
namespace {

constexpr const char* kOp = "pointwise";
constexpr int64_t kMaxDim = PointwiseCall::kMaxDim;
constexpr int64_t kBlock = PointwiseCall::kBlock;
const Kernel<decltype(ipex_k_pointwise)> kernel("program", "ipex_k_pointwise");

constexpr int64_t kOperands[] = {
#define IPEX_POINTWISE_OPERANDS(name, operands) operands,
    IPEX_POINTWISE_FUNCTIONS(IPEX_POINTWISE_OPERANDS)
#undef IPEX_POINTWISE_OPERANDS
};
constexpr int64_t kCodes = static_cast<int64_t>(std::size(kOperands));

PointwiseType type_of(ScalarType dtype) {
  if (dtype == ScalarType::Float) return PointwiseType::kFloat;
  if (dtype == ScalarType::BFloat16) return PointwiseType::kBFloat16;
  if (dtype == ScalarType::Half) return PointwiseType::kHalf;
  return PointwiseType::kBool;
}

void check_code(int64_t known, const std::vector<int64_t>& code) {
  IPEX_CHECK(!code.empty() && code.size() % 4 == 0, kOp,
             ": code must have four numbers for each of its instructions, got ", code.size());
  for (size_t at = 0; at < code.size(); at += 4) {
    const auto number = static_cast<int64_t>(at / 4);
    IPEX_CHECK(code[at] >= 0 && code[at] < kCodes, kOp, ": code of instruction ", number,
               " must be in [0, ", kCodes, "), got ", code[at]);
    for (int64_t i = 0; i < 3; ++i) {
      const int64_t operand = code[at + 1 + static_cast<size_t>(i)];
      if (i < kOperands[code[at]])
        IPEX_CHECK(operand >= 0 && operand < known + number, kOp, ": operand ", i,
                   " of instruction ", number, " must be in [0, ", known + number, "), got ",
                   operand);
      else
        IPEX_CHECK(operand == -1, kOp, ": operand ", i, " of instruction ", number,
                   " must be -1, got ", operand);
    }
  }
}

// The steps of a chain and the places of their results: the buffer of a value that nothing reads
// any more is used again.
struct Steps {
  std::vector<PointwiseStep> steps;
  int64_t places = 0;
  int32_t result = 0;

  Steps(int64_t known, const std::vector<int64_t>& code) : places(known) {
    const auto n = static_cast<int64_t>(code.size() / 4);
    std::vector<int64_t> last(static_cast<size_t>(known + n), -1);
    last.back() = n;  // the result
    // Backwards: the first reader that is seen is the last one. What nothing reads is left out.
    for (int64_t s = n - 1; s >= 0; --s) {
      if (last[static_cast<size_t>(known + s)] < 0) continue;
      for (int64_t i = 0; i < kOperands[code[static_cast<size_t>(4 * s)]]; ++i) {
        int64_t& seen = last[static_cast<size_t>(code[static_cast<size_t>(4 * s + 1 + i)])];
        seen = std::max(seen, s);
      }
    }
    std::vector<int32_t> place(static_cast<size_t>(known + n));
    for (int64_t i = 0; i < known; ++i) place[static_cast<size_t>(i)] = static_cast<int32_t>(i);
    std::vector<int32_t> free;
    for (int64_t s = 0; s < n; ++s) {
      if (last[static_cast<size_t>(known + s)] < 0) continue;
      PointwiseStep& step = steps.emplace_back();
      step.code = static_cast<PointwiseCode>(code[static_cast<size_t>(4 * s)]);
      for (int64_t i = 0; i < 3; ++i) {
        const int64_t operand = code[static_cast<size_t>(4 * s + 1 + i)];
        step.operands[i] = operand < 0 ? -1 : place[static_cast<size_t>(operand)];
        const bool dies = operand >= known && last[static_cast<size_t>(operand)] == s;
        if (dies && std::find(free.begin(), free.end(), step.operands[i]) == free.end())
          free.push_back(step.operands[i]);
      }
      if (free.empty()) {
        step.to = static_cast<int32_t>(places++);
      } else {
        step.to = free.back();
        free.pop_back();
      }
      result = place[static_cast<size_t>(known + s)] = step.to;
    }
    IPEX_CHECK(places <= PointwiseCall::kMaxPlaces, kOp, ": code must need at most ",
               PointwiseCall::kMaxPlaces, " values at a time, got ", places);
  }
};

// The dimensions of a result and of its inputs in the order of the memory of the result, merged
// where one stride steps through several in all of them.
struct Space {
  int64_t dim = 0;
  int64_t sizes[kMaxDim];
  std::vector<std::array<int64_t, kMaxDim>> strides;

  explicit Space(size_t inputs) : strides(inputs) {}

  // From the outermost dimension to the innermost.
  void add(int64_t size, const int64_t* steps) {
    if (size == 1) return;
    bool merges = dim > 0;
    for (size_t i = 0; merges && i < strides.size(); ++i)
      merges = strides[i][static_cast<size_t>(dim - 1)] == steps[i] * size;
    if (merges)
      sizes[dim - 1] *= size;
    else
      sizes[dim++] = size;
    for (size_t i = 0; i < strides.size(); ++i) strides[i][static_cast<size_t>(dim - 1)] = steps[i];
  }

  void finish() {
    if (dim > 0) return;
    sizes[0] = dim = 1;
    for (auto& one : strides) one[0] = 0;
  }

  PointwiseLayout layout(size_t input) const {
    const auto& steps = strides[input];
    int64_t dense = 1;
    bool same = true, outer = false;
    for (int64_t d = dim - 1; d >= 0; --d) {
      const int64_t step = steps[static_cast<size_t>(d)];
      same = same && step == dense;
      outer = outer || (d < dim - 1 && step != 0);
      dense *= sizes[d];
    }
    if (same) return PointwiseLayout::kSame;
    if (outer) return PointwiseLayout::kStrided;
    return steps[static_cast<size_t>(dim - 1)] == 0 ? PointwiseLayout::kScalar
                                                    : PointwiseLayout::kRow;
  }
};

void run(const std::vector<Tensor>& inputs, const Space& space, const std::vector<float>& constants,
         const Steps& steps, const Tensor& y) {
  std::vector<PointwiseInput> described;
  int64_t bytes = static_cast<int64_t>(y.element_size());
  for (size_t i = 0; i < inputs.size(); ++i) {
    const PointwiseLayout layout = space.layout(i);
    described.push_back({inputs[i].const_data_ptr(), type_of(inputs[i].scalar_type()), layout,
                         space.strides[i].data()});
    if (layout == PointwiseLayout::kSame || layout == PointwiseLayout::kStrided)
      bytes += static_cast<int64_t>(inputs[i].element_size());
  }
  PointwiseCall call;
  call.inputs = described.data();
  call.constants = constants.data();
  call.steps = steps.steps.data();
  call.n_inputs = static_cast<int64_t>(inputs.size());
  call.n_constants = static_cast<int64_t>(constants.size());
  call.n_steps = static_cast<int64_t>(steps.steps.size());
  call.places = steps.places;
  call.result = steps.result;
  call.type = type_of(y.scalar_type());
  call.dim = space.dim;
  call.sizes = space.sizes;
  call.columns = space.sizes[space.dim - 1];
  call.rows = 1;
  for (int64_t d = 0; d + 1 < space.dim; ++d) call.rows *= space.sizes[d];
  const bool narrow = call.columns <= kBlock / 2;
  call.group = narrow ? kBlock / call.columns : 1;
  call.pieces = narrow ? 1 : (call.columns + kBlock - 1) / kBlock;
  const int64_t blocks = (call.rows + call.group - 1) / call.group * call.pieces;
  // A step costs about what some bytes of memory cost.
  const int64_t cost = kBlock * (bytes + 2 * call.n_steps);
  const auto function = kernel.get();
  void* const to = y.mutable_data_ptr();
  std::atomic<bool> no_memory{false};
  parallel_for(
      blocks, std::max<int64_t>(1, 2 * kPieceBytes / cost), [&](int64_t begin, int64_t end) {
        char* const scratch = Scratch<Area::kPointwise>::get(call.places * kBlock *
                                                             static_cast<int64_t>(sizeof(float)));
        if (scratch)
          function(&call, to, reinterpret_cast<float*>(scratch), begin, end);
        else
          no_memory = true;
      });
  IPEX_CHECK(!no_memory, kOp, ": out of memory");
}

std::string sizes_text(const int64_t* sizes, int64_t dim) {
  std::string text = "[";
  for (int64_t i = 0; i < dim; ++i) text += (i ? ", " : "") + std::to_string(sizes[i]);
  return text + "]";
}

// The shape that the inputs broadcast to.
struct Shape {
  int64_t dim = 0;
  int64_t sizes[kMaxDim];

  explicit Shape(const std::vector<Tensor>& inputs) {
    for (size_t i = 0; i < inputs.size(); ++i) add(inputs[i], i);
  }

  bool is_of(const Tensor& x) const {
    return x.dim() == dim && std::equal(sizes, sizes + dim, x.sizes().data());
  }

 private:
  void add(const Tensor& x, size_t number) {
    IPEX_CHECK(is_pointwise_dtype(x.scalar_type()), kOp, ": input ", number,
               " must have dtype float32, bfloat16, float16, bool, got ",
               dtype_name(x.scalar_type()));
    IPEX_CHECK(x.dim() <= kMaxDim, kOp, ": input ", number, " must have at most ", kMaxDim,
               " dimensions, got ", x.dim());
    bool fits = true;
    for (int64_t i = 1; fits && i <= std::min(dim, x.dim()); ++i) {
      const int64_t m = x.size(x.dim() - i), n = sizes[dim - i];
      fits = m == n || m == 1 || n == 1;
    }
    IPEX_CHECK(fits, kOp, ": input ", number, " must broadcast with the inputs before it of shape ",
               sizes_text(sizes, dim), ", got ", shape_text(x));
    if (x.dim() > dim) {
      std::copy_backward(sizes, sizes + dim, sizes + x.dim());
      std::copy_n(x.sizes().data(), x.dim() - dim, sizes);
      dim = x.dim();
    }
    for (int64_t i = 1; i <= x.dim(); ++i)
      if (sizes[dim - i] == 1) sizes[dim - i] = x.size(x.dim() - i);
  }
};

Tensor pointwise(const std::vector<Tensor>& inputs, const std::vector<int64_t>& code,
                 const std::vector<double>& constants, ScalarType dtype) {
  IPEX_CHECK(!inputs.empty(), kOp, ": inputs must have at least 1 tensor(s), got 0");
  IPEX_CHECK(is_pointwise_dtype(dtype), kOp,
             ": dtype must be one of float32, bfloat16, float16, bool, got ", dtype_name(dtype));
  const auto known = static_cast<int64_t>(inputs.size() + constants.size());
  check_code(known, code);
  const Shape shape(inputs);
  bool full = false, last = shape.dim == 4;
  for (const Tensor& x : inputs) {
    if (!last || !shape.is_of(x)) continue;
    full = true;
    last = is_channels_last(x);
  }
  last = last && full;
  Tensor y =
      last ? new_image(shape.sizes[0], shape.sizes[1], shape.sizes[2], shape.sizes[3], true, dtype)
           : new_contiguous(shape.sizes, shape.dim, dtype);
  if (y.numel() == 0) return y;
  Space space(inputs.size());
  std::vector<int64_t> steps(inputs.size());
  constexpr int64_t kImageOrder[4] = {0, 2, 3, 1};
  for (int64_t i = 0; i < shape.dim; ++i) {
    const int64_t d = last ? kImageOrder[i] : i;
    for (size_t k = 0; k < inputs.size(); ++k) {
      const Tensor& x = inputs[k];
      const int64_t own = d - (shape.dim - x.dim());
      steps[k] = own < 0 || x.size(own) == 1 ? 0 : x.stride(own);
    }
    space.add(shape.sizes[d], steps.data());
  }
  space.finish();
  std::vector<float> values;
  for (const double one : constants) values.push_back(static_cast<float>(one));
  run(inputs, space, values, Steps(known, code), y);
  return y;
}

const bool registered = [] {
  add("pointwise", Adapter<&pointwise>::entry());
  return true;
}();

}  // namespace

bool is_pointwise_dtype(ScalarType dtype) {
  return is_kernel_dtype(dtype) || dtype == ScalarType::Bool;
}

Tensor convert(const Tensor& x, ScalarType dtype) {
  Tensor y = new_tensor(x.sizes().data(), x.strides().data(), x.dim(), dtype);
  const int64_t numel = x.numel();
  if (numel == 0) return y;
  Space space(1);
  const int64_t step = 1;
  space.add(numel, &step);
  space.finish();
  run({x}, space, {}, Steps(1, {}), y);
  return y;
}

}  // namespace ipex::program
