// SPDX-License-Identifier: Apache-2.0
// ipex_quant::int8_conv, int8_conv_sum_ and int8_embedding_bag for programs without Python. They
// compute what ipex_quant/int8/ops.py does, by ops that torch has in C++.
#include "cpp/int8_conv.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <map>
#include <mutex>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace ipex::cpp {
namespace {

using torch::headeronly::MemoryFormat;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Ints = std::vector<int64_t>;
using OptionalTensor = std::optional<Tensor>;

// Calls an op of torch and returns its first result; the others are let go.
template <class Result, int kResults = 1, class... Args>
Result call(const char* op, const char* overload, const Args&... args) {
  StableIValue stack[std::max<size_t>(sizeof...(Args), kResults)] = {
      torch::stable::detail::from(args)...};
  if (torch_call_dispatcher(op, overload, stack, TORCH_ABI_VERSION) != 0)
    throw std::runtime_error(std::string("int8_conv: torch reported an error in ") + op);
  for (int i = 1; i < kResults; ++i) torch::stable::detail::to<Tensor>(stack[i]);
  return torch::stable::detail::to<Result>(stack[0]);
}

Tensor full(const Ints& sizes, double value, ScalarType dtype) {
  return torch::stable::full(sizes, value, dtype);
}

// Changes whenever the tensor is written to. Inference tensors do not count that.
int64_t version(const Tensor& x) {
  return call<bool>("aten::is_inference", "", x) ? -1 : call<int64_t>("aten::_version", "", x);
}

struct Geometry {
  double x_scale;
  int64_t x_zero;
  Ints stride, padding, dilation;
  int64_t groups;
};

struct Packed {
  Tensor weight;
  Tensor zeros;  // zero points of the channels
};

// Weights in the layout of oneDNN.
class Cache {
 public:
  Packed find(const Tensor& weight, const Tensor& scale, const Geometry& geometry,
              const Ints& x_sizes) {
    Ints key{reinterpret_cast<int64_t>(weight.const_data_ptr()),
             reinterpret_cast<int64_t>(scale.const_data_ptr()),
             version(weight),
             version(scale),
             std::bit_cast<int64_t>(geometry.x_scale),
             geometry.x_zero,
             geometry.groups};
    const auto append = [&](const auto& values) {
      key.insert(key.end(), values.begin(), values.end());
    };
    append(weight.sizes());
    append(weight.strides());
    append(geometry.stride);
    append(geometry.padding);
    append(geometry.dilation);
    const auto now = std::chrono::steady_clock::now();
    const std::lock_guard lock(mutex_);
    auto found = entries_.find(key);
    if (found == entries_.end()) {
      // The stable ABI cannot tell when a weight dies. Weights of models that are gone are let go
      // here; weights of an idle model are packed again.
      std::erase_if(entries_,
                    [&](const auto& item) { return now - item.second.used > kLongestRest; });
      const Tensor plain = weight.dim() == 3 ? torch::stable::unsqueeze(weight, 2) : weight;
      Packed packed{call<Tensor>("onednn::qconv_prepack", "", plain, scale, geometry.x_scale,
                                 geometry.x_zero, geometry.stride, geometry.padding,
                                 geometry.dilation, geometry.groups, std::optional<Ints>(x_sizes)),
                    full({weight.size(0)}, 0, ScalarType::Long)};
      found = entries_.emplace(std::move(key), Entry{weight, scale, std::move(packed), now}).first;
    }
    found->second.used = now;
    return found->second.packed;
  }

