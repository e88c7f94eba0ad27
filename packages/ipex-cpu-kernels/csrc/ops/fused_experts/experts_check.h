// SPDX-License-Identifier: Apache-2.0
// Packed weights of experts: [E, bytes], row e is the packed weight of expert e (linear/packed.h).
// ipex_core._experts describes the same in Python.
#pragma once

#include "ipex/dispatch.h"
#include "linear/packed_check.h"

namespace ipex {

// Rows of the packed weight: the two halves of a gated one are padded to whole panels each.
inline int64_t expert_rows(int64_t n, bool gated) {
  return gated ? 2 * ((n / 2 + kPackedPanel - 1) / kPackedPanel * kPackedPanel) : n;
}

// `packed` must have the shape of E packed [n, k] weights of `dtype`.
inline void check_experts(const char* op, const char* name, const Tensor& packed, int64_t n,
                          int64_t k, ScalarType dtype, bool gated) {
  const int64_t size = packed_bytes(expert_rows(n, gated), k, format_of(dtype));
  IPEX_CHECK(packed.is_cpu() && packed.scalar_type() == ScalarType::Byte && packed.dim() == 2 &&
                 packed.size(0) > 0 && packed.size(1) == size && packed.is_contiguous(),
             op, ": ", name, " must be ", dtype_name(dtype), " weights of shape [E, ", n, ", ", k,
             "] packed by pack_moe_weight (E rows of ", size, " bytes), got ",
             dtype_name(packed.scalar_type()), " ", shape_text(packed));
}

// Expert `e` must hold what the shape of the tensor promises.
inline void check_expert_header(const char* op, const char* name, const void* expert, int64_t n,
                                int64_t k, ScalarType dtype, bool gated) {
  const auto* header = static_cast<const PackedHeader*>(expert);
  IPEX_CHECK(header->magic == kPackedMagic && header->version == kPackedVersion &&
                 header->format == format_of(dtype) && header->n == expert_rows(n, gated) &&
                 header->k == k,
             op, ": ", name, " must be ", dtype_name(dtype), " weights of shape [E, ", n, ", ", k,
             "] packed by pack_moe_weight, got a tensor with another header");
}

}  // namespace ipex
