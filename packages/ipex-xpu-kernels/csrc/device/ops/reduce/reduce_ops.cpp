// SPDX-License-Identifier: Apache-2.0
// Reductions on the kernels of reduce.sycl.cpp.
#include <ATen/Functions.h>
#include <ATen/WrapDimUtilsMulti.h>

#include <algorithm>
#include <bitset>

#include "device/core/strided.h"

namespace ipex::xpu {
namespace {

using at::IntArrayRef;
using at::OptionalIntArrayRef;
using at::Scalar;
using at::Tensor;
using std::optional;

optional<std::string> dtype_of(const Tensor& x) {
  return x.scalar_type() == at::kByte ? optional<std::string>("unsignedchar")
                                      : number_dtype(x.scalar_type());
}
bool is_float(const Tensor& x) { return kernel_dtype(x.scalar_type()).has_value(); }
// What kernels compute with and give back.
at::ScalarType compute_dtype(const Tensor& x) { return is_float(x) ? at::kFloat : at::kLong; }

using Dims = std::bitset<at::dim_bitset_size>;
Dims dims_of(OptionalIntArrayRef dims, std::int64_t count) {
  return dims && !dims->empty() ? at::dim_list_to_bitset(*dims, static_cast<std::size_t>(count))
                                : Dims().set();
}

// A tensor as [outer, length, inner], to be reduced along the middle.
struct Planes {
  Tensor x;
  std::int64_t outer = 1;
  std::int64_t length = 1;
  std::int64_t inner = 1;
};
Planes planes_of(const Tensor& x, const Dims& dims) {
  std::vector<std::int64_t> order;
  bool begun = false, ended = false, apart = false;
  Planes planes;
  for (std::int64_t d = 0; d < x.dim(); ++d) {
    const std::int64_t size = x.size(d);
    if (dims[static_cast<std::size_t>(d)]) {
      planes.length *= size;
      if (size != 1) {
        apart |= ended;
        begun = true;
      }
      continue;
    }
    order.push_back(d);
    if (size != 1) ended |= begun;
    (begun ? planes.inner : planes.outer) *= size;
  }
  if (apart) {
    for (std::int64_t d = 0; d < x.dim(); ++d) {
      if (dims[static_cast<std::size_t>(d)]) order.push_back(d);
    }
    planes.x = x.permute(order).contiguous();
    planes.outer *= planes.inner;
    planes.inner = 1;
  } else {
    planes.x = x.contiguous();
  }
  return planes;
}

// A group of a GPU that reduces columns: items that share 16 bytes of a row, and items across.
constexpr std::int64_t kColumnItems = 256;
constexpr std::int64_t kAhead = 8;  // loads of 16 bytes that an item has on their way
struct ColumnGroup {
  std::int64_t each = 1;  // numbers of an item
  std::int64_t across = 32;
  std::int64_t down = 1;
  std::int64_t groups = 1;  // for all columns
};
// Nothing where an item has one column.
optional<ColumnGroup> column_group(const Planes& p) {
  const int bytes = bytes_of_item(static_cast<int>(p.x.get_device()));
  if (bytes == 0) return std::nullopt;
  ColumnGroup group;
  group.each = bytes / p.x.element_size();
  while (group.across > 1 && (group.across / 2) * group.each >= p.inner) group.across /= 2;
  group.down = kColumnItems / group.across;
  const std::int64_t columns = group.across * group.each;
  group.groups = (p.inner + columns - 1) / columns;
  return group;
}

// Starts the kernel on [outer, length, inner] in parts of `chunk`; y: [outer, parts, inner].
void launch_reduce(const char* op, const Planes& p, const Tensor& centers, std::int64_t chunk,
                   double factor, const Tensor& y) {
  const std::int64_t parts = (p.length + chunk - 1) / chunk;
  const auto dtype = *dtype_of(p.x);
  const auto device = static_cast<c10::DeviceIndex>(p.x.get_device());
  const int kind = y.scalar_type() == at::kBFloat16 ? 1 : y.scalar_type() == at::kHalf ? 2 : 0;
  const auto run = [&](auto number) {
    if (p.inner == 1) {
      const auto name = kernel_name("reduce_rows", op, dtype);
      launch_wide_rows(p.x, name, p.outer * parts, chunk, kAhead * 16, out_data(y), data(p.x),
                       data(centers), ulong(p.length), ulong(chunk), ulong(parts), number, kind);
    } else {
      const auto name = kernel_name("reduce_columns", op, dtype);
      const auto group = column_group(p);
      if (!group) {
        launch_columns(p.x, name, p.outer * parts, p.inner, out_data(y), data(p.x), data(centers),
                       ulong(p.length), ulong(p.inner), ulong(chunk), ulong(parts), number, kind);
        return;
      }
      const auto down = static_cast<std::size_t>(group->down);
      const auto across = static_cast<std::size_t>(group->across);
      launch<2>(current_queue(device), device, name,
                sycl::range<2>(static_cast<std::size_t>(p.outer * parts) * down,
                               static_cast<std::size_t>(group->groups) * across),
                sycl::range<2>(down, across), out_data(y), data(p.x), data(centers),
                ulong(p.length), ulong(p.inner), ulong(chunk), ulong(parts), number, kind);
    }
  };
  if (is_float(p.x)) {
    run(static_cast<float>(factor));
  } else {
    run(long{1});
  }
}

// How many elements one work-group or work-item reduces: all, unless that leaves the device idle.
std::int64_t chunk_of(const Planes& p) {
  const bool rows = p.inner == 1;
  std::int64_t busy = p.outer * p.inner;
  std::int64_t least = rows ? 4096 : 64;
  const DeviceInfo& info = device_info(static_cast<c10::DeviceIndex>(p.x.get_device()));
  std::int64_t wanted = rows ? 64 : 4096;
  std::int64_t parts = 64;
  if (!info.is_cpu) {  // whose units hold several groups at a time
    const auto columns = rows ? std::nullopt : column_group(p);
    if (columns) {
      busy = p.outer * columns->groups;
      least = columns->down * kAhead;
    }
    wanted = std::max<std::int64_t>(rows || columns ? 64 : 4096,
                                    info.compute_units * (rows      ? 8
                                                          : columns ? 4
                                                                    : 2048));
    parts = (wanted + busy - 1) / busy;
  }
  if (busy >= wanted || p.length <= 2 * least) return p.length;
  const std::int64_t chunk = std::max(least, (p.length + parts - 1) / parts);
  // Whole parts for the loads of a GPU, which reads 16 bytes at once where it can.
  return info.is_cpu ? chunk : (chunk + least - 1) / least * least;
}

const char* const kSum = "sum";
const char* const kSquares = "sum_squares";
const char* const kMax = "extreme<true>";
const char* const kMin = "extreme<false>";

// [outer * inner] numbers, float or long; or into `out`, dense and of a dtype that kernels have,
// for numbers with a fraction.
Tensor reduce(const char* op, const Planes& p, double factor = 1, const Tensor& centers = {},
              const Tensor& out = {}) {
  const auto options = p.x.options().dtype(compute_dtype(p.x));
  const std::int64_t chunk = chunk_of(p);
  const std::int64_t parts = (p.length + chunk - 1) / chunk;
  const auto result_of = [&] {
    return out.defined() ? out : at::empty({p.outer * p.inner}, options);
  };
  const Tensor y = parts == 1 ? result_of() : at::empty({p.outer * parts * p.inner}, options);
  launch_reduce(op, p, centers, chunk, parts == 1 ? factor : 1, y);
  if (parts == 1) return y;
  const Tensor result = result_of();
  launch_reduce(op == kSquares ? kSum : op, {y, p.outer, parts, p.inner}, {}, parts, factor,
                result);
  return result;
}

std::vector<std::int64_t> reduced_sizes(const Tensor& x, const Dims& dims, bool keepdim) {
  std::vector<std::int64_t> sizes;
  for (std::int64_t d = 0; d < x.dim(); ++d) {
    if (!dims[static_cast<std::size_t>(d)]) {
      sizes.push_back(x.size(d));
    } else if (keepdim) {
      sizes.push_back(1);
    }
  }
  return sizes;
}

bool reduces(const Tensor& x) { return dtype_of(x) && x.numel() != 0 && x.numel() < kMaxElements; }

bool reduce_into(const char* op, const Tensor& x, OptionalIntArrayRef dim, bool keepdim, bool mean,
                 const Tensor& out) {
  if (!reduces(x)) return false;
  const Dims dims = dims_of(dim, x.dim());
  const auto sizes = reduced_sizes(x, dims, keepdim);
  if (out.sizes() != IntArrayRef(sizes)) return false;
  const Planes planes = planes_of(x, dims);
  const double factor = mean ? 1. / static_cast<double>(planes.length) : 1;
  if (is_float(x) && is_float(out) && out.is_contiguous()) {
    reduce(op, planes, factor, {}, out);
  } else {
    out.copy_(reduce(op, planes, factor).view(sizes));
  }
  return true;
}

bool sum_out(const Tensor& x, OptionalIntArrayRef dim, bool keepdim, optional<at::ScalarType>,
             Tensor& out) {
  if (!is_float(x) && out.scalar_type() != at::kLong) return false;
  return (is_float(x) == is_float(out)) && reduce_into(kSum, x, dim, keepdim, false, out);
}
bool mean_out(const Tensor& x, OptionalIntArrayRef dim, bool keepdim, optional<at::ScalarType>,
              Tensor& out) {
  return is_float(x) && is_float(out) && reduce_into(kSum, x, dim, keepdim, true, out);
}
bool amax_out(const Tensor& x, IntArrayRef dim, bool keepdim, Tensor& out) {
  return x.scalar_type() == out.scalar_type() && reduce_into(kMax, x, dim, keepdim, false, out);
}
bool amin_out(const Tensor& x, IntArrayRef dim, bool keepdim, Tensor& out) {
  return x.scalar_type() == out.scalar_type() && reduce_into(kMin, x, dim, keepdim, false, out);
}
optional<Tensor> whole(const char* op, const Tensor& x) {
  const Tensor out = at::empty({}, x.options());
  return reduce_into(op, x, std::nullopt, false, false, out) ? optional(out) : std::nullopt;
}
optional<Tensor> max_of_all(const Tensor& x) { return whole(kMax, x); }
optional<Tensor> min_of_all(const Tensor& x) { return whole(kMin, x); }

bool aminmax_out(const Tensor& x, optional<std::int64_t> dim, bool keepdim, Tensor& least,
                 Tensor& greatest) {
  const auto dims = dim ? OptionalIntArrayRef(*dim) : OptionalIntArrayRef();
  if (x.scalar_type() != least.scalar_type() || x.scalar_type() != greatest.scalar_type())
    return false;
  return reduce_into(kMin, x, dims, keepdim, false, least) &&
         reduce_into(kMax, x, dims, keepdim, false, greatest);
}

// Truth values are 0 and 1: any is the largest, all the smallest.
bool truth(const char* op, const Tensor& x, OptionalIntArrayRef dim, bool keepdim,
           const Tensor& out) {
  if (out.scalar_type() != at::kBool || !reduces(x) || x.scalar_type() == at::kByte) return false;
  return reduce_into(op, x.scalar_type() == at::kBool ? x : x.ne(0), dim, keepdim, false, out);
}
bool any_out(const Tensor& x, std::int64_t dim, bool keepdim, Tensor& out) {
  return truth(kMax, x, dim, keepdim, out);
}
bool all_out(const Tensor& x, std::int64_t dim, bool keepdim, Tensor& out) {
  return truth(kMin, x, dim, keepdim, out);
}
bool any_of_all_out(const Tensor& x, Tensor& out) {
  return truth(kMax, x, std::nullopt, false, out);
}
bool all_of_all_out(const Tensor& x, Tensor& out) {
  return truth(kMin, x, std::nullopt, false, out);
}

// Extremes with their positions
// -----------------------------------------------------------------------------------------------

// values may be undefined.
bool find(const char* op, const Tensor& x, optional<std::int64_t> dim, bool keepdim,
          const Tensor& values, const Tensor& indices) {
  const auto dtype = number_dtype(x.scalar_type());
  if (!reduces(x) || !dtype || (!is_float(x) && x.scalar_type() != at::kLong) ||
      indices.scalar_type() != at::kLong)
    return false;
  const bool last = !dim || x.dim() == 0;
  const Tensor rows = last ? x.contiguous() : x.movedim(*dim, -1).contiguous();
  const std::int64_t length = dim && x.dim() > 0 ? rows.size(-1) : x.numel();
  const Dims dims = dim && x.dim() > 0 ? dims_of(IntArrayRef(*dim), x.dim()) : Dims().set();
  const auto sizes = reduced_sizes(x, dims, keepdim);
  if (indices.sizes() != IntArrayRef(sizes) ||
      (values.defined() &&
       (values.sizes() != IntArrayRef(sizes) || values.scalar_type() != x.scalar_type())))
    return false;
  const auto direct = [](const Tensor& out) {
    return !out.defined() || out.is_contiguous() ? out : at::empty(out.sizes(), out.options());
  };
  const Tensor v = direct(values);
  const Tensor i = direct(indices);
  launch_rows(x, kernel_name("find_rows", op, *dtype), x.numel() / length, length, out_data(v),
              out_data(i), data(rows), ulong(length));
  if (values.defined() && !v.is_same(values)) values.copy_(v);
  if (!i.is_same(indices)) indices.copy_(i);
  return true;
}
bool max_dim_out(const Tensor& x, std::int64_t dim, bool keepdim, Tensor& values, Tensor& indices) {
  return find(kMax, x, dim, keepdim, values, indices);
}
bool min_dim_out(const Tensor& x, std::int64_t dim, bool keepdim, Tensor& values, Tensor& indices) {
  return find(kMin, x, dim, keepdim, values, indices);
}
bool argmax_out(const Tensor& x, optional<std::int64_t> dim, bool keepdim, Tensor& out) {
  return find(kMax, x, dim, keepdim, {}, out);
}
bool argmin_out(const Tensor& x, optional<std::int64_t> dim, bool keepdim, Tensor& out) {
  return find(kMin, x, dim, keepdim, {}, out);
}

// In order, whether or not that is asked for.
bool topk_out(const Tensor& x, std::int64_t k, std::int64_t dim, bool largest, bool, Tensor& values,
              Tensor& indices) {
  const auto dtype = number_dtype(x.scalar_type());
  if (!reduces(x) || !dtype || (!is_float(x) && x.scalar_type() != at::kLong) || x.dim() == 0)
    return false;
  dim = at::maybe_wrap_dim(dim, x.dim());
  const std::int64_t length = x.size(dim);
  // The kernel compares each of the k with each other.
  if (k < 1 || k > std::min<std::int64_t>(length, 4096)) return false;
  auto sizes = x.sizes().vec();
  sizes[static_cast<std::size_t>(dim)] = k;
  if (values.sizes() != IntArrayRef(sizes) || indices.sizes() != IntArrayRef(sizes) ||
      values.scalar_type() != x.scalar_type() || indices.scalar_type() != at::kLong)
    return false;
  const Tensor rows = x.transpose(dim, -1).contiguous();
  auto found = rows.sizes().vec();
  found.back() = k;
  const Tensor v = at::empty(found, x.options());
  const Tensor i = at::empty(found, indices.options());
  const Tensor work = at::empty(found, indices.options());
  launch_rows(x, kernel_name("topk", *dtype), rows.numel() / length, length, out_data(v),
              out_data(i), out_data(work), data(rows), ulong(length), ulong(k), largest ? 1 : 0);
  values.copy_(v.transpose(dim, -1));
  indices.copy_(i.transpose(dim, -1));
  return true;
}

// Moments and norms
// -----------------------------------------------------------------------------------------------

struct Moments {
  Tensor variance;
  Tensor mean;
};
optional<Moments> moments(const Tensor& x, OptionalIntArrayRef dim,
                          const optional<Scalar>& correction, bool keepdim) {
  if (!reduces(x) || !is_float(x)) return std::nullopt;
  const double less = correction ? correction->toDouble() : 1;
  const Dims dims = dims_of(dim, x.dim());
  const Planes planes = planes_of(x, dims);
  const auto n = static_cast<double>(planes.length);
  if (n <= less) return std::nullopt;
  const Tensor mean = reduce(kSum, planes, 1 / n);
  const Tensor variance = reduce(kSquares, planes, 1 / (n - less), mean);
  const auto sizes = reduced_sizes(x, dims, keepdim);
  return Moments{variance.view(sizes), mean.view(sizes)};
}
optional<Tensor> var(const Tensor& x, OptionalIntArrayRef dim, const optional<Scalar>& correction,
                     bool keepdim) {
  const auto found = moments(x, dim, correction, keepdim);
  return found ? optional(found->variance.to(x.scalar_type())) : std::nullopt;
}
optional<Tensor> std_(const Tensor& x, OptionalIntArrayRef dim, const optional<Scalar>& correction,
                      bool keepdim) {
  const auto found = moments(x, dim, correction, keepdim);
  return found ? optional(found->variance.sqrt().to(x.scalar_type())) : std::nullopt;
}
optional<std::tuple<Tensor, Tensor>> var_mean(const Tensor& x, OptionalIntArrayRef dim,
                                              const optional<Scalar>& correction, bool keepdim) {
  const auto found = moments(x, dim, correction, keepdim);
  if (!found) return std::nullopt;
  return std::tuple(found->variance.to(x.scalar_type()), found->mean.to(x.scalar_type()));
}

bool vector_norm_out(const Tensor& x, const Scalar& order, OptionalIntArrayRef dim, bool keepdim,
                     optional<at::ScalarType>, Tensor& out) {
  if (order.isComplex() || order.toDouble() != 2 || !is_float(x) || !is_float(out) || !reduces(x))
    return false;
  const Dims dims = dims_of(dim, x.dim());
  const auto sizes = reduced_sizes(x, dims, keepdim);
  if (out.sizes() != IntArrayRef(sizes)) return false;
  out.copy_(reduce(kSquares, planes_of(x, dims)).sqrt_().view(sizes));
  return true;
}

bool cumsum_out(const Tensor& x, std::int64_t dim, optional<at::ScalarType>, Tensor& out) {
  const auto dtype = number_dtype(out.scalar_type());
  if (!reduces(x) || !dtype || (!is_float(out) && out.scalar_type() != at::kLong) ||
      out.sizes() != x.sizes())
    return false;
  const Tensor dense = x.to(out.scalar_type()).contiguous();
  const Tensor y = out.is_contiguous() ? out : at::empty(out.sizes(), out.options());
  const Planes p = planes_of(dense, x.dim() == 0 ? Dims() : dims_of(IntArrayRef(dim), x.dim()));
  if (p.inner == 1) {
    launch_rows(x, kernel_name("scan_rows", *dtype), p.outer, p.length, out_data(y), data(p.x),
                ulong(p.length));
  } else {
    launch_columns(x, kernel_name("scan_columns", *dtype), p.outer, p.inner, out_data(y), data(p.x),
                   ulong(p.length), ulong(p.inner));
  }
  if (!y.is_same(out)) out.copy_(y);
  return true;
}

}  // namespace

void register_reduce() {
  constexpr auto kSpeed = KernelSpeed::SlowerIfSmall;
  static torch::Library aten(torch::Library::IMPL, "aten", c10::DispatchKey::XPU, __FILE__,
                             __LINE__);
  add_kernel<&sum_out, kSpeed>(aten, "sum.IntList_out");
  add_kernel<&mean_out, kSpeed>(aten, "mean.out");
  add_kernel<&amax_out, kSpeed>(aten, "amax.out");
  add_kernel<&amin_out, kSpeed>(aten, "amin.out");
  add_kernel<&aminmax_out, kSpeed>(aten, "aminmax.out");
  add_kernel<&max_of_all, kSpeed>(aten, "max");
  add_kernel<&min_of_all, kSpeed>(aten, "min");
  add_kernel<&any_out, kSpeed>(aten, "any.out");
  add_kernel<&all_out, kSpeed>(aten, "all.out");
  add_kernel<&any_of_all_out, kSpeed>(aten, "any.all_out");
  add_kernel<&all_of_all_out, kSpeed>(aten, "all.all_out");
  add_kernel<&max_dim_out, kSpeed>(aten, "max.dim_max");
  add_kernel<&min_dim_out, kSpeed>(aten, "min.dim_min");
  add_kernel<&argmax_out, kSpeed>(aten, "argmax.out");
  add_kernel<&argmin_out, kSpeed>(aten, "argmin.out");
  add_kernel<&topk_out, KernelSpeed::Slower>(aten, "topk.values");
  add_kernel<&var, kSpeed>(aten, "var.correction");
  add_kernel<&std_, kSpeed>(aten, "std.correction");
  add_kernel<&var_mean, kSpeed>(aten, "var_mean.correction");
  add_kernel<&vector_norm_out, kSpeed>(aten, "linalg_vector_norm.out");
  add_kernel<&cumsum_out, kSpeed>(aten, "cumsum.out");
}

}  // namespace ipex::xpu
