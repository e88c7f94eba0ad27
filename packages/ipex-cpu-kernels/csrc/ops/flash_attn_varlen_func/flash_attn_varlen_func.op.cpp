// SPDX-License-Identifier: Apache-2.0
// The kernels are those of attention; here keys and values are packed straight from the pages.
#include <cmath>
#include <string>

#include "../attention/plan.h"

namespace ipex {
namespace {

constexpr const char* kOp = "flash_attn_varlen_func";
const AttentionHandles kernels(kOp);

// The largest offset: more keys than any cache has.
constexpr int64_t kMostKeys = int64_t{1} << 62;

void check_cache_kind(const Tensor& cache, const std::string& kind) {
  ScalarType wanted = cache.scalar_type();
  if (kind == "fp8" || kind == "fp8_e5m2")
    wanted = ScalarType::Float8_e5m2;
  else if (kind == "int8")
    wanted = ScalarType::Char;
  else
    IPEX_CHECK(kind == "auto", kOp,
               ": kv_cache_dtype must be one of auto, fp8, fp8_e5m2, int8, got ", kind);
  IPEX_CHECK(cache.scalar_type() == wanted, kOp, ": key_cache must have dtype ", dtype_name(wanted),
             " for kv_cache_dtype ", kind, ", got ", dtype_name(cache.scalar_type()));
}

void check_scale(const char* name, double scale) {
  IPEX_CHECK(scale > 0.0 && std::isfinite(scale), kOp, ": ", name,
             " must be positive and finite, got ", scale);
}

void check_arguments(const Tensor& out, const Tensor& query, const Tensor& key_cache,
                     const Tensor& value_cache, const Tensor& cu_seqlens_q,
                     const Tensor& cu_seqlens_kv, const Tensor& block_table,
                     const std::string& kv_cache_dtype, double k_scale, double v_scale,
                     const OptionalTensor& key_scales, const OptionalTensor& value_scales) {
  check_rows(kOp, query, out);
  check_caches(kOp, key_cache, value_cache, query, "query",
               "[num_blocks, kv_heads, block_size, head_size]");
  IPEX_CHECK(key_cache.size(2) > 0 && key_cache.size(3) == query.size(2), kOp,
             ": key_cache must have shape [num_blocks, kv_heads, block_size, ", query.size(2),
             "], got ", shape_text(key_cache));
  IPEX_CHECK(key_cache.size(1) > 0 && query.size(1) % key_cache.size(1) == 0, kOp,
             ": key_cache must have a number of heads that divides the ", query.size(1),
             " heads of query, got ", key_cache.size(1));
  check_offset_tensor(kOp, "cu_seqlens_q", cu_seqlens_q, 0);
  check_offset_tensor(kOp, "cu_seqlens_kv", cu_seqlens_kv, cu_seqlens_q.size(0));
  const int64_t sequences = cu_seqlens_q.size(0) - 1;
  check_index_tensor(kOp, "block_table", block_table, 2);
  IPEX_CHECK(block_table.size(0) == sequences, kOp, ": block_table must have ", sequences,
             " rows, got ", block_table.size(0));
  check_cache_kind(key_cache, kv_cache_dtype);
  check_scale("k_scale", k_scale);
  check_scale("v_scale", v_scale);
  check_row_scales(kOp, "key_scales", key_scales, key_cache);
  check_row_scales(kOp, "value_scales", value_scales, value_cache);
}

void check_blocks(const Indices& from_k, const Indices& table, int64_t sequences, int64_t columns,
                  const Tensor& key_cache) {
  const int64_t block_size = key_cache.size(2), blocks = key_cache.size(0);
  for (int64_t b = 0; b < sequences; ++b) {
    const int64_t length = from_k[b + 1] - from_k[b];
    IPEX_CHECK(length <= columns * block_size, kOp,
               ": cu_seqlens_kv must be between 0 and the capacity of block_tables = ",
               columns * block_size, ", got ", length);
    for (int64_t i = 0; i * block_size < length; ++i) {
      const int64_t block = table[b * columns + i];
      IPEX_CHECK(block >= 0 && block < blocks, kOp,
                 ": block_tables must hold numbers of blocks in [0, ", blocks, "), got ", block);
    }
  }
}

void flash_attn_varlen_func(Tensor out, const Tensor& query0, const Tensor& key_cache,
                            const Tensor& value_cache, const Tensor& cu_seqlens_q,
                            const Tensor& cu_seqlens_kv, int64_t, int64_t, double softmax_scale,
                            bool is_causal, const Tensor& block_table,
                            const OptionalTensor& alibi_slopes, int64_t window_left,
                            int64_t window_right, const std::string& kv_cache_dtype, double k_scale,
                            double v_scale, double softcap, const OptionalTensor& sinks,
                            const OptionalTensor& key_scales, const OptionalTensor& value_scales) {
  check_arguments(out, query0, key_cache, value_cache, cu_seqlens_q, cu_seqlens_kv, block_table,
                  kv_cache_dtype, k_scale, v_scale, key_scales, value_scales);
  const int64_t sequences = cu_seqlens_q.size(0) - 1, columns = block_table.size(1);
  AttentionArgs args{};
  args.heads = query0.size(1);
  args.size = query0.size(2);
  args.kv_heads = key_cache.size(1);
  const AttentionOptions options =
      attention_options(kOp, query0, sequences, args.heads, alibi_slopes, sinks, window_left,
                        window_right, softcap, is_causal, args);
  const Indices from_q(cu_seqlens_q), from_k(cu_seqlens_kv), table(block_table);
  check_offsets(kOp, "cu_seqlens_q", from_q, sequences + 1, query0.size(0));
  check_offsets(kOp, "cu_seqlens_kv", from_k, sequences + 1, kMostKeys);
  check_blocks(from_k, table, sequences, columns, key_cache);
  if (out.numel() == 0) return;

  const Tensor query = rows_contiguous(query0);
  args.query_strides = {query.stride(1), query.stride(0)};
  args.out_strides = {out.stride(1), out.stride(0)};
  std::vector<int32_t> table_copy;
  args.kv.key = kv_part(key_cache, key_scales, k_scale, 0, 1, 2);
  args.kv.value = kv_part(value_cache, value_scales, v_scale, 0, 1, 2);
  args.kv.layout = KvLayout::kPaged;
  args.kv.type = kv_type(key_cache.scalar_type());
  args.kv.table = as_int32(table, sequences * columns, table_copy);
  args.kv.table_stride = columns;
  args.kv.block_size = key_cache.size(2);
  // The factor of a whole cache is left to the scores and to the result.
  args.scale = attention_scale(softmax_scale, args.size) * static_cast<float>(k_scale);
  args.out_scale = static_cast<float>(v_scale);

  std::vector<AttentionSequence> all(static_cast<size_t>(sequences));
  const auto element = static_cast<int64_t>(query.element_size());
  for (int64_t b = 0; b < sequences; ++b) {
    AttentionSequence& s = all[static_cast<size_t>(b)];
    s.query =
        static_cast<const char*>(query.const_data_ptr()) + from_q[b] * query.stride(0) * element;
    s.out = static_cast<char*>(out.mutable_data_ptr()) + from_q[b] * out.stride(0) * element;
    if (alibi_slopes) s.alibi = options.alibi.data() + b * options.alibi_sequence;
    s.queries = from_q[b + 1] - from_q[b];
    s.keys = from_k[b + 1] - from_k[b];
    s.kv = b;
    s.shift = s.keys - s.queries;
  }
  run_attention(kernels, query.scalar_type(), args, all);
}

}  // namespace
}  // namespace ipex

STABLE_TORCH_LIBRARY_IMPL(ipex, CPU, m) {
  m.impl("flash_attn_varlen_func", TORCH_BOX(&ipex::flash_attn_varlen_func));
}
