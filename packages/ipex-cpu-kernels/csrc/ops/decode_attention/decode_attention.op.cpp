// SPDX-License-Identifier: Apache-2.0
// decode_attention: the cache of a sequence is one tensor, of any strides.
#include "decode_attention/decode_glue.h"

namespace ipex {
namespace {

constexpr const char* kOp = "decode_attention";
const DecodeKernels kernels = IPEX_DECODE_KERNELS(kOp);

void check_arguments(const Tensor& query, const Tensor& key_cache, const Tensor& value_cache,
                     const OptionalTensor& lengths, const DecodeOptions& options) {
  check_tensor(kOp, "query", query);
  IPEX_CHECK(query.dim() == 4, kOp, ": query must be 4-D [B, H, Q, D], got ", query.dim(), "-D");
  check_head_size(kOp, query.size(3));
  check_score_scale(kOp, "scale", options.scale);
  check_caches(kOp, key_cache, value_cache, query, "query", "[B, kv_heads, S, D]");
  IPEX_CHECK(key_cache.size(0) == query.size(0) && key_cache.size(3) == query.size(3), kOp,
             ": key_cache must have shape [", query.size(0), ", kv_heads, S, ", query.size(3),
             "], got ", shape_text(key_cache));
  check_head_groups(kOp, query.size(1), key_cache.size(1));
  if (lengths) {
    check_index_tensor(kOp, "lengths", *lengths, 1);
    IPEX_CHECK(lengths->size(0) == query.size(0), kOp,
               ": lengths must have size B = ", query.size(0), ", got ", lengths->size(0));
  }
  const int64_t scores[4] = {query.size(0), query.size(1), query.size(2), key_cache.size(2)};
  check_decode_mask(kOp, options.mask, query, scores);
  check_window(kOp, options.window);
  check_head_vector(kOp, "alibi_slopes", options.alibi, query.size(1));
  check_head_vector(kOp, "sinks", options.sinks, query.size(1));
  check_row_scales(kOp, "key_scales", options.key_scales, key_cache);
  check_row_scales(kOp, "value_scales", options.value_scales, value_cache);
}

Tensor decode_attention(const Tensor& query0, const Tensor& key_cache, const Tensor& value_cache,
                        const OptionalTensor& lengths, const OptionalTensor& mask, double scale,
                        const OptionalTensor& alibi_slopes, int64_t window_size, double softcap,
                        const OptionalTensor& sinks, double k_scale, double v_scale,
                        const OptionalTensor& key_scales, const OptionalTensor& value_scales) {
  const DecodeOptions options{mask,         alibi_slopes, sinks,   key_scales,
                              value_scales, scale,        softcap, window_size};
  check_arguments(query0, key_cache, value_cache, lengths, options);
  const int64_t sequences = query0.size(0), capacity = key_cache.size(2);
  DecodeArgs args{};
  args.beams = 1;
  args.heads = query0.size(1);
  args.queries = query0.size(2);
  args.size = query0.size(3);
  args.kv_heads = key_cache.size(1);
  std::vector<int64_t> keys(static_cast<size_t>(sequences), capacity);
  if (lengths) {
    const Indices given(*lengths);
    for (int64_t s = 0; s < sequences; ++s) {
      IPEX_CHECK(given[s] >= 0 && given[s] <= capacity, kOp,
                 ": lengths must be between 0 and the rows of the cache = ", capacity, ", got ",
                 given[s]);
      keys[static_cast<size_t>(s)] = given[s];
    }
  }
  const ScalarType dtype = query0.scalar_type();
  // Stored as [B, Q, H, D]: merging the heads afterwards is a view.
  const int64_t sizes[4] = {sequences, args.queries, args.heads, args.size};
  const Tensor stored = new_contiguous(sizes, 4, dtype);
  Tensor out = torch::stable::transpose(stored, 1, 2);
  if (out.numel() == 0) return out;

  const Tensor query =
      query0.stride(3) == 1 || args.size == 1 ? query0 : torch::stable::contiguous(query0);
  args.query = query.const_data_ptr();
  args.query_strides = {query.stride(0), query.stride(1), query.stride(2)};
  args.out = stored.mutable_data_ptr();
  args.out_strides = {out.stride(0), out.stride(1), out.stride(2)};
  args.lengths = keys.data();
  args.kv.layout = KvLayout::kContiguous;
  args.kv.type = kv_type(key_cache.scalar_type());
  args.kv.key = kv_part(key_cache, key_scales, k_scale, 0, 1, 2);
  args.kv.value = kv_part(value_cache, value_scales, v_scale, 0, 1, 2);
  DecodeMemory memory;
  set_options(args, memory, options, dtype);
  run_decode(kOp, kernels, args, memory, sequences, dtype,
             static_cast<int64_t>(key_cache.element_size()));
  return out;
}

}  // namespace
}  // namespace ipex

STABLE_TORCH_LIBRARY_IMPL(ipex, CPU, m) {
  IPEX_IMPL(m, "decode_attention", ipex::decode_attention);
}
