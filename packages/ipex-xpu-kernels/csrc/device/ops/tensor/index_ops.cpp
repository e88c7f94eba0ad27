// SPDX-License-Identifier: Apache-2.0
// Indexing on the kernels of index.sycl.cpp.
#include <ATen/ExpandUtils.h>
#include <ATen/Functions.h>
#include <ATen/WrapDimUtils.h>

#include <utility>

#include "device/core/ipex_ops.h"
#include "device/core/strided.h"

namespace ipex::xpu {
namespace {

using at::IntArrayRef;
using at::Scalar;
using at::Tensor;
using std::optional;

bool is_index(const Tensor& index) {
  return index.scalar_type() == at::kLong || index.scalar_type() == at::kInt;
}
std::vector<std::int64_t> without(IntArrayRef sizes, std::int64_t dim) {
  std::vector<std::int64_t> result = sizes.vec();
  result.erase(result.begin() + dim);
  return result;
}
std::vector<std::int64_t> zero_at(IntArrayRef strides, std::int64_t dim) {
  std::vector<std::int64_t> result = strides.vec();
  result[static_cast<std::size_t>(dim)] = 0;
  return result;
}
// The index has one dimension, which is the given one of a tensor with these sizes.
Tensor along(const Tensor& index, IntArrayRef sizes, std::int64_t dim) {
  std::vector<std::int64_t> strides(sizes.size(), 0);
  strides[static_cast<std::size_t>(dim)] = 1;
  return index.contiguous().as_strided(sizes, strides);
}

at::TensorIterator movement(const Tensor& to, const Tensor& from, const Tensor& offsets) {
  return at::TensorIteratorConfig()
      .check_all_same_dtype(false)
      .set_check_mem_overlap(false)
      .resize_outputs(false)
      .add_output(to)
      .add_const_input(from)
      .add_const_input(offsets)
      .build();
}
bool move(const char* kernel, const Tensor& to, const Tensor& from, const Tensor& offsets) {
  const auto dtype = bits_dtype(to.scalar_type());
  auto iter = movement(to, from, offsets);
  return launch_strided<3>(iter, kernel_name(kernel, *dtype));
}
bool moves(const Tensor& a, const Tensor& b) {
  return a.scalar_type() == b.scalar_type() && bits_dtype(a.scalar_type()) &&
         a.numel() < kMaxElements && b.numel() < kMaxElements;
}

// Reading
// -----------------------------------------------------------------------------------------------

// `x` and `index` in the shape of `out`; x has stride 0 where it is indexed.
bool take(const char* op, const Tensor& out, const Tensor& x, Indexed part) {
  if (out.numel() == 0) return true;
  const Tensor& index = part.index;
  // An expanded index has the offsets of its elements.
  std::vector<std::int64_t> sizes, strides;
  for (std::int64_t d = 0; d < index.dim(); ++d)
    sizes.push_back(index.stride(d) == 0 ? 1 : index.size(d));
  part.index = index.as_strided(sizes, index.strides());
  return move("take", out, x, offsets_of(op, {part}, false).expand(out.sizes()));
}

bool select(const char* op, const Tensor& x, std::int64_t dim, const Tensor& index, Tensor& out) {
  if (!moves(x, out) || !is_index(index) || index.dim() > 1 || x.dim() == 0 || x.numel() == 0)
    return false;
  dim = at::maybe_wrap_dim(dim, x.dim());
  std::vector<std::int64_t> sizes = x.sizes().vec();
  sizes[static_cast<std::size_t>(dim)] = index.numel();
  if (out.sizes() != IntArrayRef(sizes)) out.resize_(sizes);
  return take(op, out, x.as_strided(sizes, zero_at(x.strides(), dim)),
              {along(index, sizes, dim), dim, x.size(dim), x.stride(dim)});
}
optional<Tensor> index_select(const Tensor& x, std::int64_t dim, const Tensor& index) {
  Tensor out = at::empty({0}, x.options());
  return select("index_select", x, dim, index, out) ? optional(out) : std::nullopt;
}
optional<Tensor> embedding(const Tensor& weight, const Tensor& indices, std::int64_t, bool, bool) {
  if (weight.dim() != 2 || !is_index(indices)) return std::nullopt;
  Tensor out = at::empty({0}, weight.options());
  if (!select("embedding", weight, 0, indices.reshape({-1}), out)) return std::nullopt;
  std::vector<std::int64_t> sizes = indices.sizes().vec();
  sizes.push_back(weight.size(1));
  return out.view(sizes);
}

bool gather_out(const Tensor& x, std::int64_t dim, const Tensor& index, bool, Tensor& out) {
  if (!moves(x, out) || index.scalar_type() != at::kLong || out.sizes() != index.sizes() ||
      x.dim() != index.dim() || x.dim() == 0 || x.numel() == 0)
    return false;
  dim = at::maybe_wrap_dim(dim, x.dim());
  for (std::int64_t d = 0; d < x.dim(); ++d) {
    if (d != dim && index.size(d) > x.size(d)) return false;
  }
  return take("gather", out, x.as_strided(index.sizes(), zero_at(x.strides(), dim)),
              {index, dim, x.size(dim), x.stride(dim)});
}

// x[..., i, j, ...]: where the indexed dimensions begin, of what shape they become, and where the
// elements lie.
struct Advanced {
  Tensor x;  // permuted so that indexed dimensions are neighbors
  std::int64_t before = 0;
  std::vector<std::int64_t> shape;  // of the indices
  std::vector<Indexed> parts;

