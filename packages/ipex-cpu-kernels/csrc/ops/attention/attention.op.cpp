// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <atomic>
#include <cmath>

#include "attention.h"
#include "ipex/dispatch.h"
#include "runtime/scratch.h"

namespace ipex {
namespace {

const auto pack_kernels = IPEX_KERNELS("attention", attention_pack);
const auto run_kernels = IPEX_KERNELS("attention", attention);

void check_device_and_dtype(const char* name, const Tensor& x, const Tensor& query) {
  IPEX_CHECK(x.is_cpu(), "attention: ", name, " must be on the device of query = cpu, got another");
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
  IPEX_CHECK(mask.is_cpu(), "attention: mask must be on the device of query = cpu, got another");
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

// The last dimension contiguous, which kernels need; heads split off a projection are so already.
Tensor rows_contiguous(const Tensor& x) {
  return x.stride(3) == 1 || x.size(3) <= 1 ? x : torch::stable::contiguous(x);
}

HeadStrides strides_of(const Tensor& x) { return {x.stride(0), x.stride(1), x.stride(2)}; }

// Distance along dimension `from_last` (0: last) of a mask, 0 where it is broadcast.
int64_t mask_stride(const Tensor& mask, int64_t from_last) {
  const int64_t i = mask.dim() - 1 - from_last;
  return i < 0 || mask.size(i) == 1 ? 0 : mask.stride(i);
}

void set_mask(AttentionArgs& args, const Tensor& mask, ScalarType dtype) {
  args.mask = mask.const_data_ptr();
  args.mask_kind = mask.scalar_type() == ScalarType::Bool    ? MaskKind::kBool
                   : mask.scalar_type() == ScalarType::Float ? MaskKind::kFloat
                                                             : MaskKind::kSame;
  if (dtype == ScalarType::Float && args.mask_kind == MaskKind::kSame)
    args.mask_kind = MaskKind::kFloat;
  args.mask_strides = {mask_stride(mask, 3), mask_stride(mask, 2), mask_stride(mask, 1)};
  args.mask_key_stride = mask_stride(mask, 0);
}

// Uses of working memory: a thread's own, and the packed heads that all threads of a call share.
enum : int { kWorker, kShared };

struct Plan {
  decltype(ipex_k_attention_pack_f32)* pack;
  decltype(ipex_k_attention_f32)* run;
  int64_t head_bytes;     // packed keys and values of one head
  int64_t scratch_bytes;  // working memory of one thread
  int64_t threads;
};

// A task should be worth some 60 thousand multiplications, or a region costs more than it brings.
int64_t grain_for(int64_t work) { return std::max<int64_t>(1, 60000 / std::max<int64_t>(1, work)); }

// Tasks are heads of keys and values with all their queries.
void run_by_head(const AttentionArgs& args, const Plan& plan) {
  const int64_t key_blocks = (args.keys + kKeyBlock - 1) / kKeyBlock;
  const int64_t group = args.heads / args.kv_heads;
  const int64_t tasks = group * ((args.queries + kQueryBlock - 1) / kQueryBlock);
  std::atomic<bool> no_memory{false};
  parallel_for(args.batch * args.kv_heads, grain_for(group * args.queries * args.keys * args.size),
               [&](int64_t begin, int64_t end) {
                 char* room = Scratch<kWorker>::get(plan.head_bytes + plan.scratch_bytes);
                 if (!room) {
                   no_memory = true;
                   return;
                 }
                 AttentionArgs mine = args;
                 mine.packed = room;
                 for (int64_t kv = begin; kv < end; ++kv) {
                   mine.packed_first = kv;
                   plan.pack(&mine, kv * key_blocks, (kv + 1) * key_blocks);
                   plan.run(&mine, kQueryBlock, kv * tasks, (kv + 1) * tasks,
                            room + plan.head_bytes);
                 }
               });
  IPEX_CHECK(!no_memory, "attention: not enough memory for the keys and values of one head");
}

// All heads are packed first; tasks are blocks of queries.
void run_by_block(AttentionArgs args, const Plan& plan) {
  const int64_t kv_heads = args.batch * args.kv_heads, heads = args.batch * args.heads;
  args.packed = Scratch<kShared>::get(kv_heads * plan.head_bytes);
  IPEX_CHECK(args.packed, "attention: not enough memory for the keys and values of all heads");
  const int64_t key_blocks = (args.keys + kKeyBlock - 1) / kKeyBlock;
  const int64_t elements = std::max<int64_t>(1, std::min(args.keys, kKeyBlock) * args.size);
  parallel_for(kv_heads * key_blocks, std::max<int64_t>(1, 8192 / elements),
               [&](int64_t begin, int64_t end) { plan.pack(&args, begin, end); });

  int64_t rows = kQueryBlock;
  while (rows > 8 && heads * ((args.queries + rows - 1) / rows) < 2 * plan.threads) rows /= 2;
  const int64_t blocks = (args.queries + rows - 1) / rows;
  std::atomic<bool> no_memory{false};
  parallel_for(heads * blocks, grain_for(std::min(rows, args.queries) * args.keys * args.size),
               [&](int64_t begin, int64_t end) {
                 char* room = Scratch<kWorker>::get(plan.scratch_bytes);
                 if (room)
                   plan.run(&args, rows, begin, end, room);
                 else
                   no_memory = true;
               });
  IPEX_CHECK(!no_memory, "attention: not enough memory for the scores of a block of queries");
}

Tensor attention(const Tensor& query0, const Tensor& key0, const Tensor& value0,
                 const OptionalTensor& mask, double scale, bool is_causal) {
  check_arguments(query0, key0, value0);
  if (mask) check_mask(*mask, query0, key0.size(2));
  const ScalarType dtype = query0.scalar_type();
  AttentionArgs args{};
  args.batch = query0.size(0);
  args.heads = query0.size(1);
  args.queries = query0.size(2);
  args.size = query0.size(3);
  args.kv_heads = key0.size(1);
  args.keys = key0.size(2);
  // Stored as [B, S, H, D]: merging the heads afterwards is a view.
  const int64_t sizes[4] = {args.batch, args.queries, args.heads, args.size};
  const Tensor stored = new_contiguous(sizes, 4, dtype);
  Tensor out = torch::stable::transpose(stored, 1, 2);
  if (out.numel() == 0) return out;

  const Tensor query = rows_contiguous(query0), key = rows_contiguous(key0),
               value = rows_contiguous(value0);
  args.query = query.const_data_ptr();
  args.key = key.const_data_ptr();
  args.value = value.const_data_ptr();
  args.out = stored.mutable_data_ptr();
  args.query_strides = strides_of(query);
  args.key_strides = strides_of(key);
  args.value_strides = strides_of(value);
  args.out_strides = strides_of(out);
  args.scale =
      static_cast<float>(scale != 0.0 ? scale : 1.0 / std::sqrt(static_cast<double>(args.size)));
  args.is_causal = is_causal;
  Tensor mask_rows;
  if (mask) {
    const int64_t step = mask_stride(*mask, 0);
    mask_rows = step == 0 || step == 1 ? *mask : torch::stable::contiguous(*mask);
    set_mask(args, mask_rows, dtype);
  }

  Plan plan{};
  pack_kernels.visit(dtype, [&]<class T>(auto* kernel) {
    plan.pack = kernel;
    const int64_t elements =
        packed_keys(args.keys, args.size) + packed_values(args.keys, args.size);
    plan.head_bytes = round_up(elements * static_cast<int64_t>(sizeof(T)), 64);
  });
  run_kernels.visit(dtype, [&]<class T>(auto* kernel) { plan.run = kernel; });
  plan.scratch_bytes = round_up(attention_scratch_bytes(args.size), 64);
  plan.threads = static_cast<int64_t>(torch::stable::get_num_threads());
  // With heads for every thread, a thread packs a head and uses it at once, while it is in its
  // cache. With fewer, all threads pack first and then share the queries.
  if (args.batch * args.kv_heads >= 4 * plan.threads)
    run_by_head(args, plan);
  else
    run_by_block(args, plan);
  return out;
}

}  // namespace
}  // namespace ipex

STABLE_TORCH_LIBRARY_IMPL(ipex, CPU, m) { m.impl("attention", TORCH_BOX(&ipex::attention)); }
