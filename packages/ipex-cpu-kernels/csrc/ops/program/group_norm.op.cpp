// SPDX-License-Identifier: Apache-2.0
#include "program/group_norm.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "ipex/glue/image.h"
#include "ipex/glue/op_loops.h"
#include "program/scalars.h"

namespace ipex::program {
namespace {

const auto group_kernels = IPEX_KERNELS("program", group_norm);
const auto sums_kernels = IPEX_KERNELS("program", group_norm_sums);
const auto scale_kernels = IPEX_KERNELS("program", group_norm_scale);

constexpr const char* kOp = "group_norm";

const float* read_vector(const char* name, const OptionalTensor& value, int64_t channels) {
  if (!value) return nullptr;
  IPEX_CHECK(value->scalar_type() == ScalarType::Float, kOp, ": ", name,
             " must have dtype float32, got ", dtype_name(value->scalar_type()));
  IPEX_CHECK(value->dim() == 1 && value->size(0) == channels && value->is_contiguous(), kOp, ": ",
             name, " must be contiguous of shape [", channels, "], got ", shape_text(*value));
  return static_cast<const float*>(value->const_data_ptr());
}

// Sums over the blocks of one image -> what scales and shifts each channel.
void finish(const GroupNormCall& call, const float* sums, int64_t blocks, const float* pivot,
            float* factors) {
  const int64_t channels = call.channels, width = channels / call.groups;
  const auto places = static_cast<double>(call.places);
  std::vector<double> mean(static_cast<size_t>(width)), squares(static_cast<size_t>(width));
  for (int64_t first = 0; first < channels; first += width) {
    double center = 0, spread = 0;
    for (int64_t i = 0; i < width; ++i) {
      const auto k = static_cast<size_t>(i);
      double sum = 0, square = 0;
      for (int64_t b = 0; b < blocks; ++b) {
        sum += static_cast<double>(sums[2 * channels * b + first + i]);
        square += static_cast<double>(sums[2 * channels * b + channels + first + i]);
      }
      mean[k] = static_cast<double>(pivot[first + i]) + sum / places;
      squares[k] = square - sum * sum / places;
      center += mean[k] / static_cast<double>(width);
    }
    for (size_t k = 0; k < mean.size(); ++k)
      spread += std::max(squares[k], 0.0) + places * (mean[k] - center) * (mean[k] - center);
    const double variance = spread / (places * static_cast<double>(width));
    const double factor = 1.0 / std::sqrt(variance + static_cast<double>(call.eps));
    for (int64_t c = first; c < first + width; ++c) {
      const double scale = call.weight ? static_cast<double>(call.weight[c]) * factor : factor;
      const double bias = call.bias ? static_cast<double>(call.bias[c]) : 0.0;
      factors[c] = static_cast<float>(scale);
      factors[channels + c] = static_cast<float>(bias - center * scale);
    }
  }
}

// Channels side by side. The places lie in blocks whose size does not depend on the threads, so
// that the result does not either. The sums are of the distances to the first place of an image:
// sums of squares of large values that differ little would lose the difference.
void normalize_channels(const GroupNormCall& call, const Tensor& x, const Tensor& y) {
  constexpr int64_t kBlock = 128;
  const int64_t channels = call.channels, places = call.places, images = x.size(0);
  const int64_t blocks = (places + kBlock - 1) / kBlock, room = 2 * channels;
  std::vector<float> sums(static_cast<size_t>(images * blocks * room));
  std::vector<float> factors(static_cast<size_t>(images * room));
  // f(block, image, offset of its first element, places)
  const auto each_block = [&]<class T>(const T*, const auto& f) {
    parallel_for(images * blocks, row_grain<T>(channels * kBlock), [&](int64_t begin, int64_t end) {
      for (int64_t b = begin; b < end; ++b) {
        const int64_t image = b / blocks, first = b % blocks * kBlock;
        f(b, image, (image * places + first) * channels, std::min(kBlock, places - first));
      }
    });
  };
  sums_kernels.visit(x.scalar_type(), [&]<class T>(auto* kernel) {
    const T* from = static_cast<const T*>(x.const_data_ptr());
    each_block(from, [&](int64_t b, int64_t image, int64_t at, int64_t count) {
      kernel(from + at, from + image * places * channels, count, channels, sums.data() + b * room);
    });
    std::vector<float> pivot(static_cast<size_t>(channels));
    for (int64_t i = 0; i < images; ++i) {
      for (int64_t c = 0; c < channels; ++c)
        pivot[static_cast<size_t>(c)] = load(from[i * places * channels + c]);
      finish(call, sums.data() + i * blocks * room, blocks, pivot.data(),
             factors.data() + i * room);
    }
  });
  scale_kernels.visit(x.scalar_type(), [&]<class T>(auto* kernel) {
    const T* from = static_cast<const T*>(x.const_data_ptr());
    T* to = static_cast<T*>(y.mutable_data_ptr());
    each_block(from, [&](int64_t, int64_t image, int64_t at, int64_t count) {
      kernel(from + at, factors.data() + image * room, count, channels, to + at);
    });
  });
}

Tensor group_norm(const Tensor& x0, int64_t groups, const OptionalTensor& weight,
                  const OptionalTensor& bias, double eps) {
  check_tensor(kOp, "x", x0, 2);
  IPEX_CHECK(groups > 0, kOp, ": groups must be positive, got ", groups);
  IPEX_CHECK(x0.size(1) > 0 && x0.size(1) % groups == 0, kOp,
             ": x must have a multiple of groups = ", groups, " channels, got ", shape_text(x0));
  GroupNormCall call{};
  call.channels = x0.size(1);
  call.groups = groups;
  call.eps = static_cast<float>(eps);
  call.weight = read_vector("weight", weight, call.channels);
  call.bias = read_vector("bias", bias, call.channels);
  const bool last = is_channels_last(x0);
  const Tensor x = last ? x0 : as_contiguous(x0);
  Tensor y = last ? new_image(x.size(0), x.size(1), x.size(2), x.size(3), true, x.scalar_type())
                  : new_contiguous_like(x);
  if (y.numel() == 0) return y;
  call.places = y.numel() / x.size(0) / call.channels;
  if (last) {
    normalize_channels(call, x, y);
    return y;
  }
  group_kernels.visit(x.scalar_type(), [&]<class T>(auto* kernel) {
    const T* from = static_cast<const T*>(x.const_data_ptr());
    T* to = static_cast<T*>(y.mutable_data_ptr());
    const int64_t size = call.channels / groups * call.places;
    parallel_for(x.size(0) * groups, row_grain<T>(2 * size),
                 [&](int64_t begin, int64_t end) { kernel(&call, from, to, begin, end); });
  });
  return y;
}

const bool registered = [] {
  add("group_norm", Adapter<&group_norm>::entry());
  return true;
}();

}  // namespace
}  // namespace ipex::program