 private:
  static constexpr std::chrono::minutes kLongestRest{1};
  struct Entry {
    Tensor weight, scale;  // kept, so that their addresses belong to no other tensors
    Packed packed;
    std::chrono::steady_clock::time_point used;
  };
  std::mutex mutex_;
  std::map<Ints, Entry> entries_;
};

Cache& cache() {
  // Never freed: torch may be unloaded first.
  static Cache& only = *new Cache;
  return only;
}

// uint8 codes in the memory format of x.
Tensor quantize(const Tensor& x, double scale, int64_t zero) {
  if ((x.dim() == 4 || x.dim() == 5) && !x.is_contiguous()) {
    Ints forth(static_cast<size_t>(x.dim()), 0), back(forth);
    std::iota(forth.begin() + 1, forth.end() - 1, 2);
    forth.back() = 1;
    std::iota(back.begin() + 2, back.end(), 1);
    back[1] = x.dim() - 1;
    const Tensor rows = call<Tensor>("aten::permute", "", x, forth);
    if (rows.is_contiguous())
      return call<Tensor>("aten::permute", "", quantize(rows, scale, zero), back);
  }
  return call<Tensor, 3>(
      "ipex::quantize_per_tensor", "", x, OptionalTensor(full({}, scale, ScalarType::Float)),
      OptionalTensor(full({1}, static_cast<double>(zero), ScalarType::Int)), false);
}

Tensor dequantize(const Tensor& x, double scale, int64_t zero, ScalarType dtype) {
  const Tensor shift = full({}, static_cast<double>(zero), ScalarType::Float);
  const Tensor centered = torch::stable::subtract(torch::stable::to(x, ScalarType::Float), shift);
  const Tensor y =
      call<Tensor>("aten::mul", "Tensor", centered, full({}, scale, ScalarType::Float));
  return torch::stable::to(y, dtype);
}

struct Output {
  double scale;
  int64_t zero;
  ScalarType dtype;
};

// ReLU or ReLU6 of a result; on codes it is as exact as before rounding.
Tensor clamp(const Tensor& y, const std::string& activation, const Output& output) {
  if (activation != "relu" && activation != "relu6") return y;
  double low = 0, high = 6;
  if (y.scalar_type() == ScalarType::Byte) {
    low = static_cast<double>(output.zero);
    high = std::min(std::nearbyint(6 / output.scale) + low, 255.0);
  }
  OptionalTensor upper;
  if (activation == "relu6") upper = full({}, high, y.scalar_type());
  return call<Tensor>("aten::clamp", "Tensor", y, OptionalTensor(full({}, low, y.scalar_type())),
                      upper);
}

struct Operands {
  Tensor codes;
  Geometry geometry;
  Packed packed;
  Tensor weight_scale;
  OptionalTensor bias;
};

// oneDNN's convolution, with an activation that it can compute.
Tensor convolve(const Operands& in, const Output& output, const std::string& activation) {
  const Geometry& g = in.geometry;
  return call<Tensor>("onednn::qconv_pointwise", "", in.codes, g.x_scale, g.x_zero,
                      in.packed.weight, in.weight_scale, in.packed.zeros, in.bias, g.stride,
                      g.padding, g.dilation, g.groups, output.scale, output.zero,
                      std::optional(output.dtype), activation, Ints{},
                      std::optional<std::string>(""));
}

struct Residual {
  Tensor tensor;
  double scale;
  int64_t zero;
  bool free;  // it may be overwritten
};

// The activation of a convolution in two dimensions and a residual.
Tensor convolve_and_add(const Operands& in, const Output& output, const Residual& residual,
                        const std::string& activation) {
  Tensor added = residual.tensor;
  const bool codes = output.dtype == ScalarType::Byte;
  if (!codes && added.scalar_type() == ScalarType::Byte)
    added = dequantize(added, residual.scale, residual.zero, output.dtype);
  const bool to_float = codes && added.scalar_type() != ScalarType::Byte;
  const Output result = to_float ? Output{1, 0, ScalarType::Float} : output;
  // oneDNN adds to what it is given: a copy, if others may read the residual.
  Tensor total = torch::stable::to(added, result.dtype);
  if (total.const_data_ptr() == residual.tensor.const_data_ptr() && !residual.free)
    total = torch::stable::clone(total);
  total = torch::stable::contiguous(total, MemoryFormat::ChannelsLast);
  const bool scaled = result.dtype == ScalarType::Byte;
  const Geometry& g = in.geometry;
  const Tensor y = call<Tensor>(
      "onednn::qconv2d_pointwise", "binary", in.codes, g.x_scale, g.x_zero, in.packed.weight,
      in.weight_scale, in.packed.zeros, total, in.bias, g.stride, g.padding, g.dilation, g.groups,
      result.scale, result.zero, std::optional(result.dtype), scaled ? residual.scale : 1.0,
      scaled ? residual.zero : int64_t{0}, std::string("sum"), std::nullopt,
      std::optional(activation), Ints{}, std::optional<std::string>(""));
  return to_float ? quantize(y, output.scale, output.zero) : y;
}

// Whether the windows of a convolution have one place each and leave some out.
bool sees_single_places(const Tensor& weight, const Ints& stride, const Ints& padding) {
  const auto sizes = weight.sizes();
  return std::all_of(sizes.begin() + 2, sizes.end(), [](int64_t n) { return n == 1; }) &&
         std::any_of(stride.begin(), stride.end(), [](int64_t n) { return n > 1; }) &&
         std::all_of(padding.begin(), padding.end(), [](int64_t n) { return n == 0; });
}

Tensor run(const Tensor& input, const Tensor& weight, const Tensor& weight_scale, double x_scale,
           int64_t x_zero, const OptionalTensor& bias, Ints stride, Ints padding, Ints dilation,
           int64_t groups, const std::string& activation, const Output& output,
           std::optional<Residual> residual) {
  const bool one_d = weight.dim() == 3;
  const auto unsqueeze = [&](Tensor& x, int64_t dim) { x = torch::stable::unsqueeze(x, dim); };
  Tensor x = input;
  if (one_d) {  // oneDNN fuses more after two dimensions than after one
    unsqueeze(x, -2);
    if (residual) unsqueeze(residual->tensor, -2);
    stride.insert(stride.begin(), 1);
    padding.insert(padding.begin(), 0);
    dilation.insert(dilation.begin(), 1);
  }
  const auto dims = static_cast<int64_t>(stride.size());
  const bool single = x.dim() == dims + 1;  // an image
  Tensor codes = x.scalar_type() == ScalarType::Byte ? x : quantize(x, x_scale, x_zero);
  if (single) {
    unsqueeze(codes, 0);
    if (residual) unsqueeze(residual->tensor, 0);
  }
  if (sees_single_places(weight, stride, padding) && codes.size(1) % 16 != 0) {
    // Threads of oneDNN share the buffer to which it copies what such windows see, where channels
    // are not in sixteens.
    for (int64_t d = 0; d < dims; ++d)
      codes = call<Tensor>("aten::slice", "Tensor", codes, d + 2, std::optional<int64_t>(),
                           std::optional<int64_t>(), stride[static_cast<size_t>(d)]);
    if (dims == 3) codes = torch::stable::contiguous(codes, MemoryFormat::ChannelsLast3d);
    stride.assign(stride.size(), 1);
  }
  if (codes.dim() == 4) codes = torch::stable::contiguous(codes, MemoryFormat::ChannelsLast);
  const Ints sizes(codes.sizes().begin(), codes.sizes().end());
  const Geometry geometry{
      x_scale, x_zero, std::move(stride), std::move(padding), std::move(dilation), groups};
  const Operands in{codes, geometry, cache().find(weight, weight_scale, geometry, sizes),
                    weight_scale, bias};
  Tensor y = codes;
  if (dims == 2 && residual) {
    y = convolve_and_add(in, output, *residual, activation);
  } else if (dims == 2 && activation != "relu6") {
    // The stable ABI passes no numbers of ReLU6.
    y = convolve(in, output, activation == "silu" ? "swish" : activation);
  } else if (!residual && activation != "silu") {
    y = clamp(convolve(in, output, "none"), activation, output);
  } else {
    // oneDNN's op has none of this after three dimensions.
    const Output plain{1, 0, ScalarType::Float};
    y = convolve(in, plain, "none");
    if (residual) {
      Tensor added = residual->tensor;
      if (added.scalar_type() == ScalarType::Byte)
        added = dequantize(added, residual->scale, residual->zero, ScalarType::Float);
      y = torch::stable::subtract(y, added, -1);
    }
    y = activation == "silu" ? call<Tensor>("aten::silu", "", y) : clamp(y, activation, plain);
    y = output.dtype == ScalarType::Byte ? quantize(y, output.scale, output.zero)
                                         : torch::stable::to(y, output.dtype);
  }
  if (single) y = torch::stable::squeeze(y, 0);
  return one_d ? torch::stable::squeeze(y, -2) : y;
}

}  // namespace

