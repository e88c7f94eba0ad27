// SPDX-License-Identifier: Apache-2.0
// Copies, and the built-in instructions that are nothing else.
#include "program/copy.h"

#include <algorithm>
#include <cstring>

#include "ipex/glue/image.h"
#include "ipex/glue/op_loops.h"
#include "ipex/glue/strided_copy.h"
#include "program/scalars.h"

namespace ipex {
namespace {

constexpr int64_t kMaxDim = CopyCall::kMaxDim;
const Kernel<decltype(ipex_k_copy)> kernel("program", "ipex_k_copy");

struct Dim {
  int64_t size, from, to;
};

// The dimensions from the outermost to the innermost one of the result, merged where possible.
int64_t ordered(const int64_t* from, const int64_t* to, const int64_t* sizes, int64_t dim,
                Dim* dims) {
  int64_t n = 0;
  for (int64_t d = 0; d < dim; ++d)
    if (sizes[d] != 1) dims[n++] = {sizes[d], from[d], to[d]};
  std::stable_sort(dims, dims + n, [](const Dim& a, const Dim& b) { return a.to > b.to; });
  int64_t merged = 0;
  for (int64_t d = 0; d < n; ++d) {
    Dim& last = dims[merged - (merged > 0)];
    if (merged > 0 && last.from == dims[d].from * dims[d].size &&
        last.to == dims[d].to * dims[d].size) {
      last = {last.size * dims[d].size, dims[d].from, dims[d].to};
    } else {
      dims[merged++] = dims[d];
    }
  }
  if (merged == 0) dims[merged++] = {1, 1, 1};
  return merged;
}

bool is_plain(const Tensor& x) {
  const auto item = x.element_size();
  return (item == 1 || item == 2 || item == 4 || item == 8) && x.dim() <= kMaxDim &&
         x.scalar_type() != ScalarType::ComplexFloat;  // may be conjugated when it is read
}

}  // namespace

void strided_copy(const void* from, const int64_t* from_strides, void* to,
                  const int64_t* to_strides, const int64_t* sizes, int64_t dim, int64_t item) {
  for (int64_t d = 0; d < dim; ++d)
    if (sizes[d] == 0) return;
  Dim dims[kMaxDim + 1];
  int64_t n = ordered(from_strides, to_strides, sizes, dim, dims);
  CopyCall call;
  call.from = from;
  call.to = to;
  call.item = item;
  const Dim i = dims[--n];
  // The other dimension of a tile: along rows the next one, else the innermost one of the
  // source.
  int64_t at = n - 1;
  if (i.from != 1)
    for (int64_t d = n - 1; d >= 0; --d)
      if (dims[d].from != 0 && (dims[d].from < dims[at].from || dims[at].from == 0)) at = d;
  Dim j{1, 0, 0};
  if (n > 0) {
    j = dims[at];
    std::copy(dims + at + 1, dims + n, dims + at);
    --n;
  }
  call.outer = n;
  for (int64_t d = 0; d < n; ++d) {
    call.sizes[d] = dims[d].size;
    call.from_strides[d] = dims[d].from;
    call.to_strides[d] = dims[d].to;
  }
  call.size_i = i.size, call.from_i = i.from, call.to_i = i.to;
  call.size_j = j.size, call.from_j = j.from, call.to_j = j.to;
  constexpr int64_t kTileBytes = 16 * 1024;
  const int64_t elements = kTileBytes / item;
  // A square of some cache lines; rows as long as they are.
  const bool rows = i.from == 1 && i.to == 1;
  call.tile_i = std::min(i.size, rows ? elements : item < 4 ? 64 : 32);
  call.tile_j =
      std::min(j.size, std::max<int64_t>(1, (rows ? elements : elements / 2) / call.tile_i));
  int64_t tiles = call.tiles_i() * call.tiles_j();
  for (int64_t d = 0; d < n; ++d) tiles *= call.sizes[d];
  const int64_t bytes = call.tile_i * call.tile_j * item;
  const auto function = kernel.get();
  parallel_for(tiles, std::max<int64_t>(1, kPieceBytes / bytes),
               [&](int64_t begin, int64_t end) { function(&call, begin, end); });
}

void copy_to(const Tensor& x, const Tensor& to) {
  if (!is_plain(x) || to.dim() > kMaxDim || x.scalar_type() != to.scalar_type()) {
    Tensor target = to;
    torch::stable::copy_(target, x);
    return;
  }
  int64_t strides[kMaxDim];
  const int64_t extra = to.dim() - x.dim();
  for (int64_t d = 0; d < to.dim(); ++d)
    strides[d] = d < extra || x.size(d - extra) == 1 ? 0 : x.stride(d - extra);
  strided_copy(x.const_data_ptr(), strides, to.mutable_data_ptr(), to.strides().data(),
               to.sizes().data(), to.dim(), static_cast<int64_t>(x.element_size()));
}

Tensor as_contiguous(const Tensor& x) {
  if (x.is_contiguous()) return x;
  if (!is_plain(x)) return torch::stable::contiguous(x);
  Tensor y = new_contiguous_like(x);
  copy_to(x, y);
  return y;
}

Tensor as_channels_last(const Tensor& x) {
  if (channels_are_innermost(x)) return x;
  Tensor copy = new_image(x.size(0), x.size(1), x.size(2), x.size(3), true, x.scalar_type());
  copy_to(x, copy);
  return copy;
}

namespace program {
namespace {

Tensor contiguous(const Tensor& x) { return as_contiguous(x); }

Tensor channels_last(const Tensor& x) {
  IPEX_CHECK(x.dim() == 4, "channels_last: x must be 4-D, got ", x.dim(), "-D");
  return as_channels_last(x);
}

// --- cat -----------------------------------------------------------------------------------------

Tensor cat(const std::vector<Tensor>& tensors, int64_t given) {
  IPEX_CHECK(!tensors.empty(), "cat: tensors must have at least 1 tensor(s), got 0");
  const Tensor& first = tensors[0];
  const int64_t dims = first.dim();
  IPEX_CHECK(dims <= kMaxDim, "cat: tensors must have at most ", kMaxDim, " dimensions, got ",
             dims);
  IPEX_CHECK(-dims <= given && given < dims, "cat: dim must be a dimension of x (", dims,
             "-D), got ", given);
  const int64_t dim = given < 0 ? given + dims : given;
  int64_t sizes[kMaxDim];
  std::copy_n(first.sizes().data(), dims, sizes);
  sizes[dim] = 0;
  bool last = true;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const Tensor& x = tensors[i];
    IPEX_CHECK(x.scalar_type() == first.scalar_type(), "cat: tensor ", i,
               " must have the dtype of tensor 0 = ", dtype_name(first.scalar_type()), ", got ",
               dtype_name(x.scalar_type()));
    bool fits = x.dim() == dims;
    for (int64_t d = 0; fits && d < dims; ++d) fits = d == dim || x.size(d) == sizes[d];
    IPEX_CHECK(fits, "cat: tensor ", i, " must have the shape of tensor 0 = ", shape_text(first),
               " except in dimension ", dim, ", got ", shape_text(x));
    sizes[dim] += x.size(dim);
    last = last && is_channels_last(x);
  }
  Tensor y = last ? new_image(sizes[0], sizes[1], sizes[2], sizes[3], true, first.scalar_type())
                  : new_contiguous(sizes, dims, first.scalar_type());
  if (y.numel() == 0) return y;
  const auto item = static_cast<int64_t>(y.element_size());
  IPEX_CHECK(item <= 8, "cat: tensors must have elements of at most 8 bytes, got ", item);
  char* to = static_cast<char*>(y.mutable_data_ptr());
  for (const Tensor& x : tensors) {
    if (x.numel() > 0)
      strided_copy(x.const_data_ptr(), x.strides().data(), to, y.strides().data(), x.sizes().data(),
                   dims, item);
    to += x.size(dim) * y.stride(dim) * item;
  }
  return y;
}

// --- pad -----------------------------------------------------------------------------------------

template <class T>
void put(char* to, T value) {
  std::memcpy(to, &value, sizeof(T));
}

// The bytes of a number in a dtype.
void encode(double value, ScalarType dtype, char* to) {
  const auto single = static_cast<float>(value);
  switch (dtype) {
    case ScalarType::Float:
      return put(to, single);
    case ScalarType::Double:
      return put(to, value);
    case ScalarType::Half: {
      Half half;
      store(half, single);
      return put(to, half);
    }
    case ScalarType::BFloat16: {
      BFloat16 half;
      store(half, single);
      return put(to, half);
    }
    case ScalarType::Bool:
      return put(to, static_cast<uint8_t>(value != 0));
    case ScalarType::Byte:
    case ScalarType::Char:
      return put(to, static_cast<int8_t>(static_cast<int64_t>(value)));
    case ScalarType::Short:
      return put(to, static_cast<int16_t>(value));
    case ScalarType::Int:
      return put(to, static_cast<int32_t>(value));
    case ScalarType::Long:
      return put(to, static_cast<int64_t>(value));
    default:
      fail("pad: x must have a dtype of numbers, got ", dtype_name(dtype));
  }
}

Tensor pad(const Tensor& x, const std::vector<int64_t>& padding, double value) {
  const int64_t dims = x.dim(), given = static_cast<int64_t>(padding.size());
  IPEX_CHECK(dims <= kMaxDim, "pad: x must have at most ", kMaxDim, " dimensions, got ", dims);
  IPEX_CHECK(given % 2 == 0, "pad: padding must have two numbers for a dimension, got ", given);
  IPEX_CHECK(given <= 2 * dims,
             "pad: padding must have at most two numbers for each dimension of x (", dims,
             "-D), got ", list_text(padding));
  int64_t sizes[kMaxDim], before[kMaxDim] = {}, from[kMaxDim], inner[kMaxDim];
  for (int64_t d = 0; d < dims; ++d) {
    const int64_t pair = 2 * (dims - 1 - d), size = x.size(d);
    const int64_t low = pair < given ? padding[static_cast<size_t>(pair)] : 0;
    const int64_t high = pair < given ? padding[static_cast<size_t>(pair + 1)] : 0;
    const int64_t cut_low = std::min<int64_t>(low, 0), cut_high = std::min<int64_t>(high, 0);
    IPEX_CHECK(cut_low + cut_high >= -size, "pad: padding must cut off at most ", size,
               " in dimension ", d, ", got ", list_text(padding));
    sizes[d] = size + low + high;
    before[d] = std::max<int64_t>(low, 0);
    from[d] = -cut_low;
    inner[d] = size + cut_low + cut_high;
  }
  const ScalarType dtype = x.scalar_type();
  const bool last = is_channels_last(x);
  Tensor y = last ? new_image(sizes[0], sizes[1], sizes[2], sizes[3], true, dtype)
                  : new_contiguous(sizes, dims, dtype);
  if (y.numel() == 0) return y;
  const auto item = static_cast<int64_t>(y.element_size());
  alignas(8) char fill[8];
  encode(value, dtype, fill);
  // Of each dimension what lies before and behind x, within x in the dimensions that are done.
  char* to = static_cast<char*>(y.mutable_data_ptr());
  const int64_t* steps = y.strides().data();
  constexpr int64_t kRepeat[kMaxDim] = {};
  int64_t region[kMaxDim];
  std::copy_n(sizes, dims, region);
  for (int64_t d = 0; d < dims; ++d) {
    const int64_t behind = before[d] + inner[d];
    region[d] = before[d];
    strided_copy(fill, kRepeat, to, steps, region, dims, item);
    region[d] = sizes[d] - behind;
    strided_copy(fill, kRepeat, to + behind * steps[d] * item, steps, region, dims, item);
    region[d] = inner[d];
    to += before[d] * steps[d] * item;
  }
  const char* source = static_cast<const char*>(x.const_data_ptr());
  for (int64_t d = 0; d < dims; ++d) source += from[d] * x.stride(d) * item;
  strided_copy(source, x.strides().data(), to, steps, inner, dims, item);
  return y;
}

const bool registered = [] {
  add("contiguous", Adapter<&contiguous>::entry());
  add("channels_last", Adapter<&channels_last>::entry());
  add("cat", Adapter<&cat>::entry());
  add("pad", Adapter<&pad>::entry());
  return true;
}();

}  // namespace
}  // namespace program
}  // namespace ipex
