// SPDX-License-Identifier: Apache-2.0
// Packing and unpacking of the weights of experts. Pure data movement that is done once per weight:
// one version for all levels.
#include <algorithm>
#include <cstring>
#include <vector>

#include "fused_experts/experts_check.h"
#include "ipex/glue/dispatch.h"
#include "runtime/arena.h"

namespace ipex {
namespace {

const KernelBase pack_op("pack_moe_weight");
const KernelBase unpack_op("unpack_moe_weight");
const KernelBase stack_op("pack_moe_stack");

struct Shape {
  int64_t experts, n, k;
  uint32_t format;
  bool gated;

  int64_t rows() const { return expert_rows(n, gated); }
  int64_t bytes() const { return packed_bytes(rows(), k, format); }
};

// Moves panel `p` between the plain [n, k] weight of an expert and its packed place.
template <class T, bool kPack>
void move_panel(const Shape& shape, int64_t p, T* plain, T* panel) {
  const int64_t inner = packed_inner(shape.format), k = shape.k;
  // Of a gated weight every other panel belongs to the second half of the rows.
  const int64_t half = shape.gated ? shape.n / 2 : shape.n;
  const int64_t at = (shape.gated ? p / 2 : p) * kPackedPanel;
  T* first = plain + (at + (shape.gated && p % 2 ? half : 0)) * k;
  const int64_t columns = std::min(kPackedPanel, half - at);
  if (kPack && (columns < kPackedPanel || k % inner))
    std::memset(panel, 0,
                static_cast<size_t>((k + inner - 1) / inner * inner * kPackedPanel) * sizeof(T));
  for (int64_t i = 0; i < k; ++i) {
    T* row = panel + i / inner * inner * kPackedPanel + i % inner;
    for (int64_t j = 0; j < columns; ++j) {
      if constexpr (kPack)
        row[j * inner] = first[j * k + i];
      else
        first[j * k + i] = row[j * inner];
    }
  }
}

template <class T, bool kPack>
void move_all(const Shape& shape, void* plain, void* packed) {
  const int64_t inner = packed_inner(shape.format);
  const int64_t size = (shape.k + inner - 1) / inner * inner * kPackedPanel;
  const int64_t panels = (shape.rows() + kPackedPanel - 1) / kPackedPanel, bytes = shape.bytes();
  // The thread that packs a panel touches its memory first.
  parallel_for(shape.experts * panels, 1, [=](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const int64_t e = t / panels, p = t % panels;
      char* expert = static_cast<char*>(packed) + e * bytes;
      if (kPack && p == 0) {
        PackedHeader header{};
        header.magic = kPackedMagic;
        header.version = kPackedVersion;
        header.format = shape.format;
        header.panel = static_cast<uint32_t>(kPackedPanel);
        header.n = shape.rows();
        header.k = shape.k;
        std::memcpy(expert, &header, sizeof(header));
      }
      move_panel<T, kPack>(shape, p, static_cast<T*>(plain) + e * shape.n * shape.k,
                           reinterpret_cast<T*>(expert + sizeof(PackedHeader)) + p * size);
    }
  });
}

Tensor pack(const Tensor& weight, bool gated) {
  const char* op = "pack_moe_weight";
  check_tensor(op, "weight", weight);
  IPEX_CHECK(weight.dim() == 3 && weight.numel() > 0, op,
             ": weight must be 3-D and not empty, got ", shape_text(weight));
  const Shape shape{weight.size(0), weight.size(1), weight.size(2), format_of(weight.scalar_type()),
                    gated};
  IPEX_CHECK(!gated || shape.n % 2 == 0, op, ": weight.shape[1] must be even if gated, got ",
             shape.n);
  const Tensor plain = as_contiguous(weight);
  Tensor packed = arena::allocate(shape.experts * shape.bytes());
  void* from = const_cast<void*>(plain.const_data_ptr());
  if (shape.format == 0)
    move_all<uint32_t, true>(shape, from, packed.mutable_data_ptr());
  else
    move_all<uint16_t, true>(shape, from, packed.mutable_data_ptr());
  return torch::stable::view(packed, {shape.experts, shape.bytes()});
}

Tensor unpack(const Tensor& packed, int64_t n, int64_t k, ScalarType dtype, bool gated) {
  const char* op = "unpack_moe_weight";
  IPEX_CHECK(is_kernel_dtype(dtype), op, ": dtype must be float32, bfloat16 or float16, got ",
             dtype_name(dtype));
  IPEX_CHECK(n > 0, op, ": out_features must be positive, got ", n);
  IPEX_CHECK(k > 0, op, ": in_features must be positive, got ", k);
  IPEX_CHECK(!gated || n % 2 == 0, op, ": out_features must be even if gated, got ", n);
  check_experts(op, "packed", packed, n, k, dtype, gated);
  const Shape shape{packed.size(0), n, k, format_of(dtype), gated};
  auto* from = static_cast<char*>(const_cast<void*>(packed.const_data_ptr()));
  for (int64_t e = 0; e < shape.experts; ++e)
    check_expert_header(op, "packed", from + e * shape.bytes(), n, k, dtype, gated);
  const int64_t sizes[3] = {shape.experts, n, k};
  Tensor plain = new_contiguous(sizes, 3, dtype);
  if (shape.format == 0)
    move_all<uint32_t, false>(shape, plain.mutable_data_ptr(), from);
  else
    move_all<uint16_t, false>(shape, plain.mutable_data_ptr(), from);
  return plain;
}

Tensor stack(std::vector<Tensor> packed) {
  const char* op = "pack_moe_stack";
  IPEX_CHECK(!packed.empty(), op, ": packed must hold at least one tensor, got 0");
  const auto experts = static_cast<int64_t>(packed.size());
  const int64_t bytes = packed[0].dim() == 1 ? packed[0].size(0) : 0;
  std::vector<Tensor> plain;
  for (const Tensor& one : packed) {
    const bool same = one.is_cpu() && one.scalar_type() == ScalarType::Byte && one.dim() == 1 &&
                      bytes > 0 && one.size(0) == bytes;
    IPEX_CHECK(same, op, ": packed must hold packed weights of one size, got ",
               dtype_name(one.scalar_type()), " ", shape_text(one));
    plain.push_back(as_contiguous(one));
  }
  Tensor all = arena::allocate(experts * bytes);
  char* to = static_cast<char*>(all.mutable_data_ptr());
  // In pieces, so that all threads copy and touch memory.
  constexpr int64_t kPiece = 1 << 20;
  const int64_t pieces = (bytes + kPiece - 1) / kPiece;
  parallel_for(experts * pieces, 1, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const int64_t e = t / pieces, at = t % pieces * kPiece;
      const char* from = static_cast<const char*>(plain[static_cast<size_t>(e)].const_data_ptr());
      std::memcpy(to + e * bytes + at, from + at,
                  static_cast<size_t>(std::min(kPiece, bytes - at)));
    }
  });
  return torch::stable::view(all, {experts, bytes});
}

}  // namespace
}  // namespace ipex

STABLE_TORCH_LIBRARY_IMPL(ipex, CPU, m) {
  IPEX_IMPL(m, "pack_moe_weight", ipex::pack);
  IPEX_IMPL(m, "pack_moe_stack", ipex::stack);
  IPEX_IMPL(m, "unpack_moe_weight", ipex::unpack);
}
