// SPDX-License-Identifier: Apache-2.0
// Checks of packed weights, shared by the glue of the ops that take one.
#pragma once

#include <cstring>

#include "ipex/glue/dispatch.h"
#include "linear/packed.h"

namespace ipex {

// The format id of a kernel dtype.
inline uint32_t format_of(ScalarType dtype) {
  return dtype == ScalarType::Float ? 0u : dtype == ScalarType::BFloat16 ? 1u : 2u;
}

// "uint8 [64]": what a message says of a tensor that is not the packed weight it should be.
inline std::string bytes_text(const Tensor& packed) {
  return std::string(dtype_name(packed.scalar_type())) + " " + shape_text(packed) +
         (packed.is_contiguous() ? "" : " that is not contiguous");
}

// What a message says of the header of a tensor; as header_text in ipex_core.packing.dense.
inline std::string header_text(const PackedHeader* header) {
  if (header == nullptr || header->magic != kPackedMagic || header->version != kPackedVersion ||
      header->panel != kPackedPanel)
    return "a tensor without the header of a packed weight";
  std::ostringstream text;
  const char* const names[] = {"float32", "bfloat16", "float16"};
  text << "the header of a "
       << (header->format < 3                  ? names[header->format]
           : header->format == kFormatWinograd ? "transformed"
                                               : "quantized")
       << " weight of shape [" << header->n << ", " << header->k << "]";
  return text.str();
}

// `packed` must hold an [n, k] weight of `dtype`.
inline void check_packed(const char* op, const char* name, const Tensor& packed, int64_t n,
                         int64_t k, ScalarType dtype) {
  const uint32_t format = format_of(dtype);
  const int64_t size = packed_bytes(n, k, format);
  IPEX_CHECK(packed.is_cpu(), op, ": ", name, " must be on the device of x = cpu");
  IPEX_CHECK(packed.scalar_type() == ScalarType::Byte && packed.dim() == 1 &&
                 packed.size(0) == size && packed.is_contiguous(),
             op, ": ", name, " must be a ", dtype_name(dtype), " weight of shape [", n, ", ", k,
             "] packed by pack_linear_weight (", size, " bytes), got ", bytes_text(packed));
  const auto* header = static_cast<const PackedHeader*>(packed.const_data_ptr());
  // Equal sizes do not make equal formats: bfloat16 and float16 weights are equally long.
  IPEX_CHECK(header->magic == kPackedMagic && header->version == kPackedVersion &&
                 header->format == format && header->n == n && header->k == k,
             op, ": ", name, " must be a ", dtype_name(dtype), " weight of shape [", n, ", ", k,
             "] packed by pack_linear_weight, got ", header_text(header));
}

// Row i of `packed` must hold the i-th of `count` [n, k] weights of `dtype`.
inline void check_packed_rows(const char* op, const char* name, const Tensor& packed, int64_t count,
                              int64_t n, int64_t k, ScalarType dtype) {
  const uint32_t format = format_of(dtype);
  const int64_t size = packed_bytes(n, k, format);
  IPEX_CHECK(packed.is_cpu(), op, ": ", name, " must be on the device of x = cpu");
  IPEX_CHECK(packed.scalar_type() == ScalarType::Byte && packed.dim() == 2 &&
                 packed.size(0) == count && packed.size(1) == size && packed.is_contiguous(),
             op, ": ", name, " must be ", count, " ", dtype_name(dtype), " weights of shape [", n,
             ", ", k, "] packed by pack_linear_weight, a row of ", size, " bytes each, got ",
             bytes_text(packed));
  const char* data = static_cast<const char*>(packed.const_data_ptr());
  for (int64_t i = 0; i < count; ++i) {
    PackedHeader header;
    std::memcpy(&header, data + i * size, sizeof(header));
    IPEX_CHECK(header.magic == kPackedMagic && header.version == kPackedVersion &&
                   header.format == format && header.n == n && header.k == k,
               op, ": ", name, " must be ", count, " ", dtype_name(dtype), " weights of shape [", n,
               ", ", k, "] packed by pack_linear_weight, got ", header_text(&header), " in row ",
               i);
  }
}

}  // namespace ipex
