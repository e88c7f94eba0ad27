// SPDX-License-Identifier: Apache-2.0
#include "rotary_glue.h"

namespace ipex {
namespace {

constexpr const char* kOp = "rotary_embedding_and_cache";
const auto kernels = IPEX_KERNELS(kOp, rotary);

void check_cache_shape(const Tensor& key_cache, const Tensor& key) {
  const int64_t heads = key.size(key.dim() - 2), size = key.size(key.dim() - 1);
  IPEX_CHECK(key_cache.size(1) == heads && key_cache.size(3) == size, kOp,
             ": key_cache must have shape [num_blocks, ", heads, ", block_size, ", size, "], got ",
             shape_text(key_cache));
}

// Where in the cache each token goes: slot = block * block_size + row.
std::vector<int64_t> find_slots(const OptionalTensor& slot_mapping,
                                const OptionalTensor& position_ids, const RotaryRows& rows,
                                const Tensor& query, const Tokens& tokens, const Tensor& cache) {
  const int64_t block_size = cache.size(2);
  std::vector<int64_t> slots(static_cast<size_t>(tokens.count));
  if (slot_mapping) {
    check_index_tensor(kOp, "slot_mapping", *slot_mapping, 1);
    IPEX_CHECK(slot_mapping->size(0) == tokens.count, kOp,
               ": slot_mapping must have an entry for each of ", tokens.count, " tokens, got ",
               shape_text(*slot_mapping));
    const int64_t end = cache.size(0) * block_size;
    const Indices given(*slot_mapping);
    for (int64_t t = 0; t < tokens.count; ++t) {
      IPEX_CHECK(given[t] < end, kOp, ": slot_mapping must hold slots below num_blocks * ",
                 "block_size = ", end, ", got ", given[t]);
      slots[static_cast<size_t>(t)] = given[t];
    }
    return slots;
  }
  IPEX_CHECK(query.dim() == 4, kOp, ": query must be 4-D without slot_mapping, got ", query.dim(),
             "-D");
  IPEX_CHECK(position_ids.has_value(), kOp,
             ": position_ids must be given without slot_mapping, got None");
  IPEX_CHECK(cache.size(0) >= tokens.batch, kOp, ": key_cache must have a block for each of ",
             tokens.batch, " sequences without slot_mapping, got ", shape_text(cache));
  for (int64_t t = 0; t < tokens.count; ++t) {
    const int64_t position = rows.rows[static_cast<size_t>(t % rows.period)];
    IPEX_CHECK(position < block_size, kOp, ": position_ids must be below the ", block_size,
               " rows of key_cache without slot_mapping, got ", position);
    slots[static_cast<size_t>(t)] = t / tokens.positions * block_size + position;
  }
  return slots;
}

RotaryCache describe_cache(const Tensor& cache, double scale) {
  return {cache.mutable_data_ptr(),
          std::max<int64_t>(1, cache.size(2)),
          {cache.stride(0), cache.stride(1), cache.stride(2)},
          1.0f / static_cast<float>(scale)};
}

void rotary_embedding_and_cache(const Tensor& query, const Tensor& key, const Tensor& value,
                                const Tensor& key_cache, const Tensor& value_cache,
                                const Tensor& sin, const Tensor& cos,
                                const OptionalTensor& slot_mapping, int64_t rotary_dim,
                                bool rotary_half, const OptionalTensor& position_ids,
                                double k_scale, double v_scale) {
  check_heads(kOp, query, key);
  check_like(kOp, "value", value, key, "key");
  check_rotary_dim(kOp, "rotary_dim", rotary_dim, query.size(query.dim() - 1));
  check_tables(kOp, sin, cos, query, rotary_dim);
  check_caches(kOp, key_cache, value_cache, query, "query",
               "[num_blocks, kv_heads, block_size, head_dim]", true);
  check_cache_shape(key_cache, key);
  check_not_expanded(kOp, "query", query);
  IPEX_CHECK(k_scale > 0, kOp, ": k_scale must be positive, got ", k_scale);
  IPEX_CHECK(v_scale > 0, kOp, ": v_scale must be positive, got ", v_scale);
  const Tokens tokens(query);
  const RotaryRows rows(kOp, position_ids, tokens, sin.numel() / sin.size(sin.dim() - 1));
  const std::vector<int64_t> slots =
      find_slots(slot_mapping, position_ids, rows, query, tokens, key_cache);
  if (tokens.count == 0) return;

  const RotaryTablesArgument tables(sin, cos);
  InPlace q = rotated_in_place(query);
  const Tensor k = with_contiguous_heads(key), v = with_contiguous_heads(value);
  RotaryWork work;
  work.positions = tokens.positions;
  work.head_dim = query.size(query.dim() - 1);
  work.rotary_dim = rotary_dim;
  work.half_split = rotary_half;
  rows.describe(work);
  tables.describe(work);
  work.from[0] = work.to[0] = describe_heads(q.tensor());
  work.from[1] = describe_heads(k);
  work.value = describe_heads(v);
  work.value_dim = work.head_dim;
  work.key_cache = describe_cache(key_cache, k_scale);
  work.value_cache = describe_cache(value_cache, v_scale);
  work.cache_type = kv_type(key_cache.scalar_type());
  work.slots = slots.data();
  run_rotary(kernels, query.scalar_type(), work, tokens.count);
  q.finish();
}

}  // namespace
}  // namespace ipex

STABLE_TORCH_LIBRARY_IMPL(ipex, CPU, m) {
  IPEX_IMPL(m, "rotary_embedding_and_cache", ipex::rotary_embedding_and_cache);
}
