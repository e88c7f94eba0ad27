// SPDX-License-Identifier: Apache-2.0
#include "ipex/glue/kv_glue.h"
#include "plan.h"

namespace ipex {
namespace {

const AttentionHandles kernels("attention");

void check_device_and_dtype(const char* name, const Tensor& x, const Tensor& query) {
  IPEX_CHECK(x.is_cpu(), "attention: ", name, " must be on the device of query = cpu");
  IPEX_CHECK(x.scalar_type() == query.scalar_type(), "attention: ", name,
             " must have the dtype of query = ", dtype_name(query.scalar_type()), ", got ",
             dtype_name(x.scalar_type()));
}

void check_arguments(const Tensor& query, const Tensor& key, const Tensor& value) {
  check_tensor("attention", "query", query);
  IPEX_CHECK(query.dim() == 4, "attention: query must be 4-D [B, H, S, D], got ", query.dim(),
             "-D");
  check_device_and_dtype("key", key, query);
  check_device_and_dtype("value", value, query);
  IPEX_CHECK(key.dim() == 4 && key.size(0) == query.size(0) && key.size(3) == query.size(3),
             "attention: key must have shape [", query.size(0), ", H, S, ", query.size(3),
             "], got ", shape_text(key));
  bool same = value.dim() == 4;
  for (int64_t i = 0; same && i < 4; ++i) same = value.size(i) == key.size(i);
  IPEX_CHECK(same, "attention: value must have the shape of key = ", shape_text(key), ", got ",
             shape_text(value));
  IPEX_CHECK(key.size(1) > 0 && query.size(1) % key.size(1) == 0,
             "attention: key must have a number of heads that divides the ", query.size(1),
             " heads of query, got ", key.size(1));
}

void check_mask(const Tensor& mask, const Tensor& query, int64_t keys) {
  IPEX_CHECK(mask.is_cpu(), "attention: mask must be on the device of query = cpu");
  const ScalarType dtype = mask.scalar_type();
  IPEX_CHECK(
      dtype == ScalarType::Bool || dtype == ScalarType::Float || dtype == query.scalar_type(),
      "attention: mask must have dtype bool, float32 or the dtype of query = ",
      dtype_name(query.scalar_type()), ", got ", dtype_name(dtype));
  const int64_t scores[4] = {query.size(0), query.size(1), query.size(2), keys};
  bool fits = mask.dim() <= 4;
  for (int64_t i = 0; fits && i < mask.dim(); ++i) {
    const int64_t size = mask.size(mask.dim() - 1 - i);
    fits = size == 1 || size == scores[3 - i];
  }
  IPEX_CHECK(fits, "attention: mask must be broadcastable to the scores of shape [", scores[0],
             ", ", scores[1], ", ", scores[2], ", ", scores[3], "], got ", shape_text(mask));
}

HeadStrides strides_of(const Tensor& x) { return {x.stride(1), x.stride(2)}; }

// Distance along dimension `from_last` (0: last) of a mask, 0 where it is broadcast.
int64_t mask_stride(const Tensor& mask, int64_t from_last) {
  const int64_t i = mask.dim() - 1 - from_last;
  return i < 0 || mask.size(i) == 1 ? 0 : mask.stride(i);
}

void set_mask(AttentionArgs& args, const Tensor& mask, ScalarType dtype) {
  args.mask_kind = mask.scalar_type() == ScalarType::Bool    ? MaskKind::kBool
                   : mask.scalar_type() == ScalarType::Float ? MaskKind::kFloat
                                                             : MaskKind::kSame;
  if (dtype == ScalarType::Float && args.mask_kind == MaskKind::kSame)
    args.mask_kind = MaskKind::kFloat;
  args.mask_strides = {mask_stride(mask, 2), mask_stride(mask, 1)};
  args.mask_key_stride = mask_stride(mask, 0);
}

Tensor attention(const Tensor& query0, const Tensor& key0, const Tensor& value0,
                 const OptionalTensor& mask, double scale, bool is_causal,
                 const OptionalTensor& alibi_slopes, int64_t window_left, int64_t window_right,
                 double softcap, const OptionalTensor& sinks, bool bottom_right) {
  check_arguments(query0, key0, value0);
  check_score_scale("attention", "scale", scale);
  if (mask) check_mask(*mask, query0, key0.size(2));
  const ScalarType dtype = query0.scalar_type();
  const int64_t batch = query0.size(0), queries = query0.size(2), keys = key0.size(2);
  AttentionArgs args{};
  args.heads = query0.size(1);
  args.size = query0.size(3);
  args.kv_heads = key0.size(1);
  const AttentionOptions options =
      attention_options("attention", query0, batch, args.heads, alibi_slopes, sinks, window_left,
                        window_right, softcap, is_causal, args);
  // Stored as [B, S, H, D]: merging the heads afterwards is a view.
  const int64_t sizes[4] = {batch, queries, args.heads, args.size};
  const Tensor stored = new_contiguous(sizes, 4, dtype);
  Tensor out = torch::stable::transpose(stored, 1, 2);
  if (out.numel() == 0) return out;

  const Tensor query = rows_contiguous(query0), key = rows_contiguous(key0),
               value = rows_contiguous(value0);
  args.query_strides = strides_of(query);
  args.kv.key = kv_part(key, std::nullopt, 1.0, 0, 1, 2);
  args.kv.value = kv_part(value, std::nullopt, 1.0, 0, 1, 2);
  args.out_strides = strides_of(out);
  args.scale = attention_scale(scale, args.size);
  Tensor mask_rows;
  int64_t mask_batch_stride = 0;
  if (mask) {
    const int64_t step = mask_stride(*mask, 0);
    mask_rows = step == 0 || step == 1 ? *mask : torch::stable::contiguous(*mask);
    set_mask(args, mask_rows, dtype);
    mask_batch_stride = mask_stride(mask_rows, 3) * static_cast<int64_t>(mask_rows.element_size());
  }

  std::vector<AttentionSequence> sequences(static_cast<size_t>(batch));
  const auto element = static_cast<int64_t>(query.element_size());
  const auto at = [&](const void* base, int64_t bytes) {
    return static_cast<const void*>(static_cast<const char*>(base) + bytes);
  };
  for (int64_t b = 0; b < batch; ++b) {
    AttentionSequence& s = sequences[static_cast<size_t>(b)];
    s.query = at(query.const_data_ptr(), b * query.stride(0) * element);
    s.out = static_cast<char*>(stored.mutable_data_ptr()) + b * stored.stride(0) * element;
    if (mask) s.mask = at(mask_rows.const_data_ptr(), b * mask_batch_stride);
    if (alibi_slopes) s.alibi = options.alibi.data() + b * options.alibi_sequence;
    s.queries = queries;
    s.keys = keys;
    s.kv = b;
    s.shift = bottom_right ? keys - queries : 0;
  }
  run_attention(kernels, dtype, args, sequences);
  return out;
}

}  // namespace
}  // namespace ipex

STABLE_TORCH_LIBRARY_IMPL(ipex, CPU, m) { IPEX_IMPL(m, "attention", ipex::attention); }
