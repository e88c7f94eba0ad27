// SPDX-License-Identifier: Apache-2.0
#include "argmax/argmax.h"

#include <vector>

#include "ipex/glue/deferred.h"
#include "ipex/glue/op_loops.h"

namespace ipex {
namespace {

const auto kernels = IPEX_KERNELS("argmax", argmax);

struct Best {
  int64_t index;
  float value;
};

Tensor argmax(const Tensor& x) {
  check_tensor("argmax", "x", x);
  const int64_t columns = x.size(x.dim() - 1);
  IPEX_CHECK(columns > 0, "argmax: x must have a last dimension that is not empty, got ",
             shape_text(x));
  Tensor y = new_contiguous(x.sizes().data(), x.dim() - 1, ScalarType::Long);
  if (x.numel() == 0) return y;
  const Rows in = as_rows(x);
  auto* to = static_cast<int64_t*>(y.mutable_data_ptr());
  kernels.visit(x.scalar_type(), [&]<class T>(auto* kernel) {
    const T* from = static_cast<const T*>(in.data);
    // Long rows are cut so that one row, too, keeps all threads busy.
    constexpr int64_t kPiece = kPieceBytes / static_cast<int64_t>(sizeof(T));
    const int64_t pieces = (columns + kPiece - 1) / kPiece;
    std::vector<Best> found(static_cast<size_t>(in.rows * pieces));
    Best* best = found.data();
    parallel_for(
        in.rows * pieces, row_grain<T>(std::min(columns, kPiece)), [&](int64_t begin, int64_t end) {
          for (int64_t i = begin; i < end; ++i) {
            const int64_t first = i % pieces * kPiece;
            best[i].index = first + kernel(from + i / pieces * in.stride + first,
                                           std::min(kPiece, columns - first), &best[i].value);
          }
        });
    for (int64_t r = 0; r < in.rows; ++r) {
      const Best* row = best + r * pieces;
      int64_t winner = 0;
      for (int64_t i = 1; i < pieces && row[winner].value == row[winner].value; ++i)
        if (!(row[i].value <= row[winner].value)) winner = i;  // larger, or the first NaN
      to[r] = row[winner].index;
    }
  });
  return y;
}

// vLLM's logits have one dimension or two, and its result one.
const Deferred argmax_in_vllm("_C", "greedy_argmax(Tensor logits) -> Tensor", TORCH_BOX(&argmax));

}  // namespace
}  // namespace ipex

STABLE_TORCH_LIBRARY_IMPL(ipex, CPU, m) { IPEX_IMPL(m, "argmax", ipex::argmax); }
