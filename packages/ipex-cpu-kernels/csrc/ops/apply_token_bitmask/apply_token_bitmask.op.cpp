// SPDX-License-Identifier: Apache-2.0
#include "apply_token_bitmask/apply_token_bitmask.h"

#include "ipex/glue/argument_checks.h"
#include "ipex/glue/in_place.h"
#include "ipex/glue/op_loops.h"

namespace ipex {
namespace {

constexpr const char* kOp = "apply_token_bitmask";

const auto kernels = IPEX_KERNELS(kOp, apply_token_bitmask);

void apply_token_bitmask(const Tensor& logits, const Tensor& bitmask) {
  check_tensor(kOp, "logits", logits);
  check_not_expanded(kOp, "logits", logits);
  IPEX_CHECK(bitmask.is_cpu(), kOp, ": bitmask must be on the device of logits = cpu");
  IPEX_CHECK(bitmask.scalar_type() == ScalarType::Int, kOp, ": bitmask must have dtype int32, got ",
             dtype_name(bitmask.scalar_type()));
  const int64_t last = logits.dim() - 1, columns = logits.size(last), words = (columns + 31) / 32;
  bool fits = bitmask.dim() == logits.dim() && bitmask.size(last) == words;
  for (int64_t i = 0; fits && i < last; ++i) fits = bitmask.size(i) == logits.size(i);
  IPEX_CHECK(fits, kOp,
             ": bitmask must have the shape of logits with 32 of its columns in each word, got ",
             shape_text(bitmask));
  InPlace place(logits, as_contiguous(logits));
  const Tensor bits = as_contiguous(bitmask);
  const auto* from = static_cast<const int32_t*>(bits.const_data_ptr());
  const int64_t rows = columns > 0 ? logits.numel() / columns : 0;
  kernels.visit(logits.scalar_type(), [&]<class T>(auto* kernel) {
    auto* x = static_cast<T*>(place.tensor().mutable_data_ptr());
    parallel_for(rows, row_grain<T>(std::max<int64_t>(columns, 1)),
                 [&](int64_t begin, int64_t end) {
                   for (int64_t r = begin; r < end; ++r)
                     kernel(x + r * columns, from + r * words, columns);
                 });
  });
  place.finish();
}

}  // namespace
}  // namespace ipex

STABLE_TORCH_LIBRARY_IMPL(ipex, CPU, m) {
  IPEX_IMPL(m, "apply_token_bitmask", ipex::apply_token_bitmask);
}
