// SPDX-License-Identifier: Apache-2.0
// torch's products of matrices on the kernel of matmul.sycl.cpp. What it does not have (other
// dtypes, mixed ones) and what is wrong (shapes) goes to the host, whose messages are torch's.
#include "kernel_ops.h"
#include "onednn_library.h"
#include "onednn_ops.h"

namespace ipex::xpu {
namespace {

using at::Scalar;
using at::Tensor;

// Tiles of a work-group and the shape of the group, as in matmul.sycl.cpp.
constexpr std::int64_t kTileM = 128;
constexpr std::int64_t kTileN = 32;
constexpr std::size_t kRows = 16;
constexpr std::size_t kColumns = 16;
constexpr std::int64_t kMaxBatch = 65535;  // work-groups in the outermost dimension

// On the CPU device 0.6 to 0.8 of the host's rate in float32.
constexpr KernelSpeed kSpeed = KernelSpeed::Slower;
// With so many multiplications oneDNN was not slower than the host there (a linear layer of 8 rows,
// 1024 x 1024: 0.65 ms against 0.93; 512 x 512 matrices, which are more: 3.2 against 2.8).
constexpr std::int64_t kFewestProducts = std::int64_t{1} << 23;
constexpr std::int64_t kMostProducts = std::int64_t{1} << 26;

// A batch of matrices: a dimension of size 1 in front where there is none.
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
  const bool kernels = use_kernel(static_cast<c10::DeviceIndex>(out.get_device()), kSpeed);
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

}  // namespace

bool matmul_kernel(const Tensor& out, const Tensor& a, const Tensor& b, const Tensor* addend,
                   float beta, float alpha) {
  const auto dtype = kernel_dtype(out.scalar_type());
  const Tensor y = batched(out);
  if (!dtype || y.size(0) > kMaxBatch) return false;
  if (y.numel() == 0) return true;
  Tensor left = batched(a);
  if (left.scalar_type() != at::kFloat) {
    const bool shared = left.stride(0) == 0;  // one matrix for all batches
    left = (shared ? left.narrow(0, 0, 1) : left).to(at::kFloat).expand(left.sizes());
  }
  const Tensor right = batched(b);
  const Tensor c = addend == nullptr ? Tensor() : batched(*addend);
  const auto stride = [](const Tensor& x, std::int64_t d) -> std::int64_t {
    return x.defined() ? x.stride(d) : 0;
  };
  const auto groups = [](std::int64_t n, std::int64_t tile) {
    return static_cast<std::size_t>((n + tile - 1) / tile);
  };
  const std::int64_t m = y.size(1);
  const std::int64_t n = y.size(2);
  const auto device = static_cast<c10::DeviceIndex>(out.get_device());
  launch<3>(current_queue(device), device, "matmul<" + *dtype + ">",
            {static_cast<std::size_t>(y.size(0)), groups(m, kTileM) * kRows,
             groups(n, kTileN) * kColumns},
            {1, kRows, kColumns}, left.const_data_ptr(), right.const_data_ptr(),
            c.defined() ? c.const_data_ptr() : nullptr, y.mutable_data_ptr(), m, n, left.size(2),
            stride(left, 0), stride(left, 1), stride(left, 2), stride(right, 0), stride(right, 1),
            stride(right, 2), stride(c, 0), stride(c, 1), stride(c, 2), stride(y, 0), stride(y, 1),
            stride(y, 2), alpha, c.defined() ? beta : 0.f);
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