  std::vector<std::int64_t> sizes() const {
    std::vector<std::int64_t> result = x.sizes().slice(0, static_cast<std::size_t>(before)).vec();
    result.insert(result.end(), shape.begin(), shape.end());
    const auto after = x.sizes().slice(static_cast<std::size_t>(before) + parts.size());
    result.insert(result.end(), after.begin(), after.end());
    return result;
  }
  // x in that shape, or without the dimensions of the indices.
  Tensor view(bool with_indices) const {
    std::vector<std::int64_t> size, stride;
    for (std::int64_t d = 0; d < before; ++d) {
      size.push_back(x.size(d));
      stride.push_back(x.stride(d));
    }
    if (with_indices) {
      size.insert(size.end(), shape.begin(), shape.end());
      stride.insert(stride.end(), shape.size(), 0);
    }
    for (auto d = before + static_cast<std::int64_t>(parts.size()); d < x.dim(); ++d) {
      size.push_back(x.size(d));
      stride.push_back(x.stride(d));
    }
    return x.as_strided(size, stride);
  }
  // Offsets in the shape of the indices, expanded to sizes().
  Tensor spread(const Tensor& offsets) const {
    std::vector<std::int64_t> stride(static_cast<std::size_t>(before), 0);
    stride.insert(stride.end(), offsets.strides().begin(), offsets.strides().end());
    const auto all = sizes();
    stride.resize(all.size(), 0);
    return offsets.as_strided(all, stride);
  }
};
optional<Advanced> advanced(const Tensor& x, const c10::List<optional<Tensor>>& list) {
  std::vector<Tensor> indices;
  for (const optional<Tensor>& one : list) {
    if (!one || !one->defined()) {
      indices.emplace_back();
    } else if (one->scalar_type() == at::kBool || one->scalar_type() == at::kByte) {
      const auto first = static_cast<std::int64_t>(indices.size());
      for (std::int64_t d = 0; d < one->dim(); ++d) {
        if (first + d >= x.dim() || one->size(d) != x.size(first + d)) return std::nullopt;
      }
      for (const Tensor& part : one->nonzero().unbind(1)) indices.push_back(part);
    } else if (is_index(*one)) {
      indices.push_back(one->to(at::kLong));
    } else {
      return std::nullopt;
    }
  }
  if (static_cast<std::int64_t>(indices.size()) > x.dim()) return std::nullopt;
  indices.resize(static_cast<std::size_t>(x.dim()));
  Advanced result;
  std::vector<Tensor> given;
  std::vector<std::int64_t> indexed, rest;
  for (std::size_t d = 0; d < indices.size(); ++d) {
    (indices[d].defined() ? indexed : rest).push_back(static_cast<std::int64_t>(d));
    if (indices[d].defined()) given.push_back(indices[d]);
  }
  if (given.empty()) return std::nullopt;
  for (std::size_t i = 1; i < given.size(); ++i) {
    const IntArrayRef a = given[0].sizes();
    const IntArrayRef b = given[i].sizes();
    for (std::size_t d = 0; d < std::min(a.size(), b.size()); ++d) {
      const auto m = a[a.size() - 1 - d], n = b[b.size() - 1 - d];
      if (m != n && m != 1 && n != 1) return std::nullopt;
    }
    if (!a.equals(b)) given = at::expand_outplace(given);
  }
  const bool neighbors =
      indexed.back() - indexed.front() + 1 == static_cast<std::int64_t>(indexed.size());
  result.before = neighbors ? indexed.front() : 0;
  if (neighbors) {
    result.x = x;
  } else {
    std::vector<std::int64_t> order = indexed;
    order.insert(order.end(), rest.begin(), rest.end());
    result.x = x.permute(order);
  }
  result.shape = given[0].sizes().vec();
  for (std::size_t i = 0; i < given.size(); ++i) {
    const auto d = result.before + static_cast<std::int64_t>(i);
    result.parts.push_back({given[i], indexed[i], result.x.size(d), result.x.stride(d)});
  }
  return result;
}

optional<Tensor> index(const Tensor& x, const c10::List<optional<Tensor>>& indices) {
  if (!moves(x, x)) return std::nullopt;
  const auto found = advanced(x, indices);
  if (!found) return std::nullopt;
  const Tensor out = at::empty(found->sizes(), x.options());
  if (found->parts[0].index.numel() == 0) return out;
  if (x.numel() == 0 || out.numel() == 0) return std::nullopt;  // indices are checked by the host
  const Tensor source = found->view(true);
  if (out.numel() >= kMaxElements) return std::nullopt;
  const Tensor offsets = offsets_of("index", found->parts, true);
  return move("take", out, source, found->spread(offsets)) ? optional(out) : std::nullopt;
}

// Writing
// -----------------------------------------------------------------------------------------------

bool adds(const Tensor& x) { return number_dtype(x.scalar_type()) && x.scalar_type() != at::kBool; }
// y and x without the dimension that is summed over, offsets likewise.
bool add(const Tensor& y, const Tensor& x, const Tensor& offsets, std::int64_t count,
         std::int64_t x_step, std::int64_t offset_step) {
  auto iter = movement(y, x, offsets);
  return launch_strided<3>(iter, kernel_name("add", *number_dtype(y.scalar_type())),
                           static_cast<unsigned long>(count), static_cast<long>(x_step),
                           static_cast<long>(offset_step));
}

bool index_put_(Tensor& x, const c10::List<optional<Tensor>>& indices, const Tensor& values,
                bool accumulate, bool) {
  if (!moves(x, values) || (accumulate && !adds(x))) return false;
  const auto found = advanced(x, indices);
  if (!found || x.numel() == 0) return false;
  const auto sizes = found->sizes();
  if (!at::is_expandable_to(values.sizes(), sizes)) return false;
  const Tensor source = values.expand(sizes);
  if (source.numel() == 0 || source.numel() >= kMaxElements) return false;
  const Tensor target = found->view(true);
  const Tensor offsets = offsets_of("index_put_", found->parts, true);
  if (!accumulate) return move("put", target, source, found->spread(offsets));
  // values as [before, indices, after], summed over the indices
  const Tensor dense = source.contiguous();
  const Tensor lines = found->view(false);
  const std::int64_t count = offsets.numel();
  std::int64_t after = 1;
  for (auto d = found->before; d < lines.dim(); ++d) after *= lines.size(d);
  std::vector<std::int64_t> strides(static_cast<std::size_t>(lines.dim()));
  std::int64_t step = 1;
  for (std::int64_t d = lines.dim() - 1; d >= 0; --d) {
    strides[static_cast<std::size_t>(d)] = d < found->before ? step * count : step;
    step *= lines.size(d);
  }
  const Tensor none = offsets.as_strided(
      lines.sizes(), std::vector<std::int64_t>(static_cast<std::size_t>(lines.dim()), 0));
  return add(lines, dense.as_strided(lines.sizes(), strides), none, count, after, 1);
}

// What scatter and its kin have in common: `source` in the shape of the index.
bool scatter(const char* op, const Tensor& x, std::int64_t dim, const Tensor& index,
             const Tensor& source, bool sum, const Tensor& out) {
  if (!moves(x, source) || !moves(x, out) || index.scalar_type() != at::kLong ||
      out.sizes() != x.sizes() || x.dim() == 0 || x.numel() == 0 || index.dim() != x.dim() ||
      (sum && !adds(x)) || source.dim() != x.dim())
    return false;
  dim = at::maybe_wrap_dim(dim, x.dim());
  for (std::int64_t d = 0; d < x.dim(); ++d) {
    if ((d != dim && index.size(d) > x.size(d)) || index.size(d) > source.size(d)) return false;
  }
  const Tensor values = source.as_strided(index.sizes(), source.strides());
  const Tensor target = out.as_strided(index.sizes(), zero_at(out.strides(), dim));
  const Tensor offsets = offsets_of(op, {{index, dim, out.size(dim), out.stride(dim)}}, false);
  if (!out.is_same(x)) out.copy_(x);
  if (index.numel() == 0) return true;
  if (!sum) return move("put", target, values, offsets);
  const auto sizes = without(index.sizes(), dim);
  const auto line = [&](const Tensor& t) { return t.as_strided(sizes, without(t.strides(), dim)); };
  return add(line(target), line(values), line(offsets), index.size(dim), values.stride(dim),
             offsets.stride(dim));
}
bool scatter_out(const Tensor& x, std::int64_t dim, const Tensor& index, const Tensor& source,
                 Tensor& out) {
  return scatter("scatter", x, dim, index, source, false, out);
}
bool scatter_value_out(const Tensor& x, std::int64_t dim, const Tensor& index, const Scalar& value,
                       Tensor& out) {
  const Tensor values = at::full({}, value, x.options()).expand(index.sizes());
  return scatter("scatter", x, dim, index, values, false, out);
}
bool scatter_add_out(const Tensor& x, std::int64_t dim, const Tensor& index, const Tensor& source,
                     Tensor& out) {
  return scatter("scatter_add", x, dim, index, source, true, out);
}
bool index_add_out(const Tensor& x, std::int64_t dim, const Tensor& index, const Tensor& source,
                   const Scalar& alpha, Tensor& out) {
  if (!is_index(index) || index.dim() != 1 || x.dim() == 0 || source.dim() != x.dim() ||
      x.scalar_type() != source.scalar_type() || alpha.isComplex())
    return false;
  dim = at::maybe_wrap_dim(dim, x.dim());
  std::vector<std::int64_t> sizes = x.sizes().vec();
  sizes[static_cast<std::size_t>(dim)] = index.numel();
  if (source.sizes() != IntArrayRef(sizes)) return false;
  const Tensor scaled = alpha.toDouble() == 1 ? source : source.mul(alpha);
  return scatter("index_add", x, dim, along(index.to(at::kLong), sizes, dim), scaled, true, out);
}

optional<Tensor> embedding_dense_backward(const Tensor& grad, const Tensor& indices,
                                          std::int64_t rows, std::int64_t padding,
                                          bool by_frequency) {
  if (by_frequency || !kernel_dtype(grad.scalar_type()) || !is_index(indices) ||
      indices.numel() == 0 || grad.numel() == 0)
    return std::nullopt;
  const std::int64_t columns = grad.size(-1);
  const std::int64_t count = indices.numel();
  // Summed in float32.
  const Tensor values = grad.contiguous().to(at::kFloat);
  const Tensor out = at::zeros({rows, columns}, values.options());
  const Tensor offsets =
      offsets_of("embedding_dense_backward", {{indices.reshape({-1}), 0, rows, columns}}, false,
                 padding < 0 ? kNoIndex : padding);
  if (!add(out.as_strided({columns}, {1}), values.as_strided({columns}, {1}),
           offsets.as_strided({columns}, {0}), count, columns, 1))
    return std::nullopt;
  return out.to(grad.scalar_type());
}

}  // namespace

void register_index() {
  constexpr auto kSpeed = KernelSpeed::SlowerIfSmall;
  static torch::Library aten(torch::Library::IMPL, "aten", c10::DispatchKey::XPU, __FILE__,
                             __LINE__);
  add_kernel<&index_select, kSpeed>(aten, "index_select");
  add_kernel<&embedding, kSpeed>(aten, "embedding");
  add_kernel<&gather_out, kSpeed>(aten, "gather.out");
  add_kernel<&index, kSpeed>(aten, "index.Tensor");
  add_kernel<&index_put_, kSpeed>(aten, "_index_put_impl_");
  add_kernel<&scatter_out, kSpeed>(aten, "scatter.src_out");
  add_kernel<&scatter_value_out, kSpeed>(aten, "scatter.value_out");
  add_kernel<&scatter_add_out, kSpeed>(aten, "scatter_add.out");
  add_kernel<&index_add_out, kSpeed>(aten, "index_add.out");
  add_kernel<&embedding_dense_backward, kSpeed>(aten, "embedding_dense_backward");
}

}  // namespace ipex::xpu
