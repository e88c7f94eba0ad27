// SPDX-License-Identifier: Apache-2.0
#include "ipex/glue/deferred.h"
#include "rotary_glue.h"

namespace ipex {
namespace {

const auto kernels = IPEX_KERNELS("rotary_embedding", rotary);
const auto functional_kernels = IPEX_KERNELS("rotary_embedding_functional", rotary);
const auto batched_kernels = IPEX_KERNELS("rotary_embedding_batched", rotary);
const auto table_kernels = IPEX_KERNELS("rotary_embedding_table", rotary);

// Checks the arguments of the two ops that take sin and cos, and describes them.
struct Arguments {
  Tokens tokens;
  RotaryWork work;
  RotaryRows rows;
  RotaryTablesArgument tables;

  Arguments(const char* op, const Tensor& query, const Tensor& key, const Tensor& sin,
            const Tensor& cos, int64_t rotary_dim, bool rotary_half,
            const OptionalTensor& position_ids)
      : tokens(checked(op, query, key, sin, cos, rotary_dim)),
        rows(op, position_ids, tokens, sin.numel() / sin.size(sin.dim() - 1)),
        tables(sin, cos) {
    work.positions = std::max<int64_t>(1, tokens.positions);
    work.head_dim = query.size(query.dim() - 1);
    work.rotary_dim = rotary_dim;
    work.half_split = rotary_half;
    rows.describe(work);
    tables.describe(work);
  }

