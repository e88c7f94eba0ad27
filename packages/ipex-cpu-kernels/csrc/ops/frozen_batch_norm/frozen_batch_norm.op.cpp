// SPDX-License-Identifier: Apache-2.0
#include "frozen_batch_norm/frozen_batch_norm.h"

#include <cmath>
#include <vector>

#include "ipex/glue/argument_checks.h"
#include "ipex/glue/image.h"
#include "ipex/glue/op_loops.h"

namespace ipex {
namespace {

const auto kernels = IPEX_KERNELS("frozen_batch_norm", channel_affine);

Tensor frozen_batch_norm(const Tensor& x, const Tensor& weight, const Tensor& bias,
                         const Tensor& running_mean, const Tensor& running_var, double eps) {
  const char* op = "frozen_batch_norm";
  check_tensor(op, "x", x, 2);
  const int64_t channels = x.size(1);
  check_shaped(op, "weight", weight, {channels}, x, "x", true);
  check_shaped(op, "bias", bias, {channels}, x, "x", true);
  check_shaped(op, "running_mean", running_mean, {channels}, x, "x", true);
  check_shaped(op, "running_var", running_var, {channels}, x, "x", true);

  const bool last = is_channels_last(x);
  Tensor y = last ? new_image(x.size(0), channels, x.size(2), x.size(3), true, x.scalar_type())
                  : new_contiguous_like(x);
  if (x.numel() == 0) return y;
  const Tensor from = last ? x : as_contiguous(x);
  const Tensor w = as_float_contiguous(weight), b = as_float_contiguous(bias);
  const Tensor mean = as_float_contiguous(running_mean), var = as_float_contiguous(running_var);
  const auto* pw = static_cast<const float*>(w.const_data_ptr());
  const auto* pb = static_cast<const float*>(b.const_data_ptr());
  const auto* pm = static_cast<const float*>(mean.const_data_ptr());
  const auto* pv = static_cast<const float*>(var.const_data_ptr());
  std::vector<float> scale(static_cast<size_t>(channels)), shift(scale.size());
  for (size_t c = 0; c < scale.size(); ++c) {
    scale[c] = pw[c] / std::sqrt(pv[c] + static_cast<float>(eps));
    shift[c] = pb[c] - pm[c] * scale[c];
  }
  int64_t pixels = 1;
  for (int64_t i = 2; i < x.dim(); ++i) pixels *= x.size(i);
  // One number per channel and image is the same matrix as with the channels side by side.
  const bool rows_are_channels = !last && pixels > 1;
  const ChannelAffineArgs args{
      .x = from.const_data_ptr(),
      .scale = scale.data(),
      .shift = shift.data(),
      .y = y.mutable_data_ptr(),
      .columns = rows_are_channels ? pixels : channels,
      .channels = channels,
      .rows_are_channels = rows_are_channels,
  };
  kernels.visit(x.scalar_type(), [&]<class T>(auto* kernel) {
    parallel_for(x.numel() / args.columns, row_grain<T>(args.columns),
                 [&](int64_t begin, int64_t end) { kernel(&args, begin, end); });
  });
  return y;
}

}  // namespace
}  // namespace ipex

STABLE_TORCH_LIBRARY_IMPL(ipex, CPU, m) {
  IPEX_IMPL(m, "frozen_batch_norm", ipex::frozen_batch_norm);
}
