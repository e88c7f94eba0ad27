// SPDX-License-Identifier: Apache-2.0
#include "device/onednn/onednn_ops.h"

#include <ATen/Functions.h>

#include <vector>

#include "core/core.h"
#include "device/core/runtime.h"
#include "device/onednn/onednn_plan.h"

namespace ipex::xpu {
namespace {

using at::Tensor;
using onednn::attributes;
using onednn::check;
using onednn::Context;
using onednn::context_of;
using onednn::created;
using onednn::Desc;
using onednn::DescHandle;
using onednn::Dims;
using onednn::engine_of;
using onednn::Library;
using onednn::Numbers;
using onednn::plan_for;
using onednn::PostOps;
using onednn::PostOpsHandle;
using onednn::PrimitiveDesc;
using onednn::PrimitiveDescHandle;
using onednn::Shape;
using onednn::shape_of;
using onednn::Wanted;

// Products of matrices
// ------------------------------------------------------------------------------------------------

// Matrices by rows or by columns, of one or of all batches; false for anything else.
bool normalize(Shape& x) {
  const std::size_t rows = x.sizes.size() - 2;
  const std::size_t columns = rows + 1;
  // Strides of dimensions of size 1 mean nothing.
  if (x.sizes[columns] == 1) x.strides[columns] = 1;
  if (x.sizes[rows] == 1) x.strides[rows] = x.strides[columns] == 1 ? x.sizes[columns] : 1;
  if (rows == 1 && (x.sizes[0] == 1 || x.strides[0] == 0)) {
    x.sizes[0] = 1;
    x.strides[0] = std::max(x.sizes[rows] * x.strides[rows], x.sizes[columns] * x.strides[columns]);
  }
  const auto by = [&](std::size_t outer, std::size_t inner) {
    return x.strides[inner] == 1 && x.strides[outer] >= x.sizes[inner];
  };
  return by(rows, columns) || by(columns, rows);
}

// A row that is added to all rows.
bool is_row(const Tensor& x) {
  for (std::int64_t d = 0; d + 1 < x.dim(); ++d) {
    if (x.stride(d) != 0 && x.size(d) != 1) return false;
  }
  return x.stride(-1) == 1;
}

std::int64_t bits_of(float value) { return c10::bit_cast<std::int32_t>(value); }

// Convolutions
// ------------------------------------------------------------------------------------------------

// The layout that is asked for: channels-last where the tensor has it, else the library's choice,
// which is much faster than plain channels-first.
DescHandle layout_for(const Library& library, const Tensor& x) {
  const Shape shape = shape_of(x);
  const bool channels_last =
      !x.is_contiguous() && (x.is_contiguous(at::MemoryFormat::ChannelsLast) ||
                             x.is_contiguous(at::MemoryFormat::ChannelsLast3d));
  return channels_last ? shape.desc(library) : shape.any_layout(library);
}

Shape weight_shape(const Tensor& weight, std::int64_t groups) {
  Shape shape = shape_of(weight);
  if (groups == 1) return shape;
  shape.sizes[0] /= groups;
  shape.sizes.insert(shape.sizes.begin(), groups);
  shape.strides.insert(shape.strides.begin(), shape.sizes[1] * shape.strides[0]);
  return shape;
}

// Steps between taps are 0 where taps are neighbors; padding after the last element is what the
// sizes ask for.
struct Window {
  Dims strides{}, gaps{}, before{}, after{};
  Window(const Tensor& input, const Tensor& weight, const Tensor& output, const Convolution& conv) {
    const auto at = [](at::IntArrayRef v, std::int64_t d) {
      return v[v.size() == 1 ? 0 : static_cast<std::size_t>(d)];
    };
    for (std::int64_t d = 0; d + 2 < input.dim(); ++d) {
      strides[d] = at(conv.stride, d);
      gaps[d] = at(conv.dilation, d) - 1;
      before[d] = at(conv.padding, d);
      after[d] = (output.size(d + 2) - 1) * strides[d] + (weight.size(d + 2) - 1) * (gaps[d] + 1) +
                 1 - input.size(d + 2) - before[d];
    }
  }
  void add_to(Numbers& key, std::int64_t dims) const {
    for (const Dims* one : {&strides, &gaps, &before, &after})
      key.insert(key.end(), *one, *one + dims);
  }
};

}  // namespace

bool onednn_matmul(const Tensor& out, const Tensor& a, const Tensor& b, const Tensor* addend,
                   float beta, float alpha) {
  const Library* library = onednn::library();
  if (library == nullptr || out.numel() == 0 || a.numel() == 0) return false;
  if (out.stride(-1) != 1 && out.stride(-2) == 1) {
    const Tensor other = addend == nullptr ? Tensor() : addend->mT();
    return onednn_matmul(out.mT(), b.mT(), a.mT(), addend == nullptr ? nullptr : &other, beta,
                         alpha);
  }
  const auto device = static_cast<c10::DeviceIndex>(out.get_device());
  Context* context = context_of(*library, device);
  if (context == nullptr) return false;
  Shape left = shape_of(a);
  Shape right = shape_of(b);
  Shape result = shape_of(out);
  if (!normalize(left) || !normalize(right) || !normalize(result) || result.strides.back() != 1)
    return false;
  // Outer products of batches, which release 3.11 gets wrong.
  if (out.dim() == 3 && out.size(0) > 1 && a.size(-1) == 1) return false;
  const bool added = addend != nullptr && beta != 0.f;
  const bool in_place = added && addend->const_data_ptr() == out.const_data_ptr();
  const bool bias = added && !in_place && alpha == 1.f && beta == 1.f && is_row(*addend);
  Numbers key{0,
              static_cast<std::int64_t>(onednn::mode()),
              bias,
              added && !bias,
              bits_of(alpha),
              bits_of(added ? beta : 0.f)};
  std::vector<Wanted> operands{{onednn::kSource, left}, {onednn::kWeight, right}};
  std::vector<Tensor> tensors{a, b};
  if (bias) {
    Shape row{Numbers(result.sizes.size(), 1), Numbers(result.sizes.size(), result.sizes.back()),
              result.type};
    row.sizes.back() = result.sizes.back();
    row.strides.back() = 1;
    operands.push_back({onednn::kBias, row});
    tensors.push_back(*addend);
  }
  operands.push_back({onednn::kResult, result, true});
  tensors.push_back(out);
  for (const Wanted& one : operands) one.shape.add_to(key);
  const auto plan = plan_for(*library, *context, key, operands, [&] {
    const auto with = attributes(*library);
    const auto after = created<PostOpsHandle>(
        *library, [&](PostOps** to) { return library->post_ops_create(to); });
    if (alpha != 1.f)
      check(library->post_ops_append_eltwise(after.get(), onednn::kLinear, alpha, 0.f));
    if (added && !bias) check(library->post_ops_append_sum(after.get(), beta, 0, /*type=*/0));
    check(library->primitive_attr_set_post_ops(with.get(), after.get()));
    std::vector<DescHandle> descs;
    for (const Wanted& one : operands) descs.push_back(one.shape.desc(*library));
    return created<PrimitiveDescHandle>(*library, [&](PrimitiveDesc** to) {
      return library->matmul_primitive_desc_create(to, engine_of(*context), descs[0].get(),
                                                   descs[1].get(), bias ? descs[2].get() : nullptr,
                                                   descs.back().get(), with.get());
    });
  });
  if (plan == nullptr) return false;
  if (added && !bias && !in_place) out.copy_(*addend);
  onednn::run(*library, *context, device, *plan, tensors);
  return true;
}

bool onednn_convolution(ConvolutionResult kind, const Tensor& input, const Tensor& weight,
                        const Tensor& output, const Convolution& conv) {
  const Library* library = onednn::library();
  if (library == nullptr) return false;
  const auto device = static_cast<c10::DeviceIndex>(input.get_device());
  Context* context = context_of(*library, device);
  if (context == nullptr) return false;
  // On a CPU nothing else was measured to be faster.
  if (device_info(device).is_cpu && input.scalar_type() != at::kFloat &&
      onednn::mode() != onednn::Mode::Prefer)
    return false;
  const bool forward = kind == ConvolutionResult::Output;
  const bool to_input = kind == ConvolutionResult::InputGradient;
  const std::vector<Wanted> operands{
      {to_input ? onednn::kSourceGradient : onednn::kSource, shape_of(input), to_input},
      {kind == ConvolutionResult::WeightGradient ? onednn::kWeightGradient : onednn::kWeight,
       weight_shape(weight, conv.groups), kind == ConvolutionResult::WeightGradient},
      {forward ? onednn::kResult : onednn::kResultGradient, shape_of(output), forward}};
  const Window window(input, weight, output, conv);
  Numbers key{1, static_cast<std::int64_t>(onednn::mode()), static_cast<std::int64_t>(kind),
              conv.groups};
  window.add_to(key, input.dim() - 2);
  for (const Wanted& one : operands) one.shape.add_to(key);
  const auto plan = plan_for(*library, *context, key, operands, [&] {
    const auto with = attributes(*library);
    const DescHandle source = layout_for(*library, input);
    const DescHandle kernel = operands[1].shape.any_layout(*library);
    const DescHandle result = layout_for(*library, output);
    auto ahead = created<PrimitiveDescHandle>(*library, [&](PrimitiveDesc** to) {
      return library->convolution_forward_primitive_desc_create(
          to, engine_of(*context), onednn::kForwardTraining, onednn::kDirect, source.get(),
          kernel.get(), nullptr, result.get(), window.strides, window.gaps, window.before,
          window.after, with.get());
    });
    if (forward) return ahead;
    return created<PrimitiveDescHandle>(*library, [&](PrimitiveDesc** to) {
      if (to_input) {
        return library->convolution_backward_data_primitive_desc_create(
            to, engine_of(*context), onednn::kDirect, source.get(), kernel.get(), result.get(),
            window.strides, window.gaps, window.before, window.after, ahead.get(), with.get());
      }
      return library->convolution_backward_weights_primitive_desc_create(
          to, engine_of(*context), onednn::kDirect, source.get(), kernel.get(), nullptr,
          result.get(), window.strides, window.gaps, window.before, window.after, ahead.get(),
          with.get());
    });
  });
  if (plan == nullptr) return false;
  onednn::run(*library, *context, device, *plan, {input, weight, output});
  return true;
}

}  // namespace ipex::xpu
