// SPDX-License-Identifier: Apache-2.0
// single_query_cached_kv_attention: one query per sequence over a paged cache, into `output`.
#include <algorithm>

#include "decode_attention/decode_glue.h"

namespace ipex {
namespace {

constexpr const char* kOp = "single_query_cached_kv_attention";
const DecodeKernels kernels = IPEX_DECODE_KERNELS(kOp);

void check_arguments(const Tensor& output, const Tensor& query, const Tensor& key_cache,
                     const Tensor& value_cache, const OptionalTensor& head_mapping,
                     const Tensor& block_tables, const Tensor& context_lens, int64_t block_size,
                     const DecodeOptions& options) {
  check_tensor(kOp, "query", query);
  IPEX_CHECK(query.dim() == 3, kOp, ": query must be 3-D [sequences, heads, head_size], got ",
             query.dim(), "-D");
  check_head_size(kOp, query.size(2));
  check_score_scale(kOp, "scale", options.scale);
  check_like(kOp, "output", output, query, "query");
  check_not_expanded(kOp, "output", output);
  IPEX_CHECK(output.stride(2) == 1 || output.size(2) <= 1, kOp,
             ": output must have a contiguous last dimension, got stride ", output.stride(2));
  check_caches(kOp, key_cache, value_cache, query, "query",
               "[num_blocks, kv_heads, block_size, head_size]");
  IPEX_CHECK(key_cache.size(2) == block_size && key_cache.size(3) == query.size(2), kOp,
             ": key_cache must have shape [num_blocks, kv_heads, ", block_size, ", ", query.size(2),
             "], got ", shape_text(key_cache));
  IPEX_CHECK(block_size > 0, kOp, ": block_size must be positive, got ", block_size);
  const int64_t heads = query.size(1);
  check_head_groups(kOp, heads, key_cache.size(1));
  if (head_mapping) {
    check_index_tensor(kOp, "head_mapping", *head_mapping, 1);
    IPEX_CHECK(head_mapping->size(0) == heads || head_mapping->size(0) == key_cache.size(1), kOp,
               ": head_mapping must have size heads = ", heads, ", got ", head_mapping->size(0));
  }
  check_index_tensor(kOp, "block_tables", block_tables, 2);
  check_index_tensor(kOp, "context_lens", context_lens, 1);
  const int64_t sequences = query.size(0);
  IPEX_CHECK(block_tables.size(0) == sequences, kOp, ": block_tables must have ", sequences,
             " rows, got ", block_tables.size(0));
  IPEX_CHECK(context_lens.size(0) == sequences, kOp,
             ": context_lens must have size sequences = ", sequences, ", got ",
             context_lens.size(0));
  check_window(kOp, options.window);
  check_head_vector(kOp, "alibi_slopes", options.alibi, heads);
  check_head_vector(kOp, "sinks", options.sinks, heads);
  check_row_scales(kOp, "key_scales", options.key_scales, key_cache);
  check_row_scales(kOp, "value_scales", options.value_scales, value_cache);
}

void check_values(const Tensor& query, const Tensor& key_cache, const OptionalTensor& head_mapping,
                  const Indices& tables, const Indices& lengths, int64_t blocks_per_sequence,
                  int64_t max_context_len) {
  const int64_t heads = query.size(1), kv_heads = key_cache.size(1);
  if (head_mapping && head_mapping->size(0) == heads) {
    const Indices mapping(*head_mapping);
    for (int64_t h = 0; h < heads; ++h)
      IPEX_CHECK(mapping[h] == h / (heads / kv_heads), kOp, ": head_mapping must map head ", h,
                 " to ", h / (heads / kv_heads), ", got ", mapping[h]);
  }
  check_block_tables(kOp, "context_lens", lengths, tables, query.size(0), blocks_per_sequence,
                     key_cache.size(2), key_cache.size(0));
  int64_t longest = 0;
  for (int64_t s = 0; s < query.size(0); ++s) longest = std::max<int64_t>(longest, lengths[s]);
  IPEX_CHECK(longest <= max_context_len, kOp,
             ": max_context_len must be at least the largest of context_lens, ", longest, ", got ",
             max_context_len);
}

void single_query_cached_kv_attention(const Tensor& output, const Tensor& query0,
                                      const Tensor& key_cache, const Tensor& value_cache,
                                      const OptionalTensor& head_mapping, double scale,
                                      const Tensor& block_tables, const Tensor& context_lens,
                                      int64_t block_size, int64_t max_context_len,
                                      const OptionalTensor& alibi_slopes, int64_t window_size,
                                      double k_scale, double v_scale, double softcap,
                                      const OptionalTensor& sinks, const OptionalTensor& key_scales,
                                      const OptionalTensor& value_scales) {
  DecodeArgs args{};
  const OptionalTensor none, near = near_keys(kOp, alibi_slopes, query0, args.near_keys);
  const DecodeOptions options{
      none,       near ? none : alibi_slopes, sinks, key_scales, value_scales, scale, softcap,
      window_size};
  check_arguments(output, query0, key_cache, value_cache, head_mapping, block_tables, context_lens,
                  block_size, options);
  const Indices tables(block_tables), lengths(context_lens);
  const int64_t sequences = query0.size(0), columns = block_tables.size(1);
  check_values(query0, key_cache, head_mapping, tables, lengths, columns, max_context_len);
  if (query0.numel() == 0) return;

  const ScalarType dtype = query0.scalar_type();
  const Tensor query =
      query0.stride(2) == 1 || query0.size(2) == 1 ? query0 : torch::stable::contiguous(query0);
  args.near = near ? near->const_data_ptr() : nullptr;
  args.beams = 1;
  args.heads = query.size(1);
  args.queries = 1;
  args.size = query.size(2);
  args.kv_heads = key_cache.size(1);
  args.query = query.const_data_ptr();
  args.query_strides = {query.stride(0), query.stride(1), 0};
  args.out = output.mutable_data_ptr();
  args.out_strides = {output.stride(0), output.stride(1), 0};
  std::vector<int64_t> keys(static_cast<size_t>(sequences));
  for (int64_t s = 0; s < sequences; ++s) keys[static_cast<size_t>(s)] = lengths[s];
  args.lengths = keys.data();
  std::vector<int32_t> table_copy;
  args.kv.table = as_int32(tables, sequences * columns, table_copy);
  args.kv.table_stride = columns;
  args.kv.block_size = block_size;
  args.kv.layout = KvLayout::kPaged;
  args.kv.type = kv_type(key_cache.scalar_type());
  args.kv.key = kv_part(key_cache, key_scales, k_scale, 0, 1, 2);
  args.kv.value = kv_part(value_cache, value_scales, v_scale, 0, 1, 2);
  DecodeMemory memory;
  set_options(args, memory, options, dtype);
  run_decode(kOp, kernels, args, memory, sequences, dtype,
             static_cast<int64_t>(key_cache.element_size()));
}

}  // namespace
}  // namespace ipex

STABLE_TORCH_LIBRARY_IMPL(ipex, CPU, m) {
  IPEX_IMPL(m, "single_query_cached_kv_attention", ipex::single_query_cached_kv_attention);
}
