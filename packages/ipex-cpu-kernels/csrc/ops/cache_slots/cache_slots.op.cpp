// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdint>
#include <vector>

#include "ipex/glue/deferred.h"
#include "ipex/glue/kv_glue.h"
#include "ipex/glue/op_loops.h"

namespace ipex {
namespace {

constexpr const char* kOp = "cache_slots";

void check_indices(const char* name, const Tensor& value, int64_t dim) {
  IPEX_CHECK(value.is_cpu(), kOp, ": ", name, " must be on the device of query_start_loc = cpu");
  IPEX_CHECK(is_index_dtype(value.scalar_type()), kOp, ": ", name,
             " must have dtype int32, int64, got ", dtype_name(value.scalar_type()));
  IPEX_CHECK(value.dim() == dim, kOp, ": ", name, " must be ", dim, "-D, got ", value.dim(), "-D");
}

// A row of a table without a copy: tables are wide, and a step reads few of their numbers.
class Table {
 public:
  explicit Table(const Tensor& table)
      : data_(table.const_data_ptr()),
        row_(table.stride(0)),
        column_(table.stride(1)),
        wide_(table.scalar_type() == ScalarType::Long) {}
  int64_t at(int64_t row, int64_t column) const {
    const int64_t i = row * row_ + column * column_;
    return wide_ ? static_cast<const int64_t*>(data_)[i] : static_cast<const int32_t*>(data_)[i];
  }

 private:
  const void* data_;
  int64_t row_, column_;
  bool wide_;
};

void cache_slots(const Tensor& query_start_loc, const Tensor& positions, const Tensor& block_table,
                 const Tensor& slot_mapping, int64_t block_size) {
  check_indices("query_start_loc", query_start_loc, 1);
  check_indices("positions", positions, 1);
  check_indices("block_table", block_table, 2);
  IPEX_CHECK(slot_mapping.is_cpu(), kOp,
             ": slot_mapping must be on the device of query_start_loc = cpu");
  IPEX_CHECK(slot_mapping.scalar_type() == ScalarType::Long, kOp,
             ": slot_mapping must have dtype int64, got ", dtype_name(slot_mapping.scalar_type()));
  IPEX_CHECK(slot_mapping.dim() == 1, kOp, ": slot_mapping must be 1-D, got ", slot_mapping.dim(),
             "-D");
  check_not_expanded(kOp, "slot_mapping", slot_mapping);
  IPEX_CHECK(block_size > 0, kOp, ": block_size must be positive, got ", block_size);
  const int64_t count = query_start_loc.numel() - 1;
  IPEX_CHECK(count >= 0 && count <= block_table.size(0), kOp,
             ": query_start_loc must have between 1 and ", block_table.size(0) + 1,
             " offsets, got ", query_start_loc.numel());
  const Indices offsets(query_start_loc), places(positions);
  const int64_t most = std::min(positions.numel(), slot_mapping.numel());
  int64_t before = 0;
  for (int64_t i = 0; i <= count; ++i) {
    IPEX_CHECK(offsets[i] >= before && offsets[i] <= most, kOp,
               ": query_start_loc must hold rising offsets in [0, ", most, "], got ", offsets[i]);
    before = offsets[i];
  }
  const Table table(block_table);
  const int64_t rows = block_table.size(1) * block_size, stride = slot_mapping.stride(0);
  // Nothing is written before all positions are known to fit.
  std::vector<int64_t> slots(static_cast<size_t>(slot_mapping.numel()), -1);
  for (int64_t s = 0; s < count; ++s)
    for (int64_t t = offsets[s]; t < offsets[s + 1]; ++t) {
      const int64_t place = places[t];
      IPEX_CHECK(place >= 0 && place < rows, kOp, ": positions must be in [0, ", rows,
                 ") = columns of block_table * block_size, got ", place);
      slots[static_cast<size_t>(t)] =
          table.at(s, place / block_size) * block_size + place % block_size;
    }
  auto* to = static_cast<int64_t*>(slot_mapping.mutable_data_ptr());
  for (int64_t t = 0; t < slot_mapping.numel(); ++t) to[t * stride] = slots[static_cast<size_t>(t)];
}

// Nothing to do: memory goes to the node of the pinned thread that touches it first.
void init_cpu_memory_env(std::vector<int64_t> /* nodes */) {}

const KernelBase in_glue(kOp);
const Deferred memory_in_vllm("_C", "init_cpu_memory_env(int[] nodes) -> ()",
                              TORCH_BOX(&init_cpu_memory_env), "CompositeExplicitAutograd");
const Deferred slots_in_vllm("_C",
                             "compute_slot_mapping_kernel_impl(Tensor query_start_loc, Tensor "
                             "positions, Tensor block_table, Tensor(a!) slot_mapping, int "
                             "block_size) -> ()",
                             TORCH_BOX(&cache_slots));

}  // namespace
}  // namespace ipex

STABLE_TORCH_LIBRARY_IMPL(ipex, CPU, m) { IPEX_IMPL(m, "cache_slots", ipex::cache_slots); }
