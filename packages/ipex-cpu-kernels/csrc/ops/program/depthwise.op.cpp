// SPDX-License-Identifier: Apache-2.0
#include "program/depthwise.h"

#include <string>
#include <vector>

#include "ipex/glue/argument_checks.h"
#include "ipex/glue/image.h"
#include "ipex/glue/op_loops.h"
#include "linear/epilogue_check.h"

namespace ipex::program {
namespace {

const auto kernels = IPEX_KERNELS("program", depthwise);

constexpr const char* kOp = "depthwise_convolution";

void read_pair(const char* name, const std::vector<int64_t>& values, int64_t lowest,
               int64_t* pair) {
  constexpr int64_t kMost = 4096;  // beyond it sizes could overflow
  IPEX_CHECK(values.size() == 2, kOp, ": ", name, " must have 2 numbers, got ", values.size());
  for (int i = 0; i < 2; ++i) {
    pair[i] = values[static_cast<size_t>(i)];
    IPEX_CHECK(pair[i] >= lowest && pair[i] <= kMost, kOp, ": ", name, " must be in [", lowest,
               ", ", kMost, "], got ", pair[i]);
  }
}

Tensor depthwise_convolution(const Tensor& x0, const Tensor& weight0, const OptionalTensor& bias,
                             const std::vector<int64_t>& stride,
                             const std::vector<int64_t>& padding,
                             const std::vector<int64_t>& dilation, const std::string& activation) {
  DepthwiseCall call{};
  read_pair("stride", stride, 1, call.step);
  read_pair("padding", padding, 0, call.pad);
  read_pair("dilation", dilation, 1, call.spread);
  IPEX_CHECK(parse_activation(activation, &call.epilogue.activation), kOp,
             ": activation must be one of none, relu, gelu, gelu_tanh, silu, got ", activation);
  check_tensor(kOp, "x", x0, 0);
  IPEX_CHECK(x0.dim() == 4 && x0.size(1) > 0, kOp,
             ": x must be 4-D [N, C, H, W] with C > 0, got shape ", shape_text(x0));
  call.channels = x0.size(1);
  call.height = x0.size(2);
  call.width = x0.size(3);
  check_kind(kOp, "weight", weight0, x0, "x", false);
  const bool fits = weight0.dim() == 3 && weight0.size(0) > 0 && weight0.size(1) > 0 &&
                    weight0.size(2) == call.channels;
  IPEX_CHECK(fits, kOp, ": weight must be 3-D [KH, KW, C] with KH, KW > 0 and C = ", call.channels,
             ", got shape ", shape_text(weight0));
  int64_t out[2];
  for (int i = 0; i < 2; ++i) {
    call.window[i] = weight0.size(i);
    const int64_t window = call.spread[i] * (call.window[i] - 1) + 1, size = x0.size(2 + i);
    const int64_t room = size + 2 * call.pad[i] - window;
    IPEX_CHECK(size > 0 && room >= 0, kOp, ": x must have room for a window of ", window,
               " in dimension ", 2 + i, ", got ", shape_text(x0));
    out[i] = room / call.step[i] + 1;
  }
  call.rows = out[0];
  call.columns = out[1];
  check_shaped(kOp, "bias", bias, {call.channels}, x0, "x", true);
  const Vector values(bias);
  call.epilogue.bias = values.data;
  call.epilogue.bias_is_f32 = values.is_f32;
  const Tensor x = as_channels_last(x0), weight = as_contiguous(weight0);
  Tensor y = new_image(x.size(0), call.channels, call.rows, call.columns, true, x.scalar_type());
  if (y.numel() == 0) return y;
  kernels.visit(x.scalar_type(), [&]<class T>(auto* kernel) {
    const T* from = static_cast<const T*>(x.const_data_ptr());
    const T* w = static_cast<const T*>(weight.const_data_ptr());
    T* to = static_cast<T*>(y.mutable_data_ptr());
    const int64_t work = call.columns * call.channels * call.window[0] * call.window[1];
    // A product takes less time than an element of input elsewhere.
    parallel_for(x.size(0) * call.rows, row_grain<T>((work + 7) / 8),
                 [&](int64_t begin, int64_t end) { kernel(&call, from, w, to, begin, end); });
  });
  return y;
}

const bool registered = [] {
  add(kOp, Adapter<&depthwise_convolution>::entry());
  return true;
}();

}  // namespace
}  // namespace ipex::program
