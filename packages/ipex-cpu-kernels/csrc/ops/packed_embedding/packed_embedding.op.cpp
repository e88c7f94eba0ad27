// SPDX-License-Identifier: Apache-2.0
// Rows of a packed linear weight. Pure data movement, bound by the cache lines that a row is
// spread over: one version for all levels.
#include <algorithm>
#include <cstring>
#include <vector>

#include "ipex/glue/dispatch.h"
#include "ipex/glue/kv_glue.h"
#include "ipex/glue/op_loops.h"
#include "linear/packed_check.h"

namespace ipex {
namespace {

constexpr const char* kOp = "packed_embedding";
const KernelBase embedding_op(kOp);

// Copies column j of a panel: `units` elements of type Unit, a panel's width apart.
template <class Unit>
void copy_column(const char* panel, int64_t j, int64_t units, char* to) {
  constexpr int64_t kStep = kPackedPanel * static_cast<int64_t>(sizeof(Unit));
  const char* from = panel + j * static_cast<int64_t>(sizeof(Unit));
  for (int64_t i = 0; i < units; ++i)
    std::memcpy(to + i * static_cast<int64_t>(sizeof(Unit)), from + i * kStep, sizeof(Unit));
}

struct Packed {
  const char* panels;
  int64_t k;
  uint32_t format;

  int64_t element_bytes() const { return format == 0 ? 4 : 2; }
  void copy_row(int64_t row, char* to) const {
    const int64_t inner = packed_inner(format);
    const int64_t units = (k + inner - 1) / inner;
    const char* panel =
        panels + row / kPackedPanel * (units * inner * kPackedPanel * element_bytes());
    const int64_t j = row % kPackedPanel;
    if (format == 2) {
      copy_column<uint16_t>(panel, j, k, to);
    } else {  // numbers, or pairs of 16-bit ones
      copy_column<uint32_t>(panel, j, k / inner, to);
      if (k % inner) {
        const int64_t step = kPackedPanel * static_cast<int64_t>(sizeof(uint32_t));
        std::memcpy(to + (k - 1) * 2, panel + (units - 1) * step + j * 4, 2);
      }
    }
  }
};

Tensor embedding(const Tensor& packed, const Tensor& ids, int64_t rows, int64_t columns,
                 ScalarType dtype) {
  IPEX_CHECK(is_kernel_dtype(dtype), kOp, ": dtype must be float32, bfloat16 or float16, got ",
             dtype_name(dtype));
  IPEX_CHECK(rows > 0, kOp, ": num_embeddings must be positive, got ", rows);
  IPEX_CHECK(columns > 0, kOp, ": embedding_dim must be positive, got ", columns);
  check_packed(kOp, "packed", packed, rows, columns, dtype);
  IPEX_CHECK(ids.is_cpu(), kOp, ": ids must be on the device of packed = cpu");
  IPEX_CHECK(is_index_dtype(ids.scalar_type()), kOp, ": ids must have dtype int32, int64, got ",
             dtype_name(ids.scalar_type()));
  const Indices index(ids);
  const int64_t count = ids.numel();
  for (int64_t i = 0; i < count; ++i)
    IPEX_CHECK(index[i] >= 0 && index[i] < rows, kOp, ": ids must hold rows in [0, ", rows,
               "), got ", index[i]);
  std::vector<int64_t> sizes(static_cast<size_t>(ids.dim()) + 1, columns);
  for (int64_t d = 0; d < ids.dim(); ++d) sizes[static_cast<size_t>(d)] = ids.size(d);
  Tensor out = new_contiguous(sizes.data(), ids.dim() + 1, dtype);
  const Packed from{static_cast<const char*>(packed.const_data_ptr()) + sizeof(PackedHeader),
                    columns, format_of(dtype)};
  const int64_t bytes = columns * from.element_bytes();
  char* to = static_cast<char*>(out.mutable_data_ptr());
  // Each element of a row lies in a cache line of its own, so a row costs several times its size.
  const int64_t grain = std::max<int64_t>(1, kPieceBytes / (8 * bytes));
  parallel_for(count, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) from.copy_row(index[i], to + i * bytes);
  });
  return out;
}

}  // namespace
}  // namespace ipex

STABLE_TORCH_LIBRARY_IMPL(ipex, CPU, m) { IPEX_IMPL(m, "packed_embedding", ipex::embedding); }