Tensor int8_conv(const Tensor& x, const Tensor& weight, const Tensor& weight_scale, double x_scale,
                 int64_t x_zero, const OptionalTensor& bias, const Ints& stride,
                 const Ints& padding, const Ints& dilation, int64_t groups,
                 const std::string& activation, ScalarType dtype, double output_scale,
                 int64_t output_zero, const OptionalTensor& residual, double residual_scale,
                 int64_t residual_zero) {
  std::optional<Residual> added;
  if (residual) added = Residual{*residual, residual_scale, residual_zero, false};
  return run(x, weight, weight_scale, x_scale, x_zero, bias, stride, padding, dilation, groups,
             activation, {output_scale, output_zero, dtype}, added);
}

Tensor int8_conv_sum_(const Tensor& x, const Tensor& weight, const Tensor& weight_scale,
                      double x_scale, int64_t x_zero, const OptionalTensor& bias,
                      const Ints& stride, const Ints& padding, const Ints& dilation, int64_t groups,
                      const std::string& activation, ScalarType dtype, double output_scale,
                      int64_t output_zero, const Tensor& residual, double residual_scale,
                      int64_t residual_zero) {
  return run(x, weight, weight_scale, x_scale, x_zero, bias, stride, padding, dilation, groups,
             activation, {output_scale, output_zero, dtype},
             Residual{residual, residual_scale, residual_zero, true});
}

