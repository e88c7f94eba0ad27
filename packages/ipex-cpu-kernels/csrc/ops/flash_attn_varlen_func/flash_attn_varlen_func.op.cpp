// SPDX-License-Identifier: Apache-2.0
// It uses the kernels of attention, with keys and values packed straight from the pages, and
// kernels of decode_attention for sequences with so few queries that packing would not pay.
#include <cmath>
#include <cstring>
#include <string>

#include "../attention/plan.h"
#include "../decode_attention/decode_glue.h"

namespace ipex {
namespace {

constexpr const char* kOp = "flash_attn_varlen_func";
const AttentionHandles kernels(kOp);
const DecodeKernels decode_kernels = IPEX_DECODE_KERNELS(kOp);

// Sequences of at most so many queries, and rows per head of keys, are read in place.
constexpr int64_t kDecodeQueries = 4, kDecodeRows = 16;

// The largest offset: more keys than any cache has.
constexpr int64_t kMostKeys = int64_t{1} << 62;

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
  check_cache_kind(kOp, key_cache, kv_cache_dtype);
  check_scale("k_scale", k_scale);
  check_scale("v_scale", v_scale);
  check_row_scales(kOp, "key_scales", key_scales, key_cache);
  check_row_scales(kOp, "value_scales", value_scales, value_cache);
}

void check_blocks(const Indices& from_k, const Indices& table, int64_t sequences, int64_t columns,
                  const Tensor& key_cache) {
  const int64_t block_size = key_cache.size(2), blocks = key_cache.size(0);
  for (int64_t b = 0; b < sequences; ++b) {
    check_block_table(kOp, "cu_seqlens_kv", from_k[b + 1] - from_k[b], "block_table", table, b,
                      columns, block_size, blocks);
  }
}

// Whether the decode kernels do the same for this sequence.
bool is_decode(const AttentionArgs& args, const AttentionOptions& options,
               const AttentionSequence& s) {
  return s.queries >= 1 && s.queries <= kDecodeQueries && s.queries <= s.keys &&
         s.queries * (args.heads / args.kv_heads) <= kDecodeRows && args.size <= 1024 &&
         (s.queries == 1 || args.right == 0) && options.alibi_sequence == 0 && !s.near;
}

// Copies the packed rows of a sequence to or from rows that lie close together.
template <bool kGather, class P>
void copy_rows(P* rows, char* close, const HeadStrides& strides, int64_t queries, int64_t heads,
               int64_t bytes, int64_t element) {
  for (int64_t q = 0; q < queries; ++q)
    for (int64_t h = 0; h < heads; ++h, close += bytes) {
      P* row = rows + (q * strides.row + h * strides.head) * element;
      if constexpr (kGather)
        std::memcpy(close, row, static_cast<size_t>(bytes));
      else
        std::memcpy(row, close, static_cast<size_t>(bytes));
    }
}

// Runs the sequences that have `queries` queries and suit the decode kernels, and takes
// the queries from them.
void run_decodes(const AttentionArgs& prefill, const AttentionOptions& options, int64_t queries,
                 double scale, ScalarType dtype, int64_t cache_element,
                 std::vector<AttentionSequence>& all) {
  std::vector<int64_t> mine, lengths;
  std::vector<int32_t> table;
  for (size_t i = 0; i < all.size(); ++i) {
    if (all[i].queries != queries || !is_decode(prefill, options, all[i])) continue;
    mine.push_back(static_cast<int64_t>(i));
    lengths.push_back(all[i].keys);
    const int32_t* row = prefill.kv.table + all[i].kv * prefill.kv.table_stride;
    table.insert(table.end(), row, row + prefill.kv.table_stride);
  }
  if (mine.empty()) return;
  const auto count = static_cast<int64_t>(mine.size());
  const int64_t sizes[4] = {count, queries, prefill.heads, prefill.size};
  const Tensor query = new_contiguous(sizes, 4, dtype), out = new_contiguous(sizes, 4, dtype);
  const auto element = static_cast<int64_t>(query.element_size());
  const int64_t bytes = prefill.size * element, step = queries * prefill.heads * bytes;
  for (int64_t i = 0; i < count; ++i)
    copy_rows<true>(static_cast<const char*>(all[static_cast<size_t>(mine[i])].query),
                    static_cast<char*>(query.mutable_data_ptr()) + i * step, prefill.query_strides,
                    queries, prefill.heads, bytes, element);

  DecodeArgs args{};
  args.query = query.const_data_ptr();
  args.out = out.mutable_data_ptr();
  args.query_strides = args.out_strides = {query.stride(0), query.stride(2), query.stride(1)};
  args.alibi = options.alibi.empty() ? nullptr : options.alibi.data();
  args.sinks = prefill.sinks;
  args.lengths = lengths.data();
  args.kv = prefill.kv;
  args.kv.table = table.data();
  args.beams = 1;
  args.heads = prefill.heads;
  args.kv_heads = prefill.kv_heads;
  args.queries = queries;
  args.size = prefill.size;
  args.window = prefill.left >= kUnlimited ? 0 : prefill.left + 1;
  args.scale = attention_scale(scale, args.size);
  args.softcap = prefill.softcap;
  DecodeMemory memory;
  run_decode(kOp, decode_kernels, args, memory, count, dtype, cache_element);

  for (int64_t i = 0; i < count; ++i) {
    AttentionSequence& s = all[static_cast<size_t>(mine[i])];
    copy_rows<false>(static_cast<char*>(s.out),
                     static_cast<char*>(out.mutable_data_ptr()) + i * step, prefill.out_strides,
                     queries, prefill.heads, bytes, element);
    s.queries = 0;
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
  check_score_scale(kOp, "softmax_scale", softmax_scale);
  const int64_t sequences = cu_seqlens_q.size(0) - 1, columns = block_table.size(1);
  AttentionArgs args{};
  args.heads = query0.size(1);
  args.size = query0.size(2);
  args.kv_heads = key_cache.size(1);
  const OptionalTensor near = near_keys(kOp, alibi_slopes, query0, args.near_keys), none;
  const AttentionOptions options =
      attention_options(kOp, query0, sequences, args.heads, near ? none : alibi_slopes, sinks,
                        window_left, window_right, softcap, is_causal, args);
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
    if (near)
      s.near = static_cast<const char*>(near->const_data_ptr()) +
               from_q[b] * args.heads * args.near_keys * element;
    else if (alibi_slopes)
      s.alibi = options.alibi.data() + b * options.alibi_sequence;
    s.queries = from_q[b + 1] - from_q[b];
    s.keys = from_k[b + 1] - from_k[b];
    s.kv = b;
    s.shift = s.keys - s.queries;
  }
  for (int64_t n = 1; n <= kDecodeQueries; ++n)
    run_decodes(args, options, n, softmax_scale, query.scalar_type(),
                static_cast<int64_t>(key_cache.element_size()), all);
  run_attention(kernels, query.scalar_type(), args, all);
}

}  // namespace
}  // namespace ipex

STABLE_TORCH_LIBRARY_IMPL(ipex, CPU, m) {
  IPEX_IMPL(m, "flash_attn_varlen_func", ipex::flash_attn_varlen_func);
}
