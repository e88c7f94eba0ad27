// SPDX-License-Identifier: Apache-2.0
#include "ipex/glue/dispatch.h"
#include "linear/epilogue_check.h"
#include "linear/run_linear.h"
#include "packed_check.h"

namespace ipex {
namespace {

const auto kernels = IPEX_KERNELS("linear", linear);

Tensor linear(const Tensor& x, const Tensor& packed_weight, int64_t out_features,
              const OptionalTensor& bias, const OptionalTensor& residual, std::string activation,
              const OptionalTensor& mul, const OptionalTensor& residual2, std::string gate) {
  check_tensor("linear", "x", x);
  IPEX_CHECK(out_features > 0, "linear: out_features must be positive, got ", out_features);
  const int64_t k = x.size(x.dim() - 1);
  CheckedEpilogue epilogue("linear", {bias, mul, residual, residual2, activation, gate});
  const int64_t n = epilogue.weight_rows(out_features);
  check_packed("linear", "packed_weight", packed_weight, n, k, x.scalar_type());
  epilogue.check(x, out_features);

  Tensor y = new_like(x, out_features);
  const Rows rows = as_rows(x);
  LinearArgs args{};
  args.x = rows.data;
  args.x_stride = rows.stride;
  args.weight = static_cast<const char*>(packed_weight.const_data_ptr()) + sizeof(PackedHeader);
  args.epilogue = epilogue.args;
  args.y = y.mutable_data_ptr();
  args.n = args.y_stride = out_features;
  args.k = k;

  const GemmShape shape{rows.rows, (n + kPackedPanel - 1) / kPackedPanel, k,
                        epilogue.args.gated ? 2 : 1, uses_tiles(x.scalar_type())};
  run_linear(kernels, x.scalar_type(), args, shape);
  return y;
}

}  // namespace
}  // namespace ipex

STABLE_TORCH_LIBRARY_IMPL(ipex, CPU, m) { IPEX_IMPL(m, "linear", ipex::linear); }
