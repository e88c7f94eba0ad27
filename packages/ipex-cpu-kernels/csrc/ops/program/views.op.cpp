// SPDX-License-Identifier: Apache-2.0
// Built-in instructions that look at memory in another way, look rows up or copy.
// ipex_core.program.builtins says what each means.
#include <algorithm>
#include <cstring>

#include "ipex/glue/op_loops.h"

namespace ipex::program {
namespace {

constexpr int64_t kMaxDim = 16;

// A view through torch's C interface, which does not go through the dispatcher.
Tensor view(const Tensor& x, const int64_t* sizes, const int64_t* strides, int64_t dim,
            int64_t offset = 0) {
  AtenTensorHandle handle;
  // The offset counts from the first element of x.
  IPEX_SHIM_CALL(aoti_torch__reinterpret_tensor(x.get(), dim, sizes, strides, offset, &handle));
  return Tensor(handle);
}

int64_t item_bytes(const Tensor& x) { return static_cast<int64_t>(x.element_size()); }

void check_dim(const char* op, const char* name, const Tensor& x, int64_t& dim) {
  const int64_t dims = x.dim();
  IPEX_CHECK(dims <= kMaxDim, op, ": x must have at most ", kMaxDim, " dimensions, got ", dims);
  IPEX_CHECK(-dims <= dim && dim < dims, op, ": ", name, " must be a dimension of x (", dims,
             "-D), got ", dim);
  if (dim < 0) dim += dims;
}

// Replaces 0 and -1 in `sizes`.
void infer_sizes(const Tensor& x, std::vector<int64_t>& sizes) {
  const std::vector<int64_t> given = sizes;
  const int64_t numel = x.numel();
  int64_t known = 1, inferred = -1;
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] == 0) {
      IPEX_CHECK(static_cast<int64_t>(i) < x.dim(), "reshape: sizes must have 0 only below ",
                 x.dim(), " (the dimensions of x), got ", list_text(given));
      sizes[i] = x.size(static_cast<int64_t>(i));
    }
    if (sizes[i] == -1 && inferred < 0) {
      inferred = static_cast<int64_t>(i);
    } else {
      IPEX_CHECK(sizes[i] >= 0, "reshape: sizes must not be negative but for one -1, got ",
                 list_text(given));
      known *= sizes[i];
    }
  }
  const bool fits = inferred < 0 ? known == numel : known > 0 && numel % known == 0;
  IPEX_CHECK(fits, "reshape: sizes must give the shape of ", numel, " elements, got ",
             list_text(given));
  if (inferred >= 0) sizes[static_cast<size_t>(inferred)] = numel / known;
}

// Strides of `sizes` over the memory of x, or false if it needs a copy. Dimensions of x that one
// stride steps through form a chunk, and each chunk must be a product of new dimensions.
bool view_strides(const Tensor& x, const std::vector<int64_t>& sizes, int64_t* strides) {
  int64_t target = static_cast<int64_t>(sizes.size()) - 1;
  int64_t chunk = 1, base = 1;
  bool fresh = true;
  int64_t taken = 1;
  for (int64_t i = x.dim() - 1; i >= -1; --i) {
    if (i >= 0 && x.size(i) == 1) continue;
    if (i < 0 || (!fresh && x.stride(i) != base * chunk)) {
      // The chunk ends: new dimensions must fill it.
      while (target >= 0 && (taken < chunk || sizes[static_cast<size_t>(target)] == 1)) {
        strides[target] = base * taken;
        taken *= sizes[static_cast<size_t>(target--)];
      }
      if (taken != chunk) return false;
      chunk = taken = 1;
      fresh = true;
    }
    if (i < 0) break;
    if (fresh) base = x.stride(i);
    fresh = false;
    chunk *= x.size(i);
  }
  return target < 0;
}

