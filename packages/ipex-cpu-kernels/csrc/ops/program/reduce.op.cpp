// SPDX-License-Identifier: Apache-2.0
#include "program/reduce.h"

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "ipex/glue/image.h"
#include "ipex/glue/op_loops.h"
#include "program/scalars.h"

namespace ipex::program {
namespace {

constexpr int64_t kMaxDim = 16;
const auto row_kernels = IPEX_KERNELS("program", reduce_row);
const auto columns_kernels = IPEX_KERNELS("program", reduce_columns);

enum class Kind { kMean, kSum, kMaximum };

// A contiguous tensor as [outer, reduced, inner], of which the middle dimension is reduced.
struct Extent {
  int64_t outer = 1, reduced = 1, inner = 1;
};

// Whether the dimensions to reduce lie side by side in the order of memory.
bool describe(const int64_t* sizes, const bool* reduced, const int64_t* order, int64_t dim,
              Extent& extent) {
  extent = {};
  for (int64_t i = 0; i < dim; ++i) {
    const int64_t d = order[i], size = sizes[d];
    if (size == 1) continue;
    if (!reduced[d]) {
      (extent.reduced == 1 ? extent.outer : extent.inner) *= size;
    } else if (extent.inner > 1) {
      return false;
    } else {
      extent.reduced *= size;
    }
  }
  return true;
}

// x with the dimensions to reduce moved to the end and copied.
Tensor moved(const Tensor& x, const bool* reduced) {
  int64_t sizes[kMaxDim], strides[kMaxDim], n = 0;
  for (const bool last : {false, true})
    for (int64_t d = 0; d < x.dim(); ++d) {
      if (reduced[d] != last) continue;
      sizes[n] = x.size(d);
      strides[n++] = x.stride(d);
    }
  AtenTensorHandle handle;
  IPEX_SHIM_CALL(aoti_torch__reinterpret_tensor(x.get(), n, sizes, strides, 0, &handle));
  return as_contiguous(Tensor(handle));
}

// Elements of a row that are reduced at once: the sum of long rows is a sum of such sums.
constexpr int64_t kPiece = 16384;

template <class T, class F>
void reduce_rows(const T* x, T* y, const Extent& extent, Kind kind, F* kernel) {
  const int64_t pieces = std::max<int64_t>(1, (extent.reduced + kPiece - 1) / kPiece);
  const bool maximum = kind == Kind::kMaximum;
  const double divisor = kind == Kind::kMean ? static_cast<double>(extent.reduced) : 1.0;
  if (pieces == 1) {
    parallel_for(extent.outer, row_grain<T>(std::max<int64_t>(1, extent.reduced)),
                 [&](int64_t begin, int64_t end) {
                   for (int64_t i = begin; i < end; ++i) {
                     const float r = kernel(x + i * extent.reduced, extent.reduced, maximum);
                     store(y[i], r / static_cast<float>(divisor));
                   }
                 });
    return;
  }
  std::vector<float> parts(static_cast<size_t>(extent.outer * pieces));
  parallel_for(extent.outer * pieces, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t at = i % pieces * kPiece;
      parts[static_cast<size_t>(i)] = kernel(x + i / pieces * extent.reduced + at,
                                             std::min(kPiece, extent.reduced - at), maximum);
    }
  });
  for (int64_t i = 0; i < extent.outer; ++i) {
    const float* part = parts.data() + i * pieces;
    double r = part[0];
    for (int64_t k = 1; k < pieces; ++k)
      r = !maximum ? r + part[k] : part[k] > r || std::isnan(part[k]) ? part[k] : r;
    store(y[i], static_cast<float>(r / divisor));
  }
}

