// SPDX-License-Identifier: Apache-2.0
// The packed format of int8 weights for integer products; ipex_core.packing.int8 describes the same
// in Python.
//
// 64-byte header, sums of the columns (int32, one for each output feature, padded to a multiple of
// 32), then ceil(N / 32) panels [ceil(K / 4)][32][4]. Padding is zero. The format does not depend
// on the ISA level.
#pragma once

#include "ipex/glue/dispatch.h"
#include "linear/packed_check.h"

namespace ipex {

inline constexpr uint32_t kFormatInt8Panels = 16;

// Larger K could leave the range of int32 sums.
inline constexpr int64_t kMaxInt8Depth = 65536;

struct Int8Layout {
  int64_t k;        // padded
  int64_t columns;  // padded
  int64_t panels;   // offset in the tensor
  int64_t bytes;    // of the tensor

  Int8Layout(int64_t out_features, int64_t in_features)
      : k((in_features + 3) / 4 * 4),
        columns((out_features + kPackedPanel - 1) / kPackedPanel * kPackedPanel),
        panels(static_cast<int64_t>(sizeof(PackedHeader)) + 4 * columns),
        bytes(panels + columns * k) {}
};

// `packed` must hold an [n, k] weight.
inline void check_int8_packed(const char* op, const char* name, const Tensor& packed, int64_t n,
                              int64_t k) {
  const Int8Layout at(n, k);
  IPEX_CHECK(packed.is_cpu(), op, ": ", name, " must be on the device of x = cpu");
  IPEX_CHECK(packed.scalar_type() == ScalarType::Byte && packed.dim() == 1 &&
                 packed.size(0) == at.bytes && packed.is_contiguous(),
             op, ": ", name, " must be a weight of shape [", n, ", ", k,
             "] packed by pack_int8_weight (", at.bytes, " bytes), got ", bytes_text(packed));
  const auto* header = static_cast<const PackedHeader*>(packed.const_data_ptr());
  IPEX_CHECK(header->magic == kPackedMagic && header->version == kPackedVersion &&
                 header->format == kFormatInt8Panels && header->n == n && header->k == k,
             op, ": ", name, " must be a weight of shape [", n, ", ", k,
             "] packed by pack_int8_weight, got ", header_text(header));
}

}  // namespace ipex
