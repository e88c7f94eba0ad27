// SPDX-License-Identifier: Apache-2.0
#include "program/pool.h"

#include <algorithm>

#include "ipex/glue/image.h"
#include "ipex/glue/op_loops.h"

namespace ipex::program {
namespace {

const auto channels_kernels = IPEX_KERNELS("program", pool_channels);
const auto planes_kernels = IPEX_KERNELS("program", pool_planes);

// One or two numbers as two.
void read_pair(const char* op, const char* name, const std::vector<int64_t>& values, int64_t least,
               bool may_be_empty, int64_t* pair) {
  IPEX_CHECK(values.size() <= 2 && (may_be_empty || !values.empty()), op, ": ", name, " must have ",
             may_be_empty ? "0, 1 or 2" : "1 or 2", " numbers, got ", values.size());
  for (const int64_t value : values)
    IPEX_CHECK(value >= least, op, ": ", name, " must be at least ", least, ", got ", value);
  if (values.empty()) return;
  pair[0] = values.front();
  pair[1] = values.back();
}

// The number of windows along a dimension.
int64_t windows(int64_t size, int64_t window, int64_t step, int64_t pad, int64_t spread,
                bool ceil_mode) {
  const int64_t room = size + 2 * pad - spread * (window - 1) - 1 + (ceil_mode ? step - 1 : 0);
  const int64_t count = room / step + 1;
  // None that begins behind the image and the padding before it.
  return ceil_mode && (count - 1) * step >= size + pad ? count - 1 : count;
}

Tensor pool(const char* op, const Tensor& x0, PoolCall& call,
            const std::vector<int64_t>& kernel_size, const std::vector<int64_t>& stride,
            const std::vector<int64_t>& padding, const std::vector<int64_t>& dilation,
            bool ceil_mode) {
  read_pair(op, "kernel_size", kernel_size, 1, false, call.window);
  std::copy_n(call.window, 2, call.step);
  read_pair(op, "stride", stride, 1, true, call.step);
  read_pair(op, "padding", padding, 0, false, call.pad);
  for (int i = 0; i < 2; ++i)
    IPEX_CHECK(2 * call.pad[i] <= call.window[i], op,
               ": padding must be at most half of kernel_size = ", call.window[i], ", got ",
               call.pad[i]);
  read_pair(op, "dilation", dilation, 1, false, call.spread);
  check_tensor(op, "x", x0, 0);
  IPEX_CHECK(x0.dim() == 4, op, ": x must be 4-D, got ", x0.dim(), "-D");
  for (int i = 0; i < 2; ++i) {
    const int64_t window = call.spread[i] * (call.window[i] - 1) + 1, size = x0.size(2 + i);
    const int64_t room = size + 2 * call.pad[i] - window + (ceil_mode ? call.step[i] - 1 : 0);
    IPEX_CHECK(size > 0 && room >= 0 && x0.size(1) > 0, op, ": x must have room for a window of ",
               window, " in dimension ", 2 + i, ", got ", shape_text(x0));
  }
  const bool last = is_channels_last(x0);
  const Tensor x = last ? x0 : as_contiguous(x0);
  call.channels = x.size(1);
  call.height = x.size(2);
  call.width = x.size(3);
  call.rows =
      windows(call.height, call.window[0], call.step[0], call.pad[0], call.spread[0], ceil_mode);
  call.columns =
      windows(call.width, call.window[1], call.step[1], call.pad[1], call.spread[1], ceil_mode);
  Tensor y = new_image(x.size(0), call.channels, call.rows, call.columns, last, x.scalar_type());
  if (y.numel() == 0) return y;
  const int64_t count = x.size(0) * call.rows * (last ? 1 : call.channels);
  const int64_t columns = y.numel() / count;
  (last ? channels_kernels : planes_kernels).visit(x.scalar_type(), [&]<class T>(auto* kernel) {
    const T* from = static_cast<const T*>(x.const_data_ptr());
    T* to = static_cast<T*>(y.mutable_data_ptr());
    parallel_for(count, row_grain<T>(columns * call.window[0] * call.window[1]),
                 [&](int64_t begin, int64_t end) { kernel(&call, from, to, begin, end); });
  });
  return y;
}

Tensor max_pool2d(const Tensor& x, const std::vector<int64_t>& kernel_size,
                  const std::vector<int64_t>& stride, const std::vector<int64_t>& padding,
                  const std::vector<int64_t>& dilation, bool ceil_mode) {
  PoolCall call{};
  return pool("max_pool2d", x, call, kernel_size, stride, padding, dilation, ceil_mode);
}

Tensor avg_pool2d(const Tensor& x, const std::vector<int64_t>& kernel_size,
                  const std::vector<int64_t>& stride, const std::vector<int64_t>& padding,
                  bool ceil_mode, bool count_include_pad, std::optional<int64_t> divisor_override) {
  IPEX_CHECK(!divisor_override || *divisor_override != 0,
             "avg_pool2d: divisor_override must not be 0, got 0");
  PoolCall call{};
  call.average = true;
  call.divisor = divisor_override.value_or(0);
  call.count_padding = count_include_pad;
  return pool("avg_pool2d", x, call, kernel_size, stride, padding, {1}, ceil_mode);
}

const bool registered = [] {
  add("max_pool2d", Adapter<&max_pool2d>::entry());
  add("avg_pool2d", Adapter<&avg_pool2d>::entry());
  return true;
}();

}  // namespace
}  // namespace ipex::program
