// SPDX-License-Identifier: Apache-2.0
// Rotary embedding on the kernels of rope.sycl.cpp. Arguments that do not fit go to the host, which
// has the messages.
#include <ATen/Functions.h>

#include <tuple>

#include "device/core/kernel_ops.h"

namespace ipex::xpu {
namespace {

using at::Tensor;
using std::optional;

struct Tables {
  Tensor sin;
  Tensor cos;
  Tensor offsets;  // of the rows; undefined where rows are counted
  bool per_token = false;
};

bool fits(const Tensor& query, const Tensor& key, std::int64_t rotary_dim) {
  if ((query.dim() != 3 && query.dim() != 4) || key.dim() != query.dim() || rotary_dim < 2 ||
      rotary_dim % 2 != 0 || rotary_dim > std::min<std::int64_t>(1024, query.size(-1)) ||
      !kernel_dtype(query.scalar_type()) || key.scalar_type() != query.scalar_type())
    return false;
  for (std::int64_t d = 0; d < query.dim(); ++d) {
    if (d != query.dim() - 2 && key.size(d) != query.size(d)) return false;
  }
  return true;
}
// Written to in place, with neighboring elements in a head.
bool writable(const Tensor& x) {
  for (std::int64_t d = 0; d < x.dim(); ++d) {
    if (x.stride(d) == 0 && x.size(d) > 1) return false;
  }
  return x.stride(-1) == 1;
}

std::int64_t tokens_of(const Tensor& x) {
  return c10::multiply_integers(x.sizes().slice(0, x.dim() - 2));
}

optional<Tables> tables_of(const char* op, const Tensor& query, const Tensor& sin,
                           const Tensor& cos, std::int64_t rotary_dim,
                           const optional<Tensor>& position_ids) {
  if (sin.dim() < 2 || sin.sizes() != cos.sizes() || sin.scalar_type() != cos.scalar_type() ||
      (sin.scalar_type() != query.scalar_type() && sin.scalar_type() != at::kFloat) ||
      (sin.size(-1) != rotary_dim && sin.size(-1) != rotary_dim / 2))
    return std::nullopt;
  Tables tables{sin.contiguous(), cos.contiguous(), {}, false};
  const std::int64_t rows = sin.numel() / sin.size(-1);
  const std::int64_t tokens = tokens_of(query);
  const std::int64_t positions = query.size(-3);
  if (!position_ids) {
    tables.per_token = rows == tokens;
    return tables.per_token || rows >= positions ? optional(tables) : std::nullopt;
  }
  const std::int64_t given = position_ids->numel();
  if ((position_ids->scalar_type() != at::kLong && position_ids->scalar_type() != at::kInt) ||
      (given != tokens && given != positions))
    return std::nullopt;
  tables.per_token = given == tokens;
  tables.offsets = offsets_of(op, "position_ids", {*position_ids, 0, rows, sin.size(-1)});
  return tables;
}

void rotate(const Tensor& x, const Tables& tables, std::int64_t rotary_dim, bool half_split) {
  const std::int64_t pairs = rotary_dim / 2;
  launch_columns(
      x,
      kernel_name("rope", *kernel_dtype(x.scalar_type()),
                  *kernel_dtype(tables.sin.scalar_type()) + (half_split ? ",true" : ",false")),
      tokens_of(x), pairs, out_data(x), data(tables.sin), data(tables.cos), data(tables.offsets),
      static_cast<unsigned long>(x.size(-2)), static_cast<unsigned long>(x.size(-3)),
      static_cast<unsigned long>(pairs), static_cast<unsigned long>(tables.sin.size(-1)),
      tables.per_token ? 1 : 0, static_cast<long>(x.dim() == 4 ? x.stride(0) : 0),
      static_cast<long>(x.stride(-3)), static_cast<long>(x.stride(-2)));
}

bool rotary_embedding(Tensor& query, Tensor& key, const Tensor& sin, const Tensor& cos,
                      std::int64_t rotary_dim, bool half_split,
                      const optional<Tensor>& position_ids) {
  if (!fits(query, key, rotary_dim) || !writable(query) || !writable(key)) return false;
  const auto tables = tables_of("rotary_embedding", query, sin, cos, rotary_dim, position_ids);
  if (!tables) return false;
  rotate(query, *tables, rotary_dim, half_split);
  rotate(key, *tables, rotary_dim, half_split);
  return true;
}

optional<std::tuple<Tensor, Tensor>> rotary_embedding_functional(
    const Tensor& query, const Tensor& key, const Tensor& sin, const Tensor& cos,
    std::int64_t rotary_dim, bool half_split, const optional<Tensor>& position_ids) {
  if (!fits(query, key, rotary_dim)) return std::nullopt;
  const auto tables =
      tables_of("rotary_embedding_functional", query, sin, cos, rotary_dim, position_ids);
  if (!tables) return std::nullopt;
  const auto rotated = [&](const Tensor& x) {
    const Tensor y = x.clone(at::MemoryFormat::Contiguous);
    rotate(y, *tables, rotary_dim, half_split);
    return y;
  };
  return std::tuple(rotated(query), rotated(key));
}

}  // namespace

void register_rope() {
  static torch::Library ours(torch::Library::IMPL, "ipex", c10::DispatchKey::XPU, __FILE__,
                             __LINE__);
  add_kernel<&rotary_embedding>(ours, "rotary_embedding");
  add_kernel<&rotary_embedding_functional>(ours, "rotary_embedding_functional");
}

}  // namespace ipex::xpu