template <class T, class F>
void reduce_columns(const T* x, T* y, const Extent& extent, Kind kind, F* kernel) {
  const bool maximum = kind == Kind::kMaximum;
  const float divisor = kind == Kind::kMean ? static_cast<float>(extent.reduced) : 1.0f;
  // Columns of one task: some cache lines of each row.
  constexpr int64_t kColumns = 256;
  const int64_t blocks = (extent.inner + kColumns - 1) / kColumns;
  const int64_t width = std::min(kColumns, extent.inner);
  parallel_for(extent.outer * blocks, row_grain<T>(extent.reduced * width),
               [&](int64_t begin, int64_t end) {
                 for (int64_t i = begin; i < end; ++i) {
                   const int64_t outer = i / blocks, at = i % blocks * kColumns;
                   kernel(x + outer * extent.reduced * extent.inner + at, extent.reduced,
                          extent.inner, std::min(kColumns, extent.inner - at), maximum, divisor,
                          y + outer * extent.inner + at);
                 }
               });
}

Tensor reduce(const char* op, Kind kind, const Tensor& x0, const std::vector<int64_t>& dims,
              bool keepdim) {
  check_tensor(op, "x", x0, 0);
  const int64_t dim = x0.dim(), places = std::max<int64_t>(dim, 1);
  IPEX_CHECK(dim <= kMaxDim, op, ": x must have at most ", kMaxDim, " dimensions, got ", dim);
  for (const int64_t d : dims)
    IPEX_CHECK(-places <= d && d < places, op, ": dims must be a dimension of x (", places,
               "-D), got ", d);
  bool reduced[kMaxDim] = {};
  for (const int64_t d : dims) {
    bool& one = reduced[d < 0 ? d + places : d];
    IPEX_CHECK(!one, op, ": dims must be distinct, got ", list_text(dims));
    one = true;
  }
  if (dims.empty()) std::fill_n(reduced, dim, true);
  int64_t sizes[kMaxDim], n = 0;
  Extent all;
  for (int64_t d = 0; d < dim; ++d) {
    const int64_t size = x0.size(d);
    if (reduced[d]) all.reduced *= size;
    if (!reduced[d] || keepdim) sizes[n++] = reduced[d] ? 1 : size;
  }
  IPEX_CHECK(kind != Kind::kMaximum || all.reduced > 0, op,
             ": x must have elements in the dimensions dims, got ", shape_text(x0));
  Tensor y = new_contiguous(sizes, n, x0.scalar_type());
  if (y.numel() == 0) return y;
  Extent extent;
  Tensor x = x0;
  constexpr int64_t kImageOrder[4] = {0, 2, 3, 1};
  int64_t plain[kMaxDim];
  for (int64_t d = 0; d < dim; ++d) plain[d] = d;
  // What is kept of an image, N and C, has the same order in both formats if its pixels are
  // reduced.
  const bool image = is_channels_last(x0) && reduced[2] && reduced[3];
  if (all.reduced == 0) {
    extent = {y.numel(), 0, 1};
  } else if (!describe(x0.sizes().data(), reduced, image ? kImageOrder : plain, dim, extent)) {
    x = moved(x0, reduced);
    extent = {y.numel(), all.reduced, 1};
  } else if (!image) {
    x = as_contiguous(x0);
  }
  row_kernels.visit(x.scalar_type(), [&]<class T>(auto* by_rows) {
    columns_kernels.visit(x.scalar_type(), [&]<class U>(auto* by_columns) {
      if constexpr (std::is_same_v<T, U>) {
        const T* from = static_cast<const T*>(x.const_data_ptr());
        T* to = static_cast<T*>(y.mutable_data_ptr());
        if (extent.inner == 1)
          reduce_rows(from, to, extent, kind, by_rows);
        else
          reduce_columns(from, to, extent, kind, by_columns);
      }
    });
  });
  return y;
}

Tensor mean(const Tensor& x, const std::vector<int64_t>& dims, bool keepdim) {
  return reduce("mean", Kind::kMean, x, dims, keepdim);
}

Tensor sum(const Tensor& x, const std::vector<int64_t>& dims, bool keepdim) {
  return reduce("sum", Kind::kSum, x, dims, keepdim);
}

Tensor amax(const Tensor& x, const std::vector<int64_t>& dims, bool keepdim) {
  return reduce("amax", Kind::kMaximum, x, dims, keepdim);
}

const bool registered = [] {
  add("mean", Adapter<&mean>::entry());
  add("sum", Adapter<&sum>::entry());
  add("amax", Adapter<&amax>::entry());
  return true;
}();

}  // namespace
}  // namespace ipex::program
