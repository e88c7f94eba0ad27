// SPDX-License-Identifier: Apache-2.0
// What a packed quantized weight was made of. Pure data movement: one version for all levels.
#include <algorithm>
#include <cstring>
#include <tuple>

#include "ipex/glue/dispatch.h"
#include "pack_woq_weight/woq_codes.h"
#include "pack_woq_weight/woq_names.h"
#include "woq_linear/woq_check.h"

namespace ipex {
namespace {

const KernelBase unpack_op("unpack_woq_weight");
constexpr const char* kOp = "unpack_woq_weight";

struct Target {
  uint8_t* codes;
  char* scales;
  char* zeros;
};

void unpack_strip(const PackedHeader& header, const WoqLayout& at, const int32_t* places,
                  const char* from, int64_t strip, const Target& to) {
  const int64_t first = strip * kStrip, k = header.k, groups = at.groups;
  const int64_t valid = std::clamp<int64_t>(header.n - first, 0, kStrip);
  if (valid == 0) return;
  const int64_t size = woq_scale_bytes(header.scale_type);
  const auto move = [&](char* plain, int64_t offset, int64_t bytes) {
    move_group_bytes<false>(plain + first * groups * bytes, const_cast<char*>(from) + offset, valid,
                            groups, bytes);
  };
  if (header.scale_columns != 1)
    move(to.scales, at.scales, size);
  else if (first % 128 == 0)
    std::memcpy(to.scales + first / 128 * groups * size, from + at.scales,
                static_cast<size_t>(groups * size));
  if (header.zero_kind) move(to.zeros, at.zeros, woq_zero_bytes(header.zero_kind));
  const int64_t columns = woq_code_columns(header.format, k);
  const bool nibbles = woq_is_nibble(header.format);
  uint8_t* codes = to.codes + first * columns;
  const auto* weights = reinterpret_cast<const uint8_t*>(from + at.weights);
  const int64_t block_k = woq_block_k(header.format), blocks = places ? 0 : k / block_k;
  BlockOrder(header, true).move<false>(codes, columns, weights, valid, blocks);
  for (int64_t c = 0; c < valid; ++c) {
    uint8_t* row = codes + c * columns;
    if (nibbles) std::memset(row + 4 * blocks, 0, static_cast<size_t>(columns - 4 * blocks));
    const PackedRow<const uint8_t> packed(weights, c, header);
    for (int64_t i = blocks * block_k; i < k; ++i) {
      const int64_t place = places ? places[i] : i;
      const uint8_t code = packed.at(i);
      if (nibbles)
        row[place / 2] = static_cast<uint8_t>(row[place / 2] | code << (place % 2 * 4));
      else
        row[place] = code;
    }
  }
}

std::tuple<Tensor, Tensor, Tensor, Tensor> unpack(const Tensor& packed, int64_t n, int64_t k,
                                                  std::string format, int64_t group_size,
                                                  ScalarType scale_dtype, std::string zeros,
                                                  bool block_scales, bool g_idx,
                                                  std::string order) {
  PackedHeader wanted{};
  wanted.format = parse_woq_format(kOp, format);
  wanted.order = parse_woq_order(kOp, order, wanted.format);
  IPEX_CHECK(n > 0, kOp, ": out_features must be positive, got ", n);
  IPEX_CHECK(k > 0, kOp, ": in_features must be positive, got ", k);
  wanted.n = n;
  wanted.k = k;
  wanted.group = check_group_size(kOp, group_size, k);
  IPEX_CHECK(woq_scale_type(scale_dtype, &wanted.scale_type), kOp,
             ": scale_dtype must be float32, bfloat16, float16, float8_e8m0fnu or uint8, got ",
             dtype_name(scale_dtype));
  IPEX_CHECK(zeros == "none" || zeros == "int8" || zeros == "float32", kOp,
             ": zeros must be one of none, int8, float32, got ", zeros);
  wanted.zero_kind = zeros == "none" ? kZeroNone : zeros == "int8" ? kZeroInt8 : kZeroFloat;
  wanted.scale_columns = block_scales ? 1 : 16;
  if (g_idx) wanted.flags |= kFlagPermuted;
  const WoqLayout at = woq_layout(wanted);
  IPEX_CHECK(
      packed.scalar_type() == ScalarType::Byte && packed.dim() == 1 && packed.size(0) == at.bytes,
      kOp, ": packed must be packed with these arguments (", at.bytes, " bytes), got ",
      dtype_name(packed.scalar_type()), " ", shape_text(packed));
  const PackedHeader& found = check_woq_packed(kOp, "packed", packed, n, k);
  IPEX_CHECK(found.format == wanted.format && found.group == wanted.group &&
                 found.scale_type == wanted.scale_type && found.zero_kind == wanted.zero_kind &&
                 found.order == wanted.order && found.scale_columns == wanted.scale_columns &&
                 (found.flags & kFlagPermuted) == wanted.flags,
             kOp, ": packed must be packed with these arguments, got a tensor with another header");

  const int64_t code_sizes[2] = {n, woq_code_columns(wanted.format, k)};
  const int64_t scale_sizes[2] = {block_scales ? (n + 127) / 128 : n, at.groups};
  const int64_t zero_sizes[2] = {n, at.groups}, none[1] = {0}, features[1] = {k};
  Tensor codes = new_contiguous(code_sizes, 2, woq_code_dtype(wanted.format));
  Tensor scales = new_contiguous(scale_sizes, 2, scale_dtype);
  Tensor zero_points =
      wanted.zero_kind == kZeroNone
          ? new_contiguous(none, 1, ScalarType::Char)
          : new_contiguous(zero_sizes, 2,
                           wanted.zero_kind == kZeroFloat ? ScalarType::Float : ScalarType::Char);
  Tensor groups = new_contiguous(g_idx ? features : none, 1, ScalarType::Int);

  const char* from = static_cast<const char*>(packed.const_data_ptr());
  const auto* places = g_idx ? reinterpret_cast<const int32_t*>(from + at.permutation) : nullptr;
  if (g_idx) {
    auto* to = static_cast<int32_t*>(groups.mutable_data_ptr());
    for (int64_t i = 0; i < k; ++i) to[places[i]] = static_cast<int32_t>(i / wanted.group);
  }
  const Target to{static_cast<uint8_t*>(codes.mutable_data_ptr()),
                  static_cast<char*>(scales.mutable_data_ptr()),
                  static_cast<char*>(zero_points.mutable_data_ptr())};
  parallel_for(at.strips, 1, [&](int64_t begin, int64_t end) {
    for (int64_t s = begin; s < end; ++s)
      unpack_strip(wanted, at, places, from + at.first_strip + s * at.strip_bytes, s, to);
  });
  return {codes, scales, zero_points, groups};
}

}  // namespace
}  // namespace ipex

STABLE_TORCH_LIBRARY_IMPL(ipex, CPU, m) { IPEX_IMPL(m, "unpack_woq_weight", ipex::unpack); }
