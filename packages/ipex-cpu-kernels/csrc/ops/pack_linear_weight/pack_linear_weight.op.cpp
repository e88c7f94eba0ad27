// SPDX-License-Identifier: Apache-2.0
// Packing and unpacking of linear weights. Pure data movement that is done once per weight: one
// version for all levels.
#include <algorithm>
#include <cstring>

#include "ipex/glue/dispatch.h"
#include "linear/packed_check.h"
#include "runtime/arena.h"

namespace ipex {
namespace {

const KernelBase pack_op("pack_linear_weight");
const KernelBase unpack_op("unpack_linear_weight");

// Moves one panel between the plain [n, k] weight and its packed place.
template <class T, bool kPack>
void move_panel(T* plain, T* panel, int64_t columns, int64_t k, int64_t inner) {
  for (int64_t i = 0; i < k; ++i) {
    T* row = panel + i / inner * inner * kPackedPanel + i % inner;
    for (int64_t j = 0; j < columns; ++j) {
      if constexpr (kPack)
        row[j * inner] = plain[j * k + i];
      else
        plain[j * k + i] = row[j * inner];
    }
  }
}

template <class T, bool kPack>
void move_all(void* plain, void* packed, int64_t n, int64_t k, uint32_t format) {
  const int64_t inner = packed_inner(format);
  const int64_t size = (k + inner - 1) / inner * inner * kPackedPanel;
  T* panels = reinterpret_cast<T*>(static_cast<char*>(packed) + sizeof(PackedHeader));
  // In parallel over panels: the thread that will read a panel is the one that touches its memory
  // first.
  parallel_for((n + kPackedPanel - 1) / kPackedPanel, 1, [=](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; ++p) {
      const int64_t columns = std::min(kPackedPanel, n - p * kPackedPanel);
      T* panel = panels + p * size;
      if (kPack && (columns < kPackedPanel || k % inner))
        std::memset(panel, 0, static_cast<size_t>(size) * sizeof(T));
      move_panel<T, kPack>(static_cast<T*>(plain) + p * kPackedPanel * k, panel, columns, k, inner);
    }
  });
}

Tensor pack(const Tensor& weight) {
  const char* op = "pack_linear_weight";
  check_tensor(op, "weight", weight);
  IPEX_CHECK(weight.dim() == 2 && weight.numel() > 0, op,
             ": weight must be 2-D and not empty, got ", shape_text(weight));
  const int64_t n = weight.size(0), k = weight.size(1);
  const uint32_t format = format_of(weight.scalar_type());
  const Tensor plain = as_contiguous(weight);
  Tensor packed = arena::allocate(packed_bytes(n, k, format));
  void* to = packed.mutable_data_ptr();
  PackedHeader header{};
  header.magic = kPackedMagic;
  header.version = kPackedVersion;
  header.format = format;
  header.panel = static_cast<uint32_t>(kPackedPanel);
  header.n = n;
  header.k = k;
  std::memcpy(to, &header, sizeof(header));
  void* from = const_cast<void*>(plain.const_data_ptr());
  if (format == 0)
    move_all<uint32_t, true>(from, to, n, k, format);
  else
    move_all<uint16_t, true>(from, to, n, k, format);
  return packed;
}

Tensor unpack(const Tensor& packed, int64_t n, int64_t k, ScalarType dtype) {
  const char* op = "unpack_linear_weight";
  IPEX_CHECK(is_kernel_dtype(dtype), op, ": dtype must be float32, bfloat16 or float16, got ",
             dtype_name(dtype));
  IPEX_CHECK(n > 0, op, ": out_features must be positive, got ", n);
  IPEX_CHECK(k > 0, op, ": in_features must be positive, got ", k);
  const uint32_t format = format_of(dtype);
  check_packed(op, "packed", packed, n, k, dtype);
  const int64_t sizes[2] = {n, k};
  Tensor plain = new_contiguous(sizes, 2, dtype);
  void* from = const_cast<void*>(packed.const_data_ptr());
  if (format == 0)
    move_all<uint32_t, false>(plain.mutable_data_ptr(), from, n, k, format);
  else
    move_all<uint16_t, false>(plain.mutable_data_ptr(), from, n, k, format);
  return plain;
}

}  // namespace
}  // namespace ipex

STABLE_TORCH_LIBRARY_IMPL(ipex, CPU, m) {
  IPEX_IMPL(m, "pack_linear_weight", ipex::pack);
  IPEX_IMPL(m, "unpack_linear_weight", ipex::unpack);
}
