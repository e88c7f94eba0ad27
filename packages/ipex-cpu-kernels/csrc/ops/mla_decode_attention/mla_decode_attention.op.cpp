// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <atomic>
#include <cstring>
#include <vector>

#include "ipex/glue/kv_glue.h"
#include "mla_decode_attention/mla.h"
#include "runtime/scratch.h"

namespace ipex {
namespace {

constexpr const char* kOp = "mla_decode_attention";
const auto run_kernels = IPEX_KERNELS(kOp, mla_decode);
const auto combine_kernels = IPEX_KERNELS(kOp, mla_combine);

void check_arguments(const Tensor& query, const Tensor& cache, const Tensor& lengths, int64_t rank,
                     const OptionalTensor& tables, const OptionalTensor& rows) {
  check_tensor(kOp, "query", query);
  IPEX_CHECK(query.dim() == 3, kOp, ": query must be 3-D [sequences, heads, width], got ",
             query.dim(), "-D");
  const int64_t sequences = query.size(0), width = query.size(2);
  IPEX_CHECK(width > 0 && width <= 4096, kOp, ": query must have a width between 1 and 4096, got ",
             width);
  IPEX_CHECK(rank > 0 && rank <= width, kOp,
             ": kv_lora_rank must be between 1 and the width of query = ", width, ", got ", rank);
  IPEX_CHECK(cache.is_cpu(), kOp, ": kv_cache must be on the device of query = cpu");
  IPEX_CHECK(cache.scalar_type() == query.scalar_type(), kOp,
             ": kv_cache must have the dtype of query = ", dtype_name(query.scalar_type()),
             ", got ", dtype_name(cache.scalar_type()));
  IPEX_CHECK(cache.dim() == 3 && cache.size(2) == width, kOp,
             ": kv_cache must have shape [blocks, rows, ", width, "], got ", shape_text(cache));
  IPEX_CHECK(cache.stride(2) == 1 || width == 1, kOp,
             ": kv_cache must have a contiguous last dimension, got stride ", cache.stride(2));
  check_not_expanded(kOp, "kv_cache", cache);
  check_index_tensor(kOp, "lengths", lengths, 1);
  IPEX_CHECK(lengths.size(0) == sequences, kOp, ": lengths must have size sequences = ", sequences,
             ", got ", lengths.size(0));
  if (tables) {
    check_index_tensor(kOp, "block_tables", *tables, 2);
    IPEX_CHECK(tables->size(0) == sequences, kOp, ": block_tables must have ", sequences,
               " rows, got ", tables->size(0));
    IPEX_CHECK(cache.size(1) > 0, kOp, ": kv_cache must have rows in its blocks, got ",
               shape_text(cache));
  } else {
    IPEX_CHECK(cache.size(0) == sequences, kOp, ": kv_cache must have ", sequences,
               " blocks where there are no block_tables, got ", cache.size(0));
  }
  if (!rows) return;
  IPEX_CHECK(rows->is_cpu(), kOp, ": new_rows must be on the device of query = cpu");
  IPEX_CHECK(rows->scalar_type() == query.scalar_type(), kOp,
             ": new_rows must have the dtype of query = ", dtype_name(query.scalar_type()),
             ", got ", dtype_name(rows->scalar_type()));
  IPEX_CHECK(rows->dim() == 2 && rows->size(0) == sequences && rows->size(1) == width, kOp,
             ": new_rows must have shape [", sequences, ", ", width, "], got ", shape_text(*rows));
}

void check_values(const Tensor& cache, const Indices& lengths, const OptionalTensor& tables,
                  const Indices& blocks, int64_t sequences, bool writes) {
  if (tables) {
    check_block_tables(kOp, "lengths", lengths, blocks, sequences, tables->size(1), cache.size(1),
                       cache.size(0));
  } else {
    for (int64_t s = 0; s < sequences; ++s)
      IPEX_CHECK(lengths[s] >= 0 && lengths[s] <= cache.size(1), kOp,
                 ": lengths must be between 0 and the rows of the cache = ", cache.size(1),
                 ", got ", lengths[s]);
  }
  if (writes)
    for (int64_t s = 0; s < sequences; ++s)
      IPEX_CHECK(lengths[s] > 0, kOp, ": lengths must be positive where new_rows are written, got ",
                 lengths[s]);
}

// The new row of each sequence becomes its last one.
void write_rows(const Tensor& rows0, const Tensor& cache, const MlaArgs& args,
                const Indices& lengths) {
  const Tensor rows = as_contiguous(rows0);
  const auto size = static_cast<int64_t>(cache.element_size());
  const char* from = static_cast<const char*>(rows.const_data_ptr());
  char* to = static_cast<char*>(cache.mutable_data_ptr());
  for (int64_t s = 0; s < rows.size(0); ++s) {
    const int64_t position = lengths[s] - 1;
    const int64_t block =
        args.table ? args.table[s * args.table_stride + position / args.block_size] : s;
    const int64_t row = args.table ? position % args.block_size : position;
    std::memcpy(to + (block * args.block_stride + row * args.row_stride) * size,
                from + s * args.width * size, static_cast<size_t>(args.width * size));
  }
}

// Parts of 512 keys of up to 64 heads: the cut depends on shapes and lengths only.
void make_items(const Indices& lengths, int64_t sequences, int64_t heads,
                std::vector<MlaItem>& items, std::vector<int32_t>& first) {
  const int64_t groups = (heads + kMlaHeads - 1) / kMlaHeads;
  const int64_t step = mla_round_up((heads + groups - 1) / groups, 16);
  for (int64_t s = 0; s < sequences; ++s) {
    const int64_t length = lengths[s];
    const int64_t parts = std::max<int64_t>(1, (length + kMlaSplit - 1) / kMlaSplit);
    for (int64_t h = 0; h < heads; h += step) {
      first.push_back(static_cast<int32_t>(items.size()));
      for (int64_t p = 0; p < parts; ++p)
        items.push_back({static_cast<int32_t>(s), static_cast<int32_t>(h),
                         static_cast<int32_t>(std::min(step, heads - h)), p * kMlaSplit,
                         std::min(length, (p + 1) * kMlaSplit), static_cast<int32_t>(p),
                         static_cast<int32_t>(parts)});
    }
  }
}

void run_items(MlaArgs& args, const std::vector<MlaItem>& items, const std::vector<int32_t>& first,
               ScalarType dtype) {
  const auto count = static_cast<int64_t>(items.size());
  const auto heads = static_cast<int64_t>(first.size());
  args.items = items.data();
  if (count > heads) {
    args.partial = reinterpret_cast<float*>(
        Scratch<Area::kMlaPartial>::get(count * kMlaHeads * mla_partial_stride(args) * 4));
    IPEX_CHECK(args.partial, kOp, ": not enough memory for the partial results");
  }
  const int64_t bytes = mla_scratch_bytes(args);
  std::atomic<bool> no_memory{false};
  const auto each = [&](int64_t n, int64_t grain, const auto& call) {
    parallel_for(n, grain, [&](int64_t begin, int64_t end) {
      if (char* room = Scratch<Area::kMlaTask>::get(bytes))
        call(begin, end, room);
      else
        no_memory = true;
    });
    IPEX_CHECK(!no_memory, kOp, ": not enough memory for a block of keys");
  };
  run_kernels.visit(dtype, [&]<class T>(auto* kernel) {
    each(count, 1,
         [&](int64_t begin, int64_t end, char* room) { kernel(&args, begin, end, room); });
  });
  if (count == heads) return;
  combine_kernels.visit(dtype, [&]<class T>(auto* kernel) {
    each(heads, 1, [&](int64_t begin, int64_t end, char* room) {
      kernel(&args, first.data(), begin, end, room);
    });
  });
}

Tensor mla_decode_attention(const Tensor& query0, const Tensor& cache, const Tensor& lengths0,
                            double scale, int64_t kv_lora_rank, const OptionalTensor& block_tables,
                            const OptionalTensor& new_rows) {
  check_arguments(query0, cache, lengths0, kv_lora_rank, block_tables, new_rows);
  check_score_scale(kOp, "scale", scale);
  const int64_t sequences = query0.size(0), heads = query0.size(1);
  const Indices lengths(lengths0);
  const Indices tables = block_tables ? Indices(*block_tables) : Indices();
  check_values(cache, lengths, block_tables, tables, sequences, new_rows.has_value());
  const ScalarType dtype = query0.scalar_type();
  const int64_t sizes[3] = {sequences, heads, kv_lora_rank};
  Tensor out = new_contiguous(sizes, 3, dtype);

  const Tensor query =
      query0.stride(2) == 1 || query0.size(2) == 1 ? query0 : torch::stable::contiguous(query0);
  MlaArgs args{};
  std::vector<int32_t> table_copy;
  if (block_tables) {
    args.table_stride = block_tables->size(1);
    args.table = as_int32(tables, sequences * args.table_stride, table_copy);
    args.block_size = cache.size(1);
  }
  args.block_stride = cache.stride(0);
  args.row_stride = cache.stride(1);
  args.width = query.size(2);
  args.rank = kv_lora_rank;
  if (new_rows) write_rows(*new_rows, cache, args, lengths);
  if (out.numel() == 0) return out;

  args.query = query.const_data_ptr();
  args.cache = cache.const_data_ptr();
  args.out = out.mutable_data_ptr();
  args.query_sequence = query.stride(0);
  args.query_head = query.stride(1);
  args.out_sequence = out.stride(0);
  args.out_head = out.stride(1);
  args.scale = static_cast<float>(scale);
  std::vector<MlaItem> items;
  std::vector<int32_t> first;
  make_items(lengths, sequences, heads, items, first);
  run_items(args, items, first, dtype);
  return out;
}

}  // namespace
}  // namespace ipex

STABLE_TORCH_LIBRARY_IMPL(ipex, CPU, m) {
  IPEX_IMPL(m, "mla_decode_attention", ipex::mla_decode_attention);
}