namespace {

Tensor int8_embedding_bag(const Tensor& weight, const Tensor& indices, const Tensor& offsets,
                          const OptionalTensor& per_sample_weights, bool include_last_offset) {
  return call<Tensor>("quantized::embedding_bag_byte_rowwise_offsets", "", weight, indices,
                      OptionalTensor(offsets), false, int64_t{0}, false, per_sample_weights,
                      OptionalTensor(), include_last_offset);
}

using Boxed = void (*)(StableIValue*, uint64_t, uint64_t);

struct Op {
  const char* name;
  const char* schema;
  Boxed kernel;
};

#define IPEX_CONV_SCHEMA(name, residual)                                                          \
  name "(Tensor x, Tensor weight, Tensor weight_scale, float x_scale, int x_zero, Tensor? bias, " \
       "int[] stride, int[] padding, int[] dilation, int groups, str activation, "                \
       "ScalarType dtype, float output_scale, int output_zero, " residual                         \
       " residual, float residual_scale, int residual_zero) -> Tensor"

const Op kOps[] = {
    {"int8_conv", IPEX_CONV_SCHEMA("int8_conv", "Tensor?"), TORCH_BOX(&int8_conv)},
    {"int8_conv_sum_", IPEX_CONV_SCHEMA("int8_conv_sum_", "Tensor(a!)"),
     TORCH_BOX(&int8_conv_sum_)},
    {"int8_embedding_bag",
     "int8_embedding_bag(Tensor weight, Tensor indices, Tensor offsets, "
     "Tensor? per_sample_weights, bool include_last_offset) -> Tensor",
     TORCH_BOX(&int8_embedding_bag)},
};

}  // namespace

void define_int8_ops() {
  // Never freed: the end of a library object would take its ops away from programs that still run.
  TorchLibraryHandle schemas = nullptr, kernels = nullptr;
  if (aoti_torch_library_init_fragment("ipex_quant", "libipex_cpp", 0, &schemas) != 0 ||
      aoti_torch_library_init_impl("ipex_quant", "CPU", "libipex_cpp", 0, &kernels) != 0) {
    std::fprintf(stderr, "libipex_cpp: this torch cannot register the ops of INT8\n");
    return;
  }
  for (const Op& op : kOps) {
    // Fails where ipex_quant has defined the op before, with a kernel of its own.
    if (aoti_torch_library_def(schemas, op.schema) != 0) continue;
    if (torch_library_impl(kernels, op.name, op.kernel, TORCH_ABI_VERSION) != 0)
      std::fprintf(stderr, "libipex_cpp: this torch cannot register ipex_quant::%s\n", op.name);
  }
}

}  // namespace ipex::cpp
