// SPDX-License-Identifier: Apache-2.0
// Packed weights of experts: [E, bytes], row e is the packed weight of expert e (linear/packed.h).
// ipex_core.packing.experts describes the same in Python.
#pragma once

#include "ipex/glue/dispatch.h"
#include "linear/packed_check.h"
#include "woq_linear/woq_format.h"

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
             "] packed by pack_moe_weight (E rows of ", size, " bytes), got ", bytes_text(packed));
}

// Expert `e` must hold what the shape of the tensor promises.
inline void check_expert_header(const char* op, const char* name, const void* expert, int64_t n,
                                int64_t k, ScalarType dtype, bool gated) {
  const auto* header = static_cast<const PackedHeader*>(expert);
  IPEX_CHECK(header->magic == kPackedMagic && header->version == kPackedVersion &&
                 header->format == format_of(dtype) && header->n == expert_rows(n, gated) &&
                 header->k == k,
             op, ": ", name, " must be ", dtype_name(dtype), " weights of shape [E, ", n, ", ", k,
             "] packed by pack_moe_weight, got ", header_text(header));
}

// The header of the first expert if the tensor holds quantized weights, else null.
inline const PackedHeader* quantized_header(const Tensor& packed) {
  if (!packed.is_cpu() || packed.scalar_type() != ScalarType::Byte || packed.dim() != 2 ||
      !packed.is_contiguous() || packed.size(0) == 0 ||
      packed.size(1) < static_cast<int64_t>(sizeof(PackedHeader)))
    return nullptr;
  const auto* header = static_cast<const PackedHeader*>(packed.const_data_ptr());
  const bool quantized = header->magic == kPackedMagic && header->version == kPackedVersion &&
                         header->format >= kFormatInt8 && header->format <= kFormatFp8E5M2;
  return quantized ? header : nullptr;
}

// Whether an expert of `bytes` bytes holds a quantized [n, k] weight for float activations.
inline bool is_quantized_expert(const void* expert, int64_t bytes, int64_t n, int64_t k) {
  const auto* header = static_cast<const PackedHeader*>(expert);
  const bool sensible =
      header->magic == kPackedMagic && header->version == kPackedVersion &&
      header->panel == kPackedPanel && header->format >= kFormatInt8 &&
      header->format <= kFormatFp8E5M2 && header->n == n && header->k == k && header->group > 0 &&
      header->group <= k && (header->group == k || header->group % 8 == 0) &&
      header->scale_type <= kScaleE8M0 && header->zero_kind <= kZeroFloat &&
      header->order == kOrderDot && (header->scale_columns == 16 || header->scale_columns == 1);
  if (!sensible) return false;
  const WoqLayout at = woq_layout(*header);
  if (at.bytes != bytes) return false;
  const auto* places =
      reinterpret_cast<const int32_t*>(static_cast<const char*>(expert) + at.permutation);
  bool inside = true;  // activations are gathered through it
  if (at.permutation)
    for (int64_t i = 0; i < k; ++i) inside &= places[i] >= 0 && places[i] < k;
  return inside;
}

inline void check_quantized_expert(const char* op, const char* name, const Tensor& packed,
                                   int64_t e, int64_t n, int64_t k, bool gated) {
  const bool shape = packed.scalar_type() == ScalarType::Byte && packed.dim() == 2 &&
                     packed.is_contiguous() && packed.size(0) > 0 &&
                     packed.size(1) >= static_cast<int64_t>(sizeof(PackedHeader));
  const void* expert = nullptr;
  if (shape) expert = static_cast<const char*>(packed.const_data_ptr()) + e * packed.size(1);
  IPEX_CHECK(expert && is_quantized_expert(expert, packed.size(1), expert_rows(n, gated), k), op,
             ": ", name, " must be quantized weights of shape [E, ", n, ", ", k,
             "] packed with order dot, got ",
             expert ? header_text(static_cast<const PackedHeader*>(expert)) : bytes_text(packed));
}

}  // namespace ipex