Tensor reshape(const Tensor& x, std::vector<int64_t> sizes) {
  infer_sizes(x, sizes);
  const int64_t dim = static_cast<int64_t>(sizes.size());
  IPEX_CHECK(dim <= kMaxDim, "reshape: sizes must have at most ", kMaxDim, " elements, got ", dim);
  int64_t strides[kMaxDim];
  if (x.numel() > 0 && view_strides(x, sizes, strides)) return view(x, sizes.data(), strides, dim);
  int64_t stride = 1;
  for (int64_t i = dim - 1; i >= 0; --i) {
    strides[i] = stride;
    stride *= std::max<int64_t>(1, sizes[static_cast<size_t>(i)]);
  }
  return view(as_contiguous(x), sizes.data(), strides, dim);
}

Tensor narrow(const Tensor& x, int64_t dim, int64_t start, int64_t length) {
  check_dim("narrow", "dim", x, dim);
  const int64_t size = x.size(dim);
  IPEX_CHECK(start >= 0 && length >= 0 && start <= size && length <= size - start,
             "narrow: start, length must lie in [0, ", size, "], got ", start, ", ", length);
  int64_t sizes[kMaxDim];
  std::copy_n(x.sizes().data(), x.dim(), sizes);
  sizes[dim] = length;
  return view(x, sizes, x.strides().data(), x.dim(), start * x.stride(dim));
}

Tensor transpose(const Tensor& x, int64_t a, int64_t b) {
  check_dim("transpose", "a", x, a);
  check_dim("transpose", "b", x, b);
  int64_t sizes[kMaxDim], strides[kMaxDim];
  std::copy_n(x.sizes().data(), x.dim(), sizes);
  std::copy_n(x.strides().data(), x.dim(), strides);
  std::swap(sizes[a], sizes[b]);
  std::swap(strides[a], strides[b]);
  return view(x, sizes, strides, x.dim());
}

Tensor permute(const Tensor& x, const std::vector<int64_t>& dims) {
  const int64_t dim = x.dim();
  IPEX_CHECK(dim <= kMaxDim, "permute: x must have at most ", kMaxDim, " dimensions, got ", dim);
  bool fits = static_cast<int64_t>(dims.size()) == dim, seen[kMaxDim] = {};
  int64_t sizes[kMaxDim], strides[kMaxDim];
  for (int64_t i = 0; fits && i < dim; ++i) {
    int64_t from = dims[static_cast<size_t>(i)];
    if (from < 0) from += dim;
    fits = from >= 0 && from < dim && !seen[from];
    if (!fits) break;
    seen[from] = true;
    sizes[i] = x.size(from);
    strides[i] = x.stride(from);
  }
  IPEX_CHECK(fits, "permute: dims must have each dimension of x (", dim, "-D) once, got ",
             list_text(dims));
  return view(x, sizes, strides, dim);
}

Tensor expand(const Tensor& x, const std::vector<int64_t>& given) {
  const int64_t dim = static_cast<int64_t>(given.size()), extra = dim - x.dim();
  IPEX_CHECK(dim <= kMaxDim, "expand: sizes must have at most ", kMaxDim, " elements, got ", dim);
  bool fits = extra >= 0;
  int64_t sizes[kMaxDim], strides[kMaxDim];
  for (int64_t i = 0; fits && i < dim; ++i) {
    const int64_t wanted = given[static_cast<size_t>(i)];
    if (i < extra) {
      fits = wanted >= 0;
      sizes[i] = wanted;
      strides[i] = 0;
      continue;
    }
    const int64_t size = x.size(i - extra);
    fits = wanted == -1 || wanted == size || (size == 1 && wanted >= 0);
    sizes[i] = wanted == -1 ? size : wanted;
    strides[i] = sizes[i] == size ? x.stride(i - extra) : 0;
  }
  IPEX_CHECK(fits, "expand: sizes must be a shape that x of shape ", shape_text(x),
             " broadcasts to, got ", list_text(given));
  return view(x, sizes, strides, dim);
}

