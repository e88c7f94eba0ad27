// SPDX-License-Identifier: Apache-2.0
// Packing and unpacking of int8 weights: data movement that is done once per weight, one version
// for all levels.
#include <algorithm>
#include <cstring>

#include "int8_linear/int8_panels.h"
#include "runtime/arena.h"

namespace ipex {
namespace {

const KernelBase pack_op("pack_int8_weight");
const KernelBase unpack_op("unpack_int8_weight");

// Fills one panel and the sums of its columns.
void pack_panel(const int8_t* plain, int64_t columns, int64_t k, int64_t padded, int8_t* panel,
                int32_t* sums) {
  if (columns < kPackedPanel || k != padded)
    std::memset(panel, 0, static_cast<size_t>(padded * kPackedPanel));
  for (int64_t j = 0; j < kPackedPanel; ++j) {
    int32_t sum = 0;
    if (j < columns)
      for (int64_t i = 0; i < k; ++i) {
        const int8_t value = plain[j * k + i];
        panel[(i / 4 * kPackedPanel + j) * 4 + i % 4] = value;
        sum += value;
      }
    sums[j] = sum;
  }
}

Tensor pack(const Tensor& weight) {
  const char* op = "pack_int8_weight";
  IPEX_CHECK(weight.scalar_type() == ScalarType::Char, op, ": weight must have dtype int8, got ",
             dtype_name(weight.scalar_type()));
  IPEX_CHECK(weight.dim() == 2 && weight.numel() > 0 && weight.size(1) <= kMaxInt8Depth, op,
             ": weight must be 2-D, not empty and of at most 65536 columns, got ",
             shape_text(weight));
  const int64_t n = weight.size(0), k = weight.size(1);
  const Int8Layout at(n, k);
  const Tensor plain = as_contiguous(weight);
  Tensor packed = arena::allocate(at.bytes);
  char* to = static_cast<char*>(packed.mutable_data_ptr());
  PackedHeader header{};
  header.magic = kPackedMagic;
  header.version = kPackedVersion;
  header.format = kFormatInt8Panels;
  header.panel = static_cast<uint32_t>(kPackedPanel);
  header.n = n;
  header.k = k;
  std::memcpy(to, &header, sizeof(header));
  auto* sums = reinterpret_cast<int32_t*>(to + sizeof(header));
  auto* panels = reinterpret_cast<int8_t*>(to + at.panels);
  const auto* from = static_cast<const int8_t*>(plain.const_data_ptr());
  // In parallel over panels: the thread that will read a panel is the one that touches its memory
  // first.
  parallel_for(at.columns / kPackedPanel, 1, [=](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; ++p)
      pack_panel(from + p * kPackedPanel * k, std::min(kPackedPanel, n - p * kPackedPanel), k, at.k,
                 panels + p * kPackedPanel * at.k, sums + p * kPackedPanel);
  });
  return packed;
}

Tensor unpack(const Tensor& packed, int64_t n, int64_t k) {
  const char* op = "unpack_int8_weight";
  IPEX_CHECK(n > 0, op, ": out_features must be positive, got ", n);
  IPEX_CHECK(k > 0, op, ": in_features must be positive, got ", k);
  check_int8_packed(op, "packed", packed, n, k);
  const Int8Layout at(n, k);
  const int64_t sizes[2] = {n, k};
  Tensor plain = new_contiguous(sizes, 2, ScalarType::Char);
  auto* to = static_cast<int8_t*>(plain.mutable_data_ptr());
  const auto* panels = static_cast<const int8_t*>(packed.const_data_ptr()) + at.panels;
  parallel_for(n, kPackedPanel, [=](int64_t begin, int64_t end) {
    for (int64_t j = begin; j < end; ++j) {
      const int8_t* panel = panels + j / kPackedPanel * kPackedPanel * at.k;
      for (int64_t i = 0; i < k; ++i)
        to[j * k + i] = panel[(i / 4 * kPackedPanel + j % kPackedPanel) * 4 + i % 4];
    }
  });
  return plain;
}

}  // namespace
}  // namespace ipex

STABLE_TORCH_LIBRARY_IMPL(ipex, CPU, m) {
  IPEX_IMPL(m, "pack_int8_weight", ipex::pack);
  IPEX_IMPL(m, "unpack_int8_weight", ipex::unpack);
}
