// SPDX-License-Identifier: Apache-2.0
// Checks and descriptions of arguments that the rotary ops share; the texts are as in
// ipex_core.ops.rotary_embedding.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "ipex/glue/in_place.h"
#include "ipex/glue/kv_glue.h"
#include "ipex/glue/op_loops.h"
#include "rotary.h"

namespace ipex {

inline void check_rotary_dim(const char* op, const char* name, int64_t rotary_dim,
                             int64_t head_dim) {
  const int64_t most = std::min(head_dim, kMaxRotaryDim);
  IPEX_CHECK(rotary_dim >= 2 && rotary_dim <= most && rotary_dim % 2 == 0, op, ": ", name,
             " must be an even number between 2 and ", most, ", got ", rotary_dim);
}

inline void check_heads(const char* op, const Tensor& query, const Tensor& key) {
  check_tensor(op, "query", query);
  IPEX_CHECK(query.dim() == 3 || query.dim() == 4, op,
             ": query must be 3-D [tokens, heads, head_dim] or 4-D [batch, positions, heads, "
             "head_dim], got ",
             query.dim(), "-D");
  IPEX_CHECK(key.is_cpu(), op, ": key must be on the device of query = cpu");
  IPEX_CHECK(key.scalar_type() == query.scalar_type(), op,
             ": key must have the dtype of query = ", dtype_name(query.scalar_type()), ", got ",
             dtype_name(key.scalar_type()));
  bool same = key.dim() == query.dim();
  for (int64_t i = 0; same && i < query.dim(); ++i)
    same = i == query.dim() - 2 || key.size(i) == query.size(i);
  IPEX_CHECK(same, op,
             ": key must have the shape of query but for the number of heads = ", shape_text(query),
             ", got ", shape_text(key));
}

inline void check_tables(const char* op, const Tensor& sin, const Tensor& cos, const Tensor& query,
                         int64_t rotary_dim) {
  IPEX_CHECK(sin.is_cpu(), op, ": sin must be on the device of query = cpu");
  const ScalarType dtype = sin.scalar_type();
  IPEX_CHECK(dtype == query.scalar_type() || dtype == ScalarType::Float, op,
             ": sin must have the dtype of query = ", dtype_name(query.scalar_type()),
             " or float32, got ", dtype_name(dtype));
  const int64_t last = sin.dim() < 2 ? -1 : sin.size(sin.dim() - 1);
  IPEX_CHECK(last == rotary_dim || 2 * last == rotary_dim, op,
             ": sin must have at least 2 dimensions, the last of size ", rotary_dim, " or ",
             rotary_dim / 2, ", got ", shape_text(sin));
  check_like(op, "cos", cos, sin, "sin");
}

// Tokens of a call: batch x positions.
struct Tokens {
  int64_t batch, positions, count;

  explicit Tokens(const Tensor& query) {
    batch = query.dim() == 4 ? query.size(0) : 1;
    positions = query.size(query.dim() - 3);
    count = batch * positions;
  }
};

// Which row of the tables each token uses: one entry per token or one per position.
struct RotaryRows {
  std::vector<int64_t> rows;
  int64_t period = 1;

  RotaryRows(const char* op, const OptionalTensor& position_ids, const Tokens& tokens,
             int64_t table_rows) {
    if (!position_ids) {
      const bool each = table_rows == tokens.count;
      IPEX_CHECK(each || table_rows >= tokens.positions, op, ": sin must have a row for each of ",
                 tokens.count, " tokens or ", tokens.positions, " positions, got ", table_rows,
                 " rows");
      period = each ? tokens.count : tokens.positions;
      return;
    }
    IPEX_CHECK(position_ids->is_cpu(), op, ": position_ids must be on the device of query = cpu");
    IPEX_CHECK(is_index_dtype(position_ids->scalar_type()), op,
               ": position_ids must have dtype int32, int64, got ",
               dtype_name(position_ids->scalar_type()));
    period = position_ids->numel();
    IPEX_CHECK(period == tokens.count || period == tokens.positions, op,
               ": position_ids must have an entry for each of ", tokens.count, " tokens or ",
               tokens.positions, " positions, got ", shape_text(*position_ids));
    const Indices ids(*position_ids);
    rows.resize(static_cast<size_t>(period));
    for (int64_t i = 0; i < period; ++i) {
      IPEX_CHECK(ids[i] >= 0 && ids[i] < table_rows, op,
                 ": position_ids must hold rows of sin and cos in [0, ", table_rows, "), got ",
                 ids[i]);
      rows[static_cast<size_t>(i)] = ids[i];
    }
  }

  void describe(RotaryWork& work) const {
    work.rows = rows.empty() ? nullptr : rows.data();
    work.row_period = std::max<int64_t>(1, period);
  }
};

// sin and cos as kernels take them.
struct RotaryTablesArgument {
  Rows sin, cos;

  RotaryTablesArgument(const Tensor& s, const Tensor& c) : sin(as_rows(s)), cos(as_rows(c)) {}
  void describe(RotaryWork& work) const {
    const bool is_f32 = sin.tensor.scalar_type() == ScalarType::Float;
    work.tables = {cos.data,   sin.data, cos.stride,
                   sin.stride, is_f32,   sin.columns == work.rotary_dim};
  }
};

// The tensor with consecutive elements in each head: itself, or a copy.
inline Tensor with_contiguous_heads(const Tensor& x) {
  const int64_t last = x.dim() - 1;
  return x.stride(last) == 1 || x.size(last) <= 1 ? x : torch::stable::contiguous(x);
}

inline RotaryHeads describe_heads(const Tensor& x) {
  const int64_t d = x.dim();
  return {x.const_data_ptr(),
          x.size(d - 2),
          {d == 4 ? x.stride(0) : 0, x.stride(d - 3), x.stride(d - 2)}};
}

// A tensor that is rotated in place; one whose heads are scattered is copied and copied back.
inline InPlace rotated_in_place(const Tensor& x) { return InPlace(x, with_contiguous_heads(x)); }

// The kernels of rotary.h on all tokens.
template <class Kernels>
void run_rotary(const Kernels& kernels, ScalarType dtype, const RotaryWork& work, int64_t tokens) {
  kernels.visit(dtype, [&]<class T>(auto* kernel) {
    const int64_t heads = work.from[0].heads + work.from[1].heads;
    parallel_for(tokens, row_grain<T>(std::max<int64_t>(1, heads * work.head_dim)),
                 [&](int64_t begin, int64_t end) { kernel(&work, begin, end); });
  });
}

}  // namespace ipex