Tensor unsqueeze(const Tensor& x, int64_t dim) {
  const int64_t dims = x.dim(), given = dim;
  IPEX_CHECK(dims < kMaxDim, "unsqueeze: x must have less than ", kMaxDim, " dimensions, got ",
             dims);
  if (dim < 0) dim += dims + 1;
  IPEX_CHECK(dim >= 0 && dim <= dims, "unsqueeze: dim must be a place in ", dims + 1,
             " dimensions, got ", given);
  int64_t sizes[kMaxDim], strides[kMaxDim];
  for (int64_t i = 0, from = 0; i <= dims; ++i) {
    if (i == dim) {
      sizes[i] = 1;
      strides[i] = i < dims ? x.size(i) * x.stride(i) : 1;
    } else {
      sizes[i] = x.size(from);
      strides[i] = x.stride(from++);
    }
  }
  return view(x, sizes, strides, dims + 1);
}

// x without a dimension, `offset` elements further on.
Tensor without_dim(const Tensor& x, int64_t dim, int64_t offset) {
  int64_t sizes[kMaxDim], strides[kMaxDim], n = 0;
  for (int64_t i = 0; i < x.dim(); ++i) {
    if (i == dim) continue;
    sizes[n] = x.size(i);
    strides[n++] = x.stride(i);
  }
  return view(x, sizes, strides, n, offset);
}

Tensor squeeze(const Tensor& x, int64_t dim) {
  if (x.dim() == 0) {
    IPEX_CHECK(dim == 0 || dim == -1, "squeeze: dim must be a dimension of x (1-D), got ", dim);
    return x;
  }
  check_dim("squeeze", "dim", x, dim);
  return x.size(dim) == 1 ? without_dim(x, dim, 0) : x;
}

Tensor slice(const Tensor& x, int64_t dim, int64_t start, int64_t end, int64_t step) {
  check_dim("slice", "dim", x, dim);
  IPEX_CHECK(step > 0, "slice: step must be positive, got ", step);
  const int64_t size = x.size(dim);
  const auto within = [size](int64_t i, int64_t low) {
    return std::clamp(i < 0 ? i + size : i, low, size);
  };
  start = within(start, 0);
  end = within(end, start);
  int64_t sizes[kMaxDim], strides[kMaxDim];
  std::copy_n(x.sizes().data(), x.dim(), sizes);
  std::copy_n(x.strides().data(), x.dim(), strides);
  sizes[dim] = (end - start) / step + ((end - start) % step != 0);
  const int64_t offset = start * strides[dim];
  // With one element at most the step is of no account, and its product with a stride may be too
  // large.
  if (sizes[dim] > 1) strides[dim] *= step;
  return view(x, sizes, strides, x.dim(), offset);
}

Tensor select(const Tensor& x, int64_t dim, int64_t index) {
  check_dim("select", "dim", x, dim);
  const int64_t size = x.size(dim);
  IPEX_CHECK(-size <= index && index < size, "select: index must be in [", -size, ", ", size,
             "), got ", index);
  return without_dim(x, dim, (index < 0 ? index + size : index) * x.stride(dim));
}

Tensor empty_like(const Tensor& x) { return new_contiguous_like(x); }

// The values of an int32 or int64 tensor, each checked to lie in [0, limit).
std::vector<int64_t> checked_ids(const char* op, const char* name, const Tensor& ids,
                                 int64_t limit) {
  const ScalarType dtype = ids.scalar_type();
  IPEX_CHECK(dtype == ScalarType::Int || dtype == ScalarType::Long, op, ": ", name,
             " must be int32 or int64, got torch.", dtype_name(dtype));
  const Tensor plain = as_contiguous(ids);
  const void* data = plain.const_data_ptr();
  std::vector<int64_t> values(static_cast<size_t>(plain.numel()));
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] = dtype == ScalarType::Int ? static_cast<const int32_t*>(data)[i]
                                         : static_cast<const int64_t*>(data)[i];
    IPEX_CHECK(values[i] >= 0 && values[i] < limit, op, ": ", name, " must be in [0, ", limit,
               "), got ", values[i]);
  }
  return values;
}

// Copies the rows `ids` of a matrix to consecutive rows.
void gather(const Rows& from, int64_t item, const std::vector<int64_t>& ids, void* to) {
  const int64_t bytes = from.columns * item, step = from.stride * item;
  if (bytes == 0) return;
  parallel_for(static_cast<int64_t>(ids.size()), std::max<int64_t>(1, kPieceBytes / bytes),
               [&](int64_t begin, int64_t end) {
                 for (int64_t i = begin; i < end; ++i)
                   std::memcpy(
                       static_cast<char*>(to) + i * bytes,
                       static_cast<const char*>(from.data) + ids[static_cast<size_t>(i)] * step,
                       static_cast<size_t>(bytes));
               });
}

