// SPDX-License-Identifier: Apache-2.0
// It uses the kernels of attention; here sequences are cut out of packed rows.
#include <cstring>

#include "../attention/plan.h"

namespace ipex {
namespace {

constexpr const char* kOp = "varlen_attention";
const AttentionHandles kernels(kOp);

void check_keys(const char* name, const Tensor& x, const Tensor& query) {
  IPEX_CHECK(x.is_cpu(), kOp, ": ", name, " must be on the device of query = cpu");
  IPEX_CHECK(x.scalar_type() == query.scalar_type(), kOp, ": ", name,
             " must have the dtype of query = ", dtype_name(query.scalar_type()), ", got ",
             dtype_name(x.scalar_type()));
}

void check_arguments(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& out,
                     const Tensor& seqlen_q, const Tensor& seqlen_k, double pdropout,
                     bool return_softmax) {
  check_rows(kOp, query, out);
  check_keys("key", key, query);
  check_keys("value", value, query);
  IPEX_CHECK(key.dim() == 3 && key.size(2) == query.size(2), kOp,
             ": key must have shape [tokens, kv_heads, ", query.size(2), "], got ",
             shape_text(key));
  bool same = value.dim() == 3;
  for (int64_t i = 0; same && i < 3; ++i) same = value.size(i) == key.size(i);
  IPEX_CHECK(same, kOp, ": value must have the shape of key = ", shape_text(key), ", got ",
             shape_text(value));
  IPEX_CHECK(key.size(1) > 0 && query.size(1) % key.size(1) == 0, kOp,
             ": key must have a number of heads that divides the ", query.size(1),
             " heads of query, got ", key.size(1));
  check_offset_tensor(kOp, "seqlen_q", seqlen_q, 0);
  check_offset_tensor(kOp, "seqlen_k", seqlen_k, seqlen_q.size(0));
  IPEX_CHECK(pdropout == 0.0, kOp, ": pdropout must be 0, got ", pdropout);
  IPEX_CHECK(!return_softmax, kOp, ": return_softmax must be False, got True");
}

void zero_rows(const Tensor& out) {
  auto* data = static_cast<char*>(out.mutable_data_ptr());
  const auto element = static_cast<int64_t>(out.element_size());
  const auto bytes = static_cast<size_t>(out.size(2) * element);
  for (int64_t t = 0; t < out.size(0); ++t)
    for (int64_t h = 0; h < out.size(1); ++h)
      std::memset(data + (t * out.stride(0) + h * out.stride(1)) * element, 0, bytes);
}

void varlen_attention(const Tensor& query0, const Tensor& key0, const Tensor& value0, Tensor out,
                      const Tensor& seqlen_q, const Tensor& seqlen_k,
                      const OptionalTensor& alibi_slopes, int64_t, int64_t, double pdropout,
                      double softmax_scale, bool zero_tensors, bool is_causal, bool return_softmax,
                      int64_t window_size_left, int64_t window_size_right, double softcap,
                      const OptionalTensor& sinks) {
  check_arguments(query0, key0, value0, out, seqlen_q, seqlen_k, pdropout, return_softmax);
  check_score_scale(kOp, "softmax_scale", softmax_scale);
  const int64_t batch = seqlen_q.size(0) - 1;
  AttentionArgs args{};
  args.heads = query0.size(1);
  args.size = query0.size(2);
  args.kv_heads = key0.size(1);
  const AttentionOptions options =
      attention_options(kOp, query0, batch, args.heads, alibi_slopes, sinks, window_size_left,
                        window_size_right, softcap, is_causal, args);
  const Indices from_q(seqlen_q), from_k(seqlen_k);
  check_offsets(kOp, "seqlen_q", from_q, batch + 1, query0.size(0));
  check_offsets(kOp, "seqlen_k", from_k, batch + 1, key0.size(0));
  if (out.numel() == 0) return;
  const Tensor query = rows_contiguous(query0), key = rows_contiguous(key0),
               value = rows_contiguous(value0);
  if (zero_tensors) zero_rows(out);
  args.query_strides = {query.stride(1), query.stride(0)};
  args.out_strides = {out.stride(1), out.stride(0)};
  args.kv.key = {key.const_data_ptr(), {0, key.stride(1), key.stride(0)}, nullptr, {}, 1.0f};
  args.kv.value = {
      value.const_data_ptr(), {0, value.stride(1), value.stride(0)}, nullptr, {}, 1.0f};
  args.scale = attention_scale(softmax_scale, args.size);

  std::vector<AttentionSequence> sequences(static_cast<size_t>(batch));
  const auto element = static_cast<int64_t>(query.element_size());
  for (int64_t b = 0; b < batch; ++b) {
    AttentionSequence& s = sequences[static_cast<size_t>(b)];
    s.query =
        static_cast<const char*>(query.const_data_ptr()) + from_q[b] * query.stride(0) * element;
    s.out = static_cast<char*>(out.mutable_data_ptr()) + from_q[b] * out.stride(0) * element;
    if (alibi_slopes) s.alibi = options.alibi.data() + b * options.alibi_sequence;
    s.queries = from_q[b + 1] - from_q[b];
    s.keys = from_k[b + 1] - from_k[b];
    s.kv_first = from_k[b];
    s.shift = s.keys - s.queries;
  }
  run_attention(kernels, query.scalar_type(), args, sequences);
}

}  // namespace
}  // namespace ipex

STABLE_TORCH_LIBRARY_IMPL(ipex, CPU, m) {
  IPEX_IMPL(m, "varlen_attention", ipex::varlen_attention);
}
