// SPDX-License-Identifier: Apache-2.0
// Checks of caches, block tables and lengths for the glue of attention ops. Everything that a
// kernel will use as an index is checked here, before any memory is touched; the texts are as in
// ipex_core.ops.kv_cache.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "ipex/glue/argument_checks.h"
#include "ipex/glue/dispatch.h"
#include "ipex/glue/in_place.h"
#include "ipex/kv_view.h"

namespace ipex {

inline bool is_index_dtype(ScalarType dtype) {
  return dtype == ScalarType::Int || dtype == ScalarType::Long;
}

// A vector of int32 or int64 numbers; `rows` of another layout are copied.
class Indices {
 public:
  Indices() = default;
  explicit Indices(const Tensor& value)
      : tensor_(as_contiguous(value)),
        data_(tensor_.const_data_ptr()),
        wide_(tensor_.scalar_type() == ScalarType::Long) {}
  int64_t operator[](int64_t i) const {
    return wide_ ? static_cast<const int64_t*>(data_)[i] : static_cast<const int32_t*>(data_)[i];
  }
  const int32_t* narrow() const { return wide_ ? nullptr : static_cast<const int32_t*>(data_); }

 private:
  Tensor tensor_;
  const void* data_ = nullptr;
  bool wide_ = false;
};

inline void check_index_tensor(const char* op, const char* name, const Tensor& value, int64_t dim) {
  IPEX_CHECK(value.is_cpu(), op, ": ", name, " must be on the device of query = cpu");
  IPEX_CHECK(is_index_dtype(value.scalar_type()), op, ": ", name,
             " must have dtype int32, int64, got ", dtype_name(value.scalar_type()));
  IPEX_CHECK(value.dim() == dim, op, ": ", name, " must be ", dim, "-D, got ", value.dim(), "-D");
}

// alibi_slopes [tokens, heads, keys]: numbers for the last keys of each query, in its dtype.
inline OptionalTensor near_keys(const char* op, const OptionalTensor& slopes, const Tensor& query,
                                int64_t& keys) {
  const bool fits = slopes && slopes->dim() == 3 && query.dim() == 3 &&
                    slopes->size(0) == query.size(0) && slopes->size(1) == query.size(1) &&
                    slopes->size(2) > 0;
  if (!fits) return {};
  check_kind(op, "alibi_slopes", *slopes, query, "query", false);
  keys = slopes->size(2);
  return as_contiguous(*slopes);
}

inline KvType kv_type(ScalarType cache) {
  switch (cache) {
    case ScalarType::Char:
      return KvType::kInt8;
    case ScalarType::Float8_e5m2:
      return KvType::kE5m2;
    case ScalarType::Float8_e4m3fn:
      return KvType::kE4m3;
    default:
      return KvType::kSame;
  }
}

inline bool is_cache_dtype(ScalarType cache, ScalarType query) {
  return cache == query || kv_type(cache) != KvType::kSame;
}

// What the argument kv_cache_dtype demands of the caches.
inline void check_cache_kind(const char* op, const Tensor& cache, const std::string& kind) {
  const ScalarType dtype = cache.scalar_type();
  ScalarType wanted = dtype;
  if (kind == "fp8" || kind == "fp8_e5m2")
    wanted = ScalarType::Float8_e5m2;
  else if (kind == "fp8_e4m3")
    wanted = ScalarType::Float8_e4m3fn;
  else if (kind == "int8")
    wanted = ScalarType::Char;
  else
    IPEX_CHECK(kind == "auto", op,
               ": kv_cache_dtype must be one of auto, fp8, fp8_e5m2, fp8_e4m3, int8, got ", kind);
  IPEX_CHECK(dtype == wanted, op, ": key_cache must have dtype ", dtype_name(wanted),
             " for kv_cache_dtype ", kind, ", got ", dtype_name(dtype));
}

// The pair of caches: same device, dtype of x or quantized, 4-D, consecutive elements, equal
// shapes; no shared elements where they are written to.
inline void check_caches(const char* op, const Tensor& key_cache, const Tensor& value_cache,
                         const Tensor& x, const char* of, const char* shape, bool written = false) {
  const auto one = [&](const char* name, const Tensor& cache) {
    IPEX_CHECK(cache.is_cpu(), op, ": ", name, " must be on the device of ", of, " = cpu");
    IPEX_CHECK(is_cache_dtype(cache.scalar_type(), x.scalar_type()), op, ": ", name,
               " must have the dtype of ", of, " = ", dtype_name(x.scalar_type()),
               ", int8, float8_e5m2 or float8_e4m3fn, got ", dtype_name(cache.scalar_type()));
    IPEX_CHECK(cache.dim() == 4, op, ": ", name, " must be 4-D ", shape, ", got ", cache.dim(),
               "-D");
    IPEX_CHECK(cache.stride(3) == 1 || cache.size(3) <= 1, op, ": ", name,
               " must have a contiguous last dimension, got stride ", cache.stride(3));
    if (written) check_not_expanded(op, name, cache);
  };
  one("key_cache", key_cache);
  one("value_cache", value_cache);
  bool same = true;
  for (int64_t i = 0; i < 4; ++i) same &= key_cache.size(i) == value_cache.size(i);
  IPEX_CHECK(same, op, ": value_cache must have the shape of key_cache = ", shape_text(key_cache),
             ", got ", shape_text(value_cache));
  IPEX_CHECK(value_cache.scalar_type() == key_cache.scalar_type(), op,
             ": value_cache must have the dtype of key_cache = ",
             dtype_name(key_cache.scalar_type()), ", got ", dtype_name(value_cache.scalar_type()));
}

// Optional float32 scales of each row, in the shape of the cache without its last dimension.
inline void check_row_scales(const char* op, const char* name, const OptionalTensor& scales,
                             const Tensor& cache) {
  if (!scales) return;
  IPEX_CHECK(scales->is_cpu(), op, ": ", name, " must be on the device of key_cache = cpu");
  IPEX_CHECK(scales->scalar_type() == ScalarType::Float, op, ": ", name,
             " must have dtype float32, got ", dtype_name(scales->scalar_type()));
  IPEX_CHECK(cache.scalar_type() == ScalarType::Char, op, ": ", name,
             " must be None unless the cache is int8, got a cache of dtype ",
             dtype_name(cache.scalar_type()));
  bool same = scales->dim() == 3;
  for (int64_t i = 0; same && i < 3; ++i) same = scales->size(i) == cache.size(i);
  IPEX_CHECK(same, op, ": ", name, " must have shape [", cache.size(0), ", ", cache.size(1), ", ",
             cache.size(2), "], got ", shape_text(*scales));
}

// The length of sequence s and the numbers of its blocks: 0 <= length <= capacity of the table, and
// every block number in use exists. Unused entries of the table may hold anything.
inline void check_block_table(const char* op, const char* lengths_name, int64_t length,
                              const char* tables_name, const Indices& tables, int64_t s,
                              int64_t blocks_per_sequence, int64_t block_size, int64_t blocks) {
  IPEX_CHECK(length >= 0 && length <= blocks_per_sequence * block_size, op, ": ", lengths_name,
             " must be between 0 and the capacity of ", tables_name, " = ",
             blocks_per_sequence * block_size, ", got ", length);
  for (int64_t i = 0; i * block_size < length; ++i) {
    const int64_t block = tables[s * blocks_per_sequence + i];
    IPEX_CHECK(block >= 0 && block < blocks, op, ": ", tables_name,
               " must hold numbers of blocks in [0, ", blocks, "), got ", block);
  }
}

// The same for all sequences of an op whose argument is called block_tables.
inline void check_block_tables(const char* op, const char* lengths_name, const Indices& lengths,
                               const Indices& tables, int64_t sequences,
                               int64_t blocks_per_sequence, int64_t block_size, int64_t blocks) {
  for (int64_t s = 0; s < sequences; ++s) {
    check_block_table(op, lengths_name, lengths[s], "block_tables", tables, s, blocks_per_sequence,
                      block_size, blocks);
  }
}

// Block numbers (or lengths) as the int32 array that kernels read; a copy only if they are int64.
inline const int32_t* as_int32(const Indices& values, int64_t count, std::vector<int32_t>& copy) {
  if (const int32_t* data = values.narrow()) return data;
  copy.resize(static_cast<size_t>(count));
  // Entries that are not used may hold anything; those that are used have been checked.
  for (int64_t i = 0; i < count; ++i)
    copy[static_cast<size_t>(i)] = static_cast<int32_t>(values[i]);
  return copy.data();
}

inline KvPart kv_part(const Tensor& cache, const OptionalTensor& scales, double scale,
                      int64_t block, int64_t head, int64_t row) {
  KvPart part{};
  part.data = cache.const_data_ptr();
  part.strides = {cache.stride(block), cache.stride(head), cache.stride(row)};
  part.scale = static_cast<float>(scale);
  if (scales) {
    part.scales = static_cast<const float*>(scales->const_data_ptr());
    part.scale_strides = {scales->stride(block), scales->stride(head), scales->stride(row)};
  }
  return part;
}

}  // namespace ipex
