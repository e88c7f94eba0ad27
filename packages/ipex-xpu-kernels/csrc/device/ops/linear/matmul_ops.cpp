// SPDX-License-Identifier: Apache-2.0
// torch's products of matrices on the kernel of matmul.sycl.cpp. What it does not have (other
// dtypes, mixed ones) and what is wrong (shapes) goes to the host, whose messages are torch's.
#include <ATen/Functions.h>

#include <algorithm>
#include <utility>

#include "device/core/kernel_ops.h"
#include "device/onednn/onednn_library.h"
#include "device/onednn/onednn_ops.h"

namespace ipex::xpu {
namespace {

using at::Scalar;
using at::Tensor;

// Rows and columns of panels and the shape of a work-group, as in matmul.sycl.cpp.
constexpr std::int64_t kRows = 12;
constexpr std::int64_t kColumns = 32;
constexpr std::int64_t kSteps = 16;
constexpr std::size_t kProductLanes = 16;
constexpr std::size_t kGroup = 16;
constexpr std::int64_t kSmallRows = 8;
// Up to so many multiplications of each matrix, packing takes longer than it saves.
constexpr std::int64_t kSmallProducts = std::int64_t{1} << 21;
// Operands are packed in parts of so many bytes, which caches may hold.
constexpr std::int64_t kPackedBytes = std::int64_t{1} << 24;

// On the CPU device 0.7 to 0.8 of the host's rate in float32.
constexpr KernelSpeed kProductSpeed = KernelSpeed::Slower;
// With so many multiplications oneDNN was not slower than the host there (a linear layer of 8 rows,
// 1024 x 1024: 0.65 ms against 0.93; 512 x 512 matrices, which are more: 3.2 against 2.8).
constexpr std::int64_t kFewestProducts = std::int64_t{1} << 23;
constexpr std::int64_t kMostProducts = std::int64_t{1} << 26;

// A batch of matrices: a matrix gets a leading dimension of size 1.
Tensor batched(const Tensor& x) { return x.dim() == 2 ? x.unsqueeze(0) : x; }

// `out` as torch would make it, and memory of its own.
bool fits(const Tensor& out, at::IntArrayRef sizes, std::initializer_list<Tensor> inputs) {
  if (out.sizes() != sizes) return false;
  for (const Tensor& input : inputs) {
    if (out.scalar_type() != input.scalar_type() || out.is_alias_of(input)) return false;
  }
  return kernel_dtype(out.scalar_type()).has_value();
}

bool expands_to(const Tensor& x, at::IntArrayRef sizes) {
  if (x.dim() > static_cast<std::int64_t>(sizes.size())) return false;
  for (std::int64_t d = 1; d <= x.dim(); ++d) {
    if (x.size(-d) != 1 && x.size(-d) != sizes[sizes.size() - static_cast<std::size_t>(d)])
      return false;
  }
  return true;
}

// out = beta * self + alpha * a @ b; false if this is not for the kernel.
bool multiply(const Tensor& out, const Tensor& a, const Tensor& b, const Tensor* self,
              const Scalar& beta, const Scalar& alpha) {
  const std::int64_t dim = out.dim();
  if ((dim != 2 && dim != 3) || a.dim() != dim || b.dim() != dim || a.size(-1) != b.size(-2))
    return false;
  std::vector<std::int64_t> sizes{a.size(-2), b.size(-1)};
  if (dim == 3) sizes.insert(sizes.begin(), a.size(0));
  if (dim == 3 && b.size(0) != a.size(0)) return false;
  if (!fits(out, sizes, {a, b}) || beta.isComplex() || alpha.isComplex()) return false;
  Tensor addend;
  if (self != nullptr) {
    if (out.scalar_type() != self->scalar_type() || !expands_to(*self, sizes)) return false;
    addend = self->expand(sizes);
    // Each element is read by the item that writes it, if it is the same element.
    if (out.is_alias_of(*self) &&
        !(addend.const_data_ptr() == out.const_data_ptr() && addend.strides() == out.strides()))
      return false;
  }
  const bool kernels = use_kernel(static_cast<c10::DeviceIndex>(out.get_device()), kProductSpeed);
  const Tensor* added = self == nullptr ? nullptr : &addend;
  const auto scale = self == nullptr ? 0.f : beta.to<float>();
  const std::int64_t products = out.numel() * a.size(-1);
  const bool faster = products >= kFewestProducts && products <= kMostProducts;
  if ((kernels || faster || onednn::mode() == onednn::Mode::Prefer) &&
      onednn_matmul(out, a, b, added, scale, alpha.to<float>()))
    return true;
  return kernels && matmul_kernel(out, a, b, added, scale, alpha.to<float>());
}

// mm and bmm
bool product_out(const Tensor& a, const Tensor& b, Tensor& out) {
  return multiply(out, a, b, nullptr, 0, 1);
}
// addmm and baddbmm
bool sum_out(const Tensor& self, const Tensor& a, const Tensor& b, const Scalar& beta,
             const Scalar& alpha, Tensor& out) {
  return multiply(out, a, b, &self, beta, alpha);
}
bool addmv_out(const Tensor& self, const Tensor& a, const Tensor& x, const Scalar& beta,
               const Scalar& alpha, Tensor& out) {
  if (out.dim() != 1 || a.dim() != 2 || x.dim() != 1 || self.dim() > 1) return false;
  const Tensor addend = self.unsqueeze(-1);
  return multiply(out.unsqueeze(1), a, x.unsqueeze(1), &addend, beta, alpha);
}

// y = alpha * a b^T + beta * c, all with a dimension of batches in front; c may be undefined.
struct Product {
  Tensor a, b, c, y;
  std::string dtype;
  float alpha, beta;
};

std::int64_t parts(std::int64_t count, std::int64_t width) { return (count + width - 1) / width; }

// x[batch, rows, steps] in panels of `width` rows; one batch if all are the same.
template <typename... Strides>
Tensor packed(const std::string& kernel, const Tensor& x, std::int64_t width, Strides... strides) {
  const std::int64_t batch = x.stride(0) == 0 ? 1 : x.size(0);
  const std::int64_t panels = parts(x.size(1), width);
  const std::int64_t blocks = parts(x.size(2), kSteps);
  Tensor result =
      at::empty({batch, panels * width, blocks * kSteps}, x.options().dtype(at::kFloat));
  if (blocks == 0) return result;
  const std::size_t group = std::min(static_cast<std::size_t>(blocks), kGroup);
  const auto device = static_cast<c10::DeviceIndex>(x.get_device());
  launch<3>(current_queue(device), device, kernel,
            {static_cast<std::size_t>(batch * panels),
             (static_cast<std::size_t>(blocks) + group - 1) / group * group, kProductLanes},
            {1, group, kProductLanes}, x.const_data_ptr(), result.mutable_data_ptr(), x.size(1),
            x.size(2), x.stride(0), strides...);
  return result;
}

Tensor packed_left(Tensor x, const std::string& dtype) {
  if (x.stride(2) != 1) {
    const bool shared = x.stride(0) == 0;
    x = (shared ? x.narrow(0, 0, 1) : x).contiguous().expand(x.sizes());
  }
  return packed(kernel_name("pack_left", dtype), x, kRows, x.stride(1));
}

Tensor packed_right(const Tensor& x, const std::string& dtype) {
  return packed(kernel_name("pack_right", dtype), x, kColumns, x.stride(1), x.stride(2));
}

// The stride of a dimension; 0 where there is no tensor.
std::int64_t stride_of(const Tensor& x, std::int64_t d) { return x.defined() ? x.stride(d) : 0; }

void multiply_packed(const Tensor& a, const Tensor& b, const Product& p) {
  const Tensor& y = p.y;
  const auto batch_stride = [](const Tensor& x) -> std::int64_t {
    return x.size(0) == 1 ? 0 : x.stride(0);
  };
  const auto rows = static_cast<std::size_t>(parts(y.size(1), kRows));
  const auto columns = static_cast<std::size_t>(parts(y.size(2), kColumns));
  const std::size_t group = std::min(rows, kGroup);
  const auto device = static_cast<c10::DeviceIndex>(y.get_device());
  launch<3>(current_queue(device), device, kernel_name("matmul", p.dtype),
            {static_cast<std::size_t>(y.size(0)), (rows + group - 1) / group * group,
             columns * kProductLanes},
            {1, group, kProductLanes}, a.const_data_ptr(), b.const_data_ptr(), data(p.c),
            y.mutable_data_ptr(), y.size(1), y.size(2), a.size(2) / kSteps, batch_stride(a),
            batch_stride(b), stride_of(p.c, 0), stride_of(p.c, 1), stride_of(p.c, 2), y.stride(0),
            y.stride(1), y.stride(2), p.alpha, p.c.defined() ? p.beta : 0.f);
}

// A matrix and a vector, y having one column; false unless the steps of the matrix are neighbors.
bool multiply_vector(const Product& p) {
  if (p.y.size(2) != 1 || p.a.stride(2) != 1) return false;
  const Tensor x = p.b.stride(2) == 1 ? p.b : p.b.contiguous();
  const std::int64_t steps = p.a.size(2);
  constexpr std::int64_t kBytes = 128;  // of an item
  launch_wide_rows(p.y, kernel_name("dot_rows", p.dtype), p.y.size(0) * p.y.size(1), steps, kBytes,
                   p.a.const_data_ptr(), x.const_data_ptr(), data(p.c), p.y.mutable_data_ptr(),
                   ulong(steps), p.y.size(1), p.a.stride(0), p.a.stride(1), x.stride(0),
                   stride_of(p.c, 0), stride_of(p.c, 1), p.y.stride(0), p.y.stride(1), p.alpha,
                   p.c.defined() ? p.beta : 0.f);
  return true;
}

// Few products, of operands where they are; false unless columns of the right one are neighbors.
bool multiply_small(const Product& p) {
  const Tensor& y = p.y;
  const std::int64_t steps = p.a.size(2);
  if (y.size(1) * y.size(2) * steps > kSmallProducts || p.b.stride(1) != 1) return false;
  const auto device = static_cast<c10::DeviceIndex>(y.get_device());
  launch<3>(
      current_queue(device), device, kernel_name("matmul_small", p.dtype),
      {static_cast<std::size_t>(y.size(0)), static_cast<std::size_t>(parts(y.size(1), kSmallRows)),
       static_cast<std::size_t>(parts(y.size(2), static_cast<std::int64_t>(kProductLanes))) *
           kProductLanes},
      {1, 1, kProductLanes}, p.a.const_data_ptr(), p.b.const_data_ptr(), data(p.c),
      y.mutable_data_ptr(), y.size(1), y.size(2), steps, p.a.stride(0), p.a.stride(1),
      p.a.stride(2), p.b.stride(0), p.b.stride(2), stride_of(p.c, 0), stride_of(p.c, 1),
      stride_of(p.c, 2), y.stride(0), y.stride(1), y.stride(2), p.alpha,
      p.c.defined() ? p.beta : 0.f);
  return true;
}

// On a GPU, whose groups have memory of their own (matmul_tiles.sycl.cpp).
void multiply_tiles(const Product& p) {
  constexpr std::int64_t kTile = 128;
  constexpr std::size_t kItems = 256;
  const Tensor& y = p.y;
  const auto device = static_cast<c10::DeviceIndex>(y.get_device());
  launch<3>(current_queue(device), device, kernel_name("matmul_tiles", p.dtype),
            {static_cast<std::size_t>(y.size(0)), static_cast<std::size_t>(parts(y.size(1), kTile)),
             static_cast<std::size_t>(parts(y.size(2), kTile)) * kItems},
            {1, 1, kItems}, p.a.const_data_ptr(), p.b.const_data_ptr(), data(p.c),
            y.mutable_data_ptr(), y.size(1), y.size(2), p.a.size(2), p.a.stride(0), p.a.stride(1),
            p.a.stride(2), p.b.stride(0), p.b.stride(1), p.b.stride(2), stride_of(p.c, 0),
            stride_of(p.c, 1), stride_of(p.c, 2), y.stride(0), y.stride(1), y.stride(2), p.alpha,
            p.c.defined() ? p.beta : 0.f);
}

// The dimension of neighboring numbers of an operand for matmul_joint, whose items bring eight at a
// time: 2 or 1, or 0 where it has none.
int joint_dim(const Tensor& x) {
  constexpr std::int64_t kMostPitch = std::int64_t{1} << 23;  // of which 256 are below 2^31
  for (const int d : {2, 1}) {
    if (x.stride(d) == 1 && x.stride(3 - d) % 8 == 0 && x.stride(3 - d) >= x.size(d) &&
        x.stride(0) % 8 == 0 && x.size(d) % 8 == 0 && x.stride(3 - d) < kMostPitch &&
        reinterpret_cast<std::uintptr_t>(x.const_data_ptr()) % 16 == 0)
      return d;
  }
  return 0;
}

// By the device's instructions for products (joint/matmul_pairs.sycl.cpp or, where an item does not
// know which numbers of a matrix it holds, joint/matmul_joint.sycl.cpp); false where the device or
// the operands do not fit. `other` is the transposed product, for which the first may stand.
bool multiply_joint(const Product& product, const Product& other) {
  constexpr std::int64_t kTile = 128;
  constexpr std::int64_t kFewest = 16;
  const auto device = static_cast<c10::DeviceIndex>(product.y.get_device());
  const std::size_t sub_group = device_info(device).joint_sub_group;
  // Few rows by many columns, or the other way round, are worth it for the operand that is large.
  if (sub_group == 0 || product.y.scalar_type() == at::kFloat ||
      std::max(product.y.size(1), product.y.size(2)) < kFewest || product.a.size(2) < kFewest)
    return false;
  int a = joint_dim(product.a);
  int b = joint_dim(product.b);
  if (a == 0 || b == 0) return false;
  const bool pairs = joint_pairs(device);
  const bool transposed = pairs && a == 2 && b == 1;
  if (transposed) std::swap(a, b);
  const Product& p = transposed ? other : product;
  const Tensor& y = p.y;
  const auto swapped = [](int dim) { return dim == 1 ? "true" : "false"; };
  const std::string name = kernel_name(pairs ? "matmul_pairs" : "matmul_joint", p.dtype,
                                       std::string(swapped(a)) + ',' + swapped(b));
  const std::size_t items = 4 * sub_group;
  launch<3>(current_queue(device), device, name,
            {static_cast<std::size_t>(y.size(0)), static_cast<std::size_t>(parts(y.size(1), kTile)),
             static_cast<std::size_t>(parts(y.size(2), kTile)) * items},
            {1, 1, items}, p.a.const_data_ptr(), p.b.const_data_ptr(), data(p.c),
            y.mutable_data_ptr(), static_cast<int>(y.size(1)), static_cast<int>(y.size(2)),
            static_cast<int>(p.a.size(2)), p.a.stride(0), p.a.stride(3 - a), p.b.stride(0),
            p.b.stride(3 - b), stride_of(p.c, 0), stride_of(p.c, 1), stride_of(p.c, 2), y.stride(0),
            y.stride(1), y.stride(2), p.alpha, p.c.defined() ? p.beta : 0.f);
  return true;
}

// In parts of batches, rows and columns, so that packed operands stay small.
void multiply_parts(const Product& p) {
  const std::int64_t k = std::max<std::int64_t>(p.a.size(2), 1);
  const std::int64_t fitting = kPackedBytes / static_cast<std::int64_t>(sizeof(float)) / k;
  const auto part_of = [&](std::int64_t width) {
    return std::max<std::int64_t>(fitting / width, 1) * width;
  };
  const std::int64_t m = p.y.size(1);
  const std::int64_t n = p.y.size(2);
  const std::int64_t batches = std::max<std::int64_t>(fitting / std::max(m, n), 1);
  const std::int64_t rows = part_of(kRows);
  const std::int64_t columns = part_of(kColumns);
  const auto cut = [](const Tensor& x, std::int64_t d, std::int64_t first, std::int64_t most) {
    return x.defined() ? x.narrow(d, first, std::min(most, x.size(d) - first)) : x;
  };
  for (std::int64_t first = 0; first < p.y.size(0); first += batches) {
    const auto some = [&](const Tensor& x) { return cut(x, 0, first, batches); };
    const Product q{some(p.a), some(p.b), some(p.c), some(p.y), p.dtype, p.alpha, p.beta};
    for (std::int64_t i = 0; i < m; i += rows) {
      const Tensor a = packed_left(cut(q.a, 1, i, rows), p.dtype);
      for (std::int64_t j = 0; j < n; j += columns) {
        const auto part = [&](const Tensor& x) { return cut(cut(x, 1, i, rows), 2, j, columns); };
        multiply_packed(a, packed_right(cut(q.b, 1, j, columns), p.dtype),
                        {q.a, q.b, part(q.c), part(q.y), p.dtype, p.alpha, p.beta});
      }
    }
  }
}

}  // namespace

bool matmul_kernel(const Tensor& out, const Tensor& a, const Tensor& b, const Tensor* addend,
                   float beta, float alpha) {
  const auto dtype = kernel_dtype(out.scalar_type());
  if (!dtype) return false;
  if (out.numel() == 0) return true;
  const Tensor y = batched(out);
  const Tensor left = batched(a);
  const Tensor right = batched(b).mT();
  const Tensor c = addend == nullptr ? Tensor() : batched(*addend);
  const Product product{left, right, c, y, *dtype, alpha, beta};
  const Product transposed{right, left, c.defined() ? c.mT() : c, y.mT(), *dtype, alpha, beta};
  if (multiply_vector(product) || multiply_vector(transposed) || multiply_small(product) ||
      multiply_small(transposed))
    return true;
  if (!device_info(static_cast<c10::DeviceIndex>(out.get_device())).is_cpu) {
    const bool by_columns = y.stride(1) == 1 && y.stride(2) != 1;
    const Product& chosen = by_columns ? transposed : product;
    if (!multiply_joint(chosen, by_columns ? product : transposed)) multiply_tiles(chosen);
    return true;
  }
  // The transposed product, if that takes fewer cycles: what fills panels is multiplied, too, and
  // operands are transposed where the wrong numbers are neighbors, as is a result by columns.
  const auto cycles = [k = left.size(2)](const Tensor& first, const Tensor& second,
                                         std::int64_t column) {
    const std::int64_t rows = parts(first.size(1), kRows) * kRows;
    const std::int64_t columns = parts(second.size(1), kColumns) * kColumns;
    return rows * columns / 32 * k + (first.stride(2) == 1 ? 0 : 2 * first.size(1) * k) +
           (second.stride(1) == 1 ? 0 : 2 * second.size(1) * k) +
           (column == 1 ? 0 : 2 * first.size(1) * second.size(1));
  };
  if (cycles(right, left, y.stride(1)) < cycles(left, right, y.stride(2))) {
    multiply_parts(transposed);
  } else {
    multiply_parts(product);
  }
  return true;
}

void register_matmul() {
  static torch::Library library(torch::Library::IMPL, "aten", c10::DispatchKey::XPU, __FILE__,
                                __LINE__);
  add_kernel<&product_out>(library, "mm.out");
  add_kernel<&product_out>(library, "bmm.out");
  add_kernel<&sum_out>(library, "addmm.out");
  add_kernel<&sum_out>(library, "baddbmm.out");
  add_kernel<&addmv_out>(library, "addmv.out");
}

}  // namespace ipex::xpu