Tensor embedding(const Tensor& weight, const Tensor& ids) {
  IPEX_CHECK(weight.dim() == 2, "embedding: weight must be 2-D, got ", weight.dim(), "-D");
  IPEX_CHECK(ids.dim() < kMaxDim, "embedding: ids must have less than ", kMaxDim,
             " dimensions, got ", ids.dim());
  const std::vector<int64_t> rows = checked_ids("embedding", "ids", ids, weight.size(0));
  int64_t sizes[kMaxDim];
  std::copy_n(ids.sizes().data(), ids.dim(), sizes);
  sizes[ids.dim()] = weight.size(1);
  Tensor y = new_contiguous(sizes, ids.dim() + 1, weight.scalar_type());
  gather(as_rows(weight), item_bytes(weight), rows, y.mutable_data_ptr());
  return y;
}

Tensor select_rows(const Tensor& x, const Tensor& index) {
  IPEX_CHECK(x.dim() >= 1, "select_rows: x must have at least 1 dimension(s), got 0-D");
  IPEX_CHECK(x.dim() <= kMaxDim, "select_rows: x must have at most ", kMaxDim, " dimensions, got ",
             x.dim());
  IPEX_CHECK(index.dim() == 1, "select_rows: index must be 1-D, got ", index.dim(), "-D");
  const std::vector<int64_t> rows = checked_ids("select_rows", "index", index, x.size(0));
  int64_t sizes[kMaxDim];
  std::copy_n(x.sizes().data(), x.dim(), sizes);
  sizes[0] = index.size(0);
  Tensor y = new_contiguous(sizes, x.dim(), x.scalar_type());
  if (y.numel() == 0) return y;
  Rows from;
  if (x.dim() == 2) {
    from = as_rows(x);
  } else {
    const Tensor plain = as_contiguous(x);
    const int64_t columns = x.numel() / x.size(0);
    from = {plain, plain.const_data_ptr(), x.size(0), columns, columns};
  }
  gather(from, item_bytes(x), rows, y.mutable_data_ptr());
  return y;
}

void copy_into(const Tensor& dst, const Tensor& src) {
  const int64_t extra = dst.dim() - src.dim();
  bool fits = extra >= 0, same = extra == 0;
  for (int64_t i = 0; fits && i < src.dim(); ++i) {
    const int64_t from = src.size(i), to = dst.size(i + extra);
    same = same && from == to;
    fits = from == to || from == 1;
  }
  IPEX_CHECK(fits,
             "copy_: src must have a shape that broadcasts to the shape of dst = ", shape_text(dst),
             ", got ", shape_text(src));
  const int64_t bytes = dst.numel() * item_bytes(dst);
  if (same && bytes <= kPieceBytes && src.scalar_type() == dst.scalar_type() &&
      dst.is_contiguous() && src.is_contiguous()) {
    std::memmove(dst.mutable_data_ptr(), src.const_data_ptr(), static_cast<size_t>(bytes));
    return;
  }
  Tensor to = dst;
  torch::stable::copy_(to, src);
}

const bool registered = [] {
  add("reshape", Adapter<&reshape>::entry());
  add("narrow", Adapter<&narrow>::entry());
  add("transpose", Adapter<&transpose>::entry());
  add("permute", Adapter<&permute>::entry());
  add("expand", Adapter<&expand>::entry());
  add("unsqueeze", Adapter<&unsqueeze>::entry());
  add("squeeze", Adapter<&squeeze>::entry());
  add("slice", Adapter<&slice>::entry());
  add("select", Adapter<&select>::entry());
  add("empty_like", Adapter<&empty_like>::entry());
  add("embedding", Adapter<&embedding>::entry());
  add("select_rows", Adapter<&select_rows>::entry());
  add("copy_", Adapter<&copy_into>::entry());
  return true;
}();

}  // namespace
}  // namespace ipex::program
