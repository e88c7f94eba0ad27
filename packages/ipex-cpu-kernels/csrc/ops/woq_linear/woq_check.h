// SPDX-License-Identifier: Apache-2.0
// Checks of packed quantized weights, shared by the glue of the ops that take one.
#pragma once

#include "ipex/glue/dispatch.h"
#include "linear/packed_check.h"
#include "woq_linear/woq_format.h"

namespace ipex {

// The header of a tensor that says it is a packed quantized weight, has sensible numbers in it and
// is as long as they ask; else null. `packed` must be a tensor on the CPU.
inline const PackedHeader* woq_header(const Tensor& packed) {
  if (packed.scalar_type() != ScalarType::Byte || packed.dim() != 1 || !packed.is_contiguous() ||
      packed.size(0) < static_cast<int64_t>(sizeof(PackedHeader)))
    return nullptr;
  const auto* header = static_cast<const PackedHeader*>(packed.const_data_ptr());
  constexpr int64_t kMax = int64_t{1} << 31;
  const bool sensible =
      header->magic == kPackedMagic && header->version == kPackedVersion &&
      header->panel == kPackedPanel && header->format >= kFormatInt8 &&
      header->format <= kFormatFp8E5M2 && header->n > 0 && header->n < kMax && header->k > 0 &&
      header->k < kMax && header->group > 0 && header->group <= header->k &&
      (header->group == header->k || header->group % 8 == 0) && header->scale_type <= kScaleE8M0 &&
      header->zero_kind <= kZeroFloat && header->order <= kOrderVnni &&
      (header->scale_columns == 16 || header->scale_columns == 1);
  return sensible && woq_layout(*header).bytes == packed.size(0) ? header : nullptr;
}

// `packed` must hold an [n, k] weight. Returns its header.
inline const PackedHeader& check_woq_packed(const char* op, const char* name, const Tensor& packed,
                                            int64_t n, int64_t k) {
  const auto expected = [&] {
    std::ostringstream text;
    text << op << ": " << name << " must be a weight of shape [" << n << ", " << k
         << "] packed by pack_woq_weight, got ";
    return text.str();
  };
  IPEX_CHECK(packed.is_cpu(), op, ": ", name, " must be on the device of x = cpu");
  IPEX_CHECK(packed.scalar_type() == ScalarType::Byte && packed.dim() == 1, expected(),
             dtype_name(packed.scalar_type()), " ", shape_text(packed));
  const PackedHeader* header = woq_header(packed);
  IPEX_CHECK(header && header->n == n && header->k == k, expected(), header_text(header));
  if (header->flags & kFlagPermuted) {
    // Activations are gathered through it.
    const auto* places = reinterpret_cast<const int32_t*>(
        static_cast<const char*>(packed.const_data_ptr()) + woq_layout(*header).permutation);
    bool inside = true;
    for (int64_t i = 0; i < k; ++i) inside &= places[i] >= 0 && places[i] < k;
    IPEX_CHECK(inside, expected(), "a tensor with another permutation");
  }
  return *header;
}

}  // namespace ipex
