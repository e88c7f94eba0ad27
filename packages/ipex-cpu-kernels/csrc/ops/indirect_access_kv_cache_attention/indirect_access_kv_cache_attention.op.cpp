// SPDX-License-Identifier: Apache-2.0
// indirect_access_kv_cache_attention: beams share the history they have in common through indices.
#include "decode_attention/decode_glue.h"
#include "ipex/glue/op_loops.h"
#include "reshape_and_cache/reshape_and_cache.h"

namespace ipex {
namespace {

constexpr const char* kOp = "indirect_access_kv_cache_attention";
const DecodeKernels kernels = IPEX_DECODE_KERNELS(kOp);
const auto write_kernels = IPEX_KERNELS(kOp, reshape_and_cache);

void check_arguments(const Tensor& query, const Tensor& key, const Tensor& value,
                     const Tensor& key_cache, const Tensor& value_cache, const Tensor& beam_idx,
                     int64_t offset, const DecodeOptions& options) {
  check_tensor(kOp, "query", query);
  IPEX_CHECK(query.dim() == 4, kOp, ": query must be 4-D [sequences, Q, heads, head_size], got ",
             query.dim(), "-D");
  check_head_size(kOp, query.size(3));
  check_score_scale(kOp, "scale", options.scale);
  const int64_t sequences = query.size(0), queries = query.size(1), size = query.size(3);
  IPEX_CHECK(key.is_cpu(), kOp, ": key must be on the device of query = cpu");
  IPEX_CHECK(key.scalar_type() == query.scalar_type(), kOp,
             ": key must have the dtype of query = ", dtype_name(query.scalar_type()), ", got ",
             dtype_name(key.scalar_type()));
  IPEX_CHECK(
      key.dim() == 4 && key.size(0) == sequences && key.size(1) == queries && key.size(3) == size,
      kOp, ": key must have shape [", sequences, ", ", queries, ", kv_heads, ", size, "], got ",
      shape_text(key));
  check_like(kOp, "value", value, key, "key");
  check_caches(kOp, key_cache, value_cache, query, "query",
               "[max_positions, sequences, kv_heads, head_size]", true);
  IPEX_CHECK(key_cache.size(1) == sequences && key_cache.size(2) == key.size(2) &&
                 key_cache.size(3) == size,
             kOp, ": key_cache must have shape [max_positions, ", sequences, ", ", key.size(2),
             ", ", size, "], got ", shape_text(key_cache));
  check_head_groups(kOp, query.size(2), key.size(2));
  const int64_t positions = key_cache.size(0);
  IPEX_CHECK(beam_idx.is_cpu(), kOp, ": beam_idx must be on the device of query = cpu");
  IPEX_CHECK(beam_idx.scalar_type() == ScalarType::Long, kOp,
             ": beam_idx must have dtype int64, got ", dtype_name(beam_idx.scalar_type()));
  IPEX_CHECK(
      beam_idx.dim() == 2 && beam_idx.size(0) == positions + 2 && beam_idx.size(1) == sequences,
      kOp, ": beam_idx must have shape [", positions + 2, ", ", sequences, "], got ",
      shape_text(beam_idx));
  IPEX_CHECK(offset >= 0 && offset <= positions - queries, kOp,
             ": offset must be between 0 and max_positions - Q = ", positions - queries, ", got ",
             offset);
  const int64_t scores[4] = {sequences, query.size(2), queries, offset + queries};
  check_decode_mask(kOp, options.mask, query, scores);
  check_head_vector(kOp, "alibi_slopes", options.alibi, query.size(2));
}

// Which sequence's column holds position p of each sequence: positions behind the offset are its
// own; before, the indices lead from each position to the one before it, and the prompt is in the
// first column of its beams.
void resolve(const Indices& beam_idx, int64_t sequences, int64_t beams, int64_t prompt,
             int64_t offset, int64_t queries, int32_t* table) {
  const int64_t length = offset + queries;
  for (int64_t s = 0; s < sequences; ++s) {
    int32_t* row = table + s * length;
    int64_t column = s;
    for (int64_t p = length - 1; p >= offset; --p) row[p] = static_cast<int32_t>(s);
    for (int64_t p = offset - 1; p >= 0; --p) {
      column = beam_idx[p * sequences + column];
      IPEX_CHECK(column >= 0 && column < sequences, kOp,
                 ": beam_idx must hold numbers of sequences in [0, ", sequences, "), got ", column);
      if (p < prompt) column = column / beams * beams;
      row[p] = static_cast<int32_t>(column);
    }
  }
}

// Number of beams of a prompt, from the last row of the indices.
int64_t beams_of(const Indices& beam_idx, int64_t positions, int64_t sequences) {
  const int64_t prompts = beam_idx[(positions + 1) * sequences];
  IPEX_CHECK(prompts > 0 && sequences % prompts == 0, kOp,
             ": beam_idx must hold in its last row a number of prompts that divides ", sequences,
             ", got ", prompts);
  return sequences / prompts;
}

KvPart part_of(const Tensor& cache, double scale) {
  return kv_part(cache, OptionalTensor(), scale, 1, 2, 0);
}

// Rows [sequence][query] at equal distances.
Tensor tokens_of(const Tensor& x) {
  const bool rows = x.stride(3) == 1 || x.size(3) == 1;
  const bool equal = x.size(1) == 1 || x.size(0) == 1 || x.stride(0) == x.size(1) * x.stride(1);
  return rows && equal ? x : torch::stable::contiguous(x);
}
int64_t token_stride(const Tensor& x) { return x.size(1) > 1 ? x.stride(1) : x.stride(0); }

void write_new(const Tensor& key0, const Tensor& value0, const DecodeArgs& args, int64_t sequences,
               int64_t offset, int64_t positions) {
  const Tensor key = tokens_of(key0), value = tokens_of(value0);
  const int64_t tokens = sequences * args.queries;
  std::vector<int64_t> slots(static_cast<size_t>(tokens));
  for (int64_t t = 0; t < tokens; ++t)
    slots[static_cast<size_t>(t)] = t / args.queries * positions + offset + t % args.queries;
  CacheWriteArgs write{};
  write.key = key.const_data_ptr();
  write.value = value.const_data_ptr();
  write.key_token = token_stride(key);
  write.key_head = key.stride(2);
  write.value_token = token_stride(value);
  write.value_head = value.stride(2);
  write.slots = slots.data();
  write.cache = args.kv;
  write.block_size = positions;
  write.heads = args.kv_heads;
  write.size = args.size;
  write_kernels.visit(key.scalar_type(), [&]<class T>(auto* kernel) {
    parallel_for(tokens, row_grain<T>(2 * write.heads * write.size),
                 [&](int64_t begin, int64_t end) { kernel(&write, begin, end); });
  });
}

Tensor indirect_access_kv_cache_attention(const Tensor& query0, const Tensor& key,
                                          const Tensor& value, const Tensor& key_cache,
                                          const Tensor& value_cache, const Tensor& beam_idx,
                                          int64_t offset, double scale, const OptionalTensor& mask,
                                          const OptionalTensor& alibi_slopes, bool is_causal,
                                          double k_scale, double v_scale) {
  const OptionalTensor none;
  const DecodeOptions options{mask, alibi_slopes, none, none, none, scale, -1.0, -1};
  check_arguments(query0, key, value, key_cache, value_cache, beam_idx, offset, options);
  const int64_t sequences = query0.size(0), positions = key_cache.size(0);
  DecodeArgs args{};
  args.heads = query0.size(2);
  args.queries = query0.size(1);
  args.size = query0.size(3);
  args.kv_heads = key.size(2);
  const ScalarType dtype = query0.scalar_type();
  const int64_t sizes[4] = {sequences, args.queries, args.heads, args.size};
  const Tensor stored = new_contiguous(sizes, 4, dtype);
  Tensor out = torch::stable::transpose(stored, 1, 2);
  if (out.numel() == 0) return out;

  const Indices indices(beam_idx);
  args.beams = beams_of(indices, positions, sequences);
  const int64_t length = offset + args.queries;
  std::vector<int32_t> table(static_cast<size_t>(sequences * length));
  resolve(indices, sequences, args.beams, indices[positions * sequences], offset, args.queries,
          table.data());
  const std::vector<int64_t> keys(static_cast<size_t>(sequences), length);

  args.kv.layout = KvLayout::kIndirect;
  args.kv.type = kv_type(key_cache.scalar_type());
  args.kv.key = part_of(key_cache, k_scale);
  args.kv.value = part_of(value_cache, v_scale);
  args.kv.table = table.data();
  args.kv.table_stride = length;
  write_new(key, value, args, sequences, offset, positions);

  const Tensor query =
      query0.stride(3) == 1 || args.size == 1 ? query0 : torch::stable::contiguous(query0);
  args.query = query.const_data_ptr();
  args.query_strides = {query.stride(0), query.stride(2), query.stride(1)};
  args.out = stored.mutable_data_ptr();
  args.out_strides = {out.stride(0), out.stride(1), out.stride(2)};
  args.lengths = keys.data();
  args.sees_all = !is_causal;
  DecodeMemory memory;
  set_options(args, memory, options, dtype);
  run_decode(kOp, kernels, args, memory, sequences, dtype,
             static_cast<int64_t>(key_cache.element_size()));
  return out;
}

}  // namespace
}  // namespace ipex

STABLE_TORCH_LIBRARY_IMPL(ipex, CPU, m) {
  IPEX_IMPL(m, "indirect_access_kv_cache_attention", ipex::indirect_access_kv_cache_attention);
}