  static Tokens checked(const char* op, const Tensor& query, const Tensor& key, const Tensor& sin,
                        const Tensor& cos, int64_t rotary_dim) {
    check_heads(op, query, key);
    check_rotary_dim(op, "rotary_dim", rotary_dim, query.size(query.dim() - 1));
    check_tables(op, sin, cos, query, rotary_dim);
    return Tokens(query);
  }
};

void rotary_embedding(const Tensor& query, const Tensor& key, const Tensor& sin, const Tensor& cos,
                      int64_t rotary_dim, bool rotary_half, const OptionalTensor& position_ids) {
  Arguments a("rotary_embedding", query, key, sin, cos, rotary_dim, rotary_half, position_ids);
  check_not_expanded("rotary_embedding", "query", query);
  check_not_expanded("rotary_embedding", "key", key);
  InPlace q = rotated_in_place(query), k = rotated_in_place(key);
  a.work.from[0] = a.work.to[0] = describe_heads(q.tensor());
  a.work.from[1] = a.work.to[1] = describe_heads(k.tensor());
  run_rotary(kernels, query.scalar_type(), a.work, a.tokens.count);
  q.finish();
  k.finish();
}

std::tuple<Tensor, Tensor> rotary_embedding_functional(const Tensor& query, const Tensor& key,
                                                       const Tensor& sin, const Tensor& cos,
                                                       int64_t rotary_dim, bool rotary_half,
                                                       const OptionalTensor& position_ids) {
  Arguments a("rotary_embedding_functional", query, key, sin, cos, rotary_dim, rotary_half,
              position_ids);
  const Tensor q = with_contiguous_heads(query), k = with_contiguous_heads(key);
  Tensor q_out = new_contiguous_like(query), k_out = new_contiguous_like(key);
  a.work.from[0] = describe_heads(q);
  a.work.from[1] = describe_heads(k);
  a.work.to[0] = describe_heads(q_out);
  a.work.to[1] = describe_heads(k_out);
  run_rotary(functional_kernels, query.scalar_type(), a.work, a.tokens.count);
  return {q_out, k_out};
}

// query or key [positions.shape, heads * head_size] or [positions.shape, heads, head_size].
void check_batched(const char* op, const char* name, const Tensor& x, const Tensor& positions,
                   int64_t head_size) {
  IPEX_CHECK(x.is_cpu(), op, ": ", name, " must be on the device of positions = cpu");
  check_tensor(op, name, x);
  const int64_t lead = positions.dim();
  bool fits = x.dim() == lead + 1 || x.dim() == lead + 2;
  for (int64_t i = 0; fits && i < lead; ++i) fits = x.size(i) == positions.size(i);
  if (fits && x.dim() == lead + 1) fits = x.size(lead) % head_size == 0;
  if (fits && x.dim() == lead + 2) fits = x.size(lead + 1) == head_size;
  IPEX_CHECK(fits, op, ": ", name, " must have shape ", shape_text(positions),
             " + [heads * head_size] or + [heads, head_size] with head_size = ", head_size,
             ", got ", shape_text(x));
  check_not_expanded(op, name, x);
}

// The heads without their first `skipped` elements.
RotaryHeads describe_batched(const Tensor& x, int64_t lead, int64_t head_size, int64_t skipped) {
  const bool flat = x.dim() == lead + 1;
  const int64_t item = x.scalar_type() == ScalarType::Float ? 4 : 2;
  return {static_cast<const char*>(x.const_data_ptr()) + skipped * item,
          flat ? x.size(lead) / head_size : x.size(lead),
          {lead == 2 ? x.stride(0) : 0, x.stride(lead - 1), flat ? head_size : x.stride(lead)}};
}

void check_positions(const char* op, const Tensor& positions, const Tensor& query,
                     const OptionalTensor& key, int64_t head_size) {
  const int64_t lead = positions.dim();
  IPEX_CHECK(is_index_dtype(positions.scalar_type()), op,
             ": positions must have dtype int32, int64, got ", dtype_name(positions.scalar_type()));
  IPEX_CHECK(lead == 1 || lead == 2, op,
             ": positions must be 1-D [tokens] or 2-D [batch, positions], got ", lead, "-D");
  IPEX_CHECK(head_size > 0, op, ": head_size must be positive, got ", head_size);
  check_batched(op, "query", query, positions, head_size);
  if (!key) return;
  check_batched(op, "key", *key, positions, head_size);
  IPEX_CHECK(key->scalar_type() == query.scalar_type(), op,
             ": key must have the dtype of query = ", dtype_name(query.scalar_type()), ", got ",
             dtype_name(key->scalar_type()));
}

void check_table(const char* op, const Tensor& cache, const Tensor& query) {
  IPEX_CHECK(cache.is_cpu(), op, ": cos_sin_cache must be on the device of query = cpu");
  IPEX_CHECK(cache.scalar_type() == query.scalar_type() || cache.scalar_type() == ScalarType::Float,
             op, ": cos_sin_cache must have the dtype of query = ", dtype_name(query.scalar_type()),
             " or float32, got ", dtype_name(cache.scalar_type()));
}

struct TableCall {
  bool is_neox;
  int64_t head_size;
  int64_t rotary_dim;
  int64_t skipped = 0;
  bool inverse = false;
};

// Rotates query and, if there is one, key by the rows of the table [.., cosines, then sines].
template <class Kernels>
void rotate_by_table(const Kernels& handles, const Tensor& positions, const Tensor& query,
                     const OptionalTensor& key, const Tensor& cache,
                     const std::vector<int64_t>& rows, const TableCall& call) {
  if (rows.empty()) return;
  const int64_t lead = positions.dim();
  const Rows table = as_rows(cache);
  InPlace q = rotated_in_place(query), k = rotated_in_place(key ? *key : query);
  RotaryWork work;
  work.from[0] = work.to[0] = describe_batched(q.tensor(), lead, call.head_size, call.skipped);
  if (key)
    work.from[1] = work.to[1] = describe_batched(k.tensor(), lead, call.head_size, call.skipped);
  const bool is_f32 = cache.scalar_type() == ScalarType::Float;
  const int64_t item = is_f32 ? 4 : 2;
  work.tables = {table.data,   static_cast<const char*>(table.data) + call.rotary_dim / 2 * item,
                 table.stride, table.stride,
                 is_f32,       false};
  work.rows = rows.data();
  work.row_period = static_cast<int64_t>(rows.size());
  work.positions = positions.size(lead - 1);
  work.head_dim = call.head_size - call.skipped;
  work.rotary_dim = call.rotary_dim;
  work.half_split = call.is_neox;
  work.inverse = call.inverse;
  run_rotary(handles, query.scalar_type(), work, work.row_period);
  q.finish();
  if (key) k.finish();
}

void rotary_embedding_batched(const Tensor& positions, const Tensor& query, const Tensor& key,
                              int64_t head_size, const Tensor& cos_sin_cache, bool is_neox,
                              int64_t rot_dim, const OptionalTensor& cos_sin_cache_offsets) {
  constexpr const char* kOp = "rotary_embedding_batched";
  check_positions(kOp, positions, query, key, head_size);
  check_rotary_dim(kOp, "rot_dim", rot_dim, head_size);
  const Tensor& cache = cos_sin_cache;
  check_table(kOp, cache, query);
  IPEX_CHECK(cache.dim() == 2 && cache.size(1) == rot_dim, kOp,
             ": cos_sin_cache must be 2-D with rot_dim = ", rot_dim, " columns, got ",
             shape_text(cache));
  const int64_t tokens = positions.numel();
  Indices offsets;
  if (cos_sin_cache_offsets) {
    const Tensor& o = *cos_sin_cache_offsets;
    IPEX_CHECK(o.is_cpu(), kOp, ": cos_sin_cache_offsets must be on the device of query = cpu");
    IPEX_CHECK(is_index_dtype(o.scalar_type()), kOp,
               ": cos_sin_cache_offsets must have dtype int32, int64, got ",
               dtype_name(o.scalar_type()));
    IPEX_CHECK(o.numel() == tokens, kOp, ": cos_sin_cache_offsets must have an entry for each of ",
               tokens, " tokens, got ", shape_text(o));
    offsets = Indices(o);
  }
  const Indices ids(positions);
  std::vector<int64_t> rows(static_cast<size_t>(tokens));
  for (int64_t i = 0; i < tokens; ++i) {
    int64_t row = ids[i];
    // Each summand is in range before the sum is made, which therefore cannot overflow.
    if (cos_sin_cache_offsets)
      row = row < 0 || offsets[i] < 0 || offsets[i] >= cache.size(0) || row >= cache.size(0)
                ? -1
                : row + offsets[i];
    IPEX_CHECK(row >= 0 && row < cache.size(0), kOp,
               ": positions must hold (with their offsets) rows of cos_sin_cache in [0, ",
               cache.size(0), "), got ", ids[i]);
    rows[static_cast<size_t>(i)] = row;
  }
  rotate_by_table(batched_kernels, positions, query, key, cache, rows,
                  {is_neox, head_size, rot_dim});
}

void rotary_embedding_table(const Tensor& positions, const Tensor& query, const OptionalTensor& key,
                            int64_t head_size, const Tensor& cos_sin_cache, bool is_neox,
                            int64_t rope_dim_offset, bool inverse) {
  constexpr const char* kOp = "rotary_embedding_table";
  check_positions(kOp, positions, query, key, head_size);
  const Tensor& cache = cos_sin_cache;
  check_table(kOp, cache, query);
  IPEX_CHECK(rope_dim_offset >= 0 && rope_dim_offset < head_size, kOp,
             ": rope_dim_offset must be in [0, ", head_size, "), got ", rope_dim_offset);
  const int64_t most = std::min(head_size - rope_dim_offset, kMaxRotaryDim);
  const int64_t columns = cache.dim() == 2 ? cache.size(1) : 0;
  IPEX_CHECK(columns >= 2 && columns <= most && columns % 2 == 0, kOp,
             ": cos_sin_cache must be 2-D with an even number of columns between 2 and ", most,
             ", got ", shape_text(cache));
  const Indices ids(positions);
  std::vector<int64_t> rows(static_cast<size_t>(positions.numel()));
  for (size_t i = 0; i < rows.size(); ++i) {
    rows[i] = ids[static_cast<int64_t>(i)];
    IPEX_CHECK(rows[i] >= 0 && rows[i] < cache.size(0), kOp,
               ": positions must hold rows of cos_sin_cache in [0, ", cache.size(0), "), got ",
               rows[i]);
  }
  rotate_by_table(table_kernels, positions, query, key, cache, rows,
                  {is_neox, head_size, columns, rope_dim_offset, inverse});
}

const Deferred table_in_vllm(
    "_C",
    "rotary_embedding(Tensor positions, Tensor(a!) query, Tensor(b!)? key, int head_size, Tensor "
    "cos_sin_cache, bool is_neox, int rope_dim_offset=0, bool inverse=False) -> ()",
    TORCH_BOX(&rotary_embedding_table));

}  // namespace
}  // namespace ipex

STABLE_TORCH_LIBRARY_IMPL(ipex, CPU, m) {
  IPEX_IMPL(m, "rotary_embedding", ipex::rotary_embedding);
  IPEX_IMPL(m, "rotary_embedding_functional", ipex::rotary_embedding_functional);
  IPEX_IMPL(m, "rotary_embedding_batched", ipex::rotary_embedding_batched);
  IPEX_IMPL(m, "rotary_embedding_table", ipex::rotary_embedding_table);
}
