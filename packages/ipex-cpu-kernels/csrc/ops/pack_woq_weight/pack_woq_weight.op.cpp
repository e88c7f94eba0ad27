// SPDX-License-Identifier: Apache-2.0
// Packing of quantized weights. Pure data movement that is done once per weight: one version for
// all levels.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <vector>

#include "ipex/glue/dispatch.h"
#include "pack_woq_weight/woq_codes.h"
#include "pack_woq_weight/woq_names.h"
#include "runtime/arena.h"

namespace ipex {
namespace {

const KernelBase pack_op("pack_woq_weight");
constexpr const char* kOp = "pack_woq_weight";

std::string shape_of(int64_t a, int64_t b) {
  std::ostringstream text;
  text << "[" << a << ", " << b << "]";
  return text.str();
}

bool has_shape(const Tensor& x, int64_t a, int64_t b) {
  return x.dim() == 2 && x.size(0) == a && x.size(1) == b;
}

void check_device(const char* name, const Tensor& value) {
  IPEX_CHECK(value.is_cpu(), kOp, ": ", name, " must be on the device of qweight = cpu");
}

// Checks all but the names and fills in the rest of the header.
void check_parts(const Tensor& qweight, const Tensor& scales, const OptionalTensor& zeros,
                 int64_t group_size, const OptionalTensor& g_idx, PackedHeader* header) {
  const std::string format = kWoqFormats[header->format - kFormatInt8];
  const int64_t k = header->k;
  const ScalarType dtype = woq_code_dtype(header->format);
  IPEX_CHECK(qweight.scalar_type() == dtype, kOp, ": qweight must have dtype ", dtype_name(dtype),
             ", got ", dtype_name(qweight.scalar_type()));
  const int64_t columns = woq_code_columns(header->format, k);
  IPEX_CHECK(qweight.dim() == 2 && qweight.size(0) > 0 && qweight.size(1) == columns, kOp,
             ": qweight must have shape [N, ", columns, "] with N > 0, got ", shape_text(qweight));
  const int64_t n = qweight.size(0), groups = (k + header->group - 1) / header->group;
  header->n = n;
  check_device("scales", scales);
  if (zeros) check_device("zeros", *zeros);
  if (g_idx) check_device("g_idx", *g_idx);
  IPEX_CHECK(woq_scale_type(scales.scalar_type(), &header->scale_type), kOp,
             ": scales must have dtype float32, bfloat16, float16, float8_e8m0fnu or uint8, got ",
             dtype_name(scales.scalar_type()));
  const bool by_block = header->format >= kFormatFp8E4M3 && group_size == 128;
  const int64_t block_rows = (n + 127) / 128;
  IPEX_CHECK(has_shape(scales, n, groups) || (by_block && has_shape(scales, block_rows, groups)),
             kOp, ": scales must have shape ", shape_of(n, groups),
             by_block ? " or " + shape_of(block_rows, groups) : "", ", got ", shape_text(scales));
  header->scale_columns = scales.size(0) == n ? 16 : 1;
  if (zeros) {
    IPEX_CHECK(header->format <= kFormatInt4, kOp, ": zeros must be None for format ", format,
               ", got a tensor");
    const bool is_float = zeros->scalar_type() == ScalarType::Float;
    const bool vnni = header->order == kOrderVnni;
    IPEX_CHECK(zeros->scalar_type() == ScalarType::Char || (is_float && !vnni), kOp,
               ": zeros must have dtype ", vnni ? "int8" : "int8 or float32", ", got ",
               dtype_name(zeros->scalar_type()));
    IPEX_CHECK(has_shape(*zeros, n, groups), kOp, ": zeros must have shape ", shape_of(n, groups),
               ", got ", shape_text(*zeros));
    header->zero_kind = is_float ? kZeroFloat : kZeroInt8;
  }
  if (g_idx) {
    IPEX_CHECK(g_idx->scalar_type() == ScalarType::Int, kOp, ": g_idx must have dtype int32, got ",
               dtype_name(g_idx->scalar_type()));
    IPEX_CHECK(g_idx->dim() == 1 && g_idx->size(0) == k, kOp, ": g_idx must have shape [", k,
               "], got ", shape_text(*g_idx));
    header->flags |= kFlagPermuted;
  }
}

// The input feature at each packed place: stable by group.
std::vector<int32_t> sort_by_group(const int32_t* g_idx, int64_t k, int64_t group) {
  const int64_t groups = (k + group - 1) / group;
  std::vector<int64_t> next(static_cast<size_t>(groups));
  for (int64_t g = 0; g < groups; ++g) next[static_cast<size_t>(g)] = g * group;
  std::vector<int32_t> places(static_cast<size_t>(k));
  for (int64_t i = 0; i < k; ++i) {
    const int64_t g = g_idx[i];
    const bool known = g >= 0 && g < groups;
    const int64_t at = known ? next[static_cast<size_t>(g)]++ : 0;
    IPEX_CHECK(known && at < std::min(k, (g + 1) * group), kOp, ": g_idx must give each of the ",
               groups, " groups ", group, " input features, the last one the rest, got ",
               known ? "one more for group " : "group ", g, " at index ", i);
    places[static_cast<size_t>(at)] = static_cast<int32_t>(i);
  }
  return places;
}

struct Source {
  const uint8_t* codes;
  const char* scales;
  const char* zeros;
  const int32_t* places;  // null: input features in their order
};

// The integer that order vnni multiplies activations with, before a zero point is subtracted.
int32_t integer_value(uint32_t format, uint8_t code) {
  if (format == kFormatNf4) return kNf4Integers[code];
  if (format == kFormatFp4) return kFp4Integers[code];
  return format == kFormatInt8 ? static_cast<int8_t>(code) : code;
}

// The sum of the integers of elements begin .. end of a row.
int32_t sum_of(uint32_t format, const PlainRow& plain, const int32_t* places, int64_t begin,
               int64_t end) {
  int32_t sum = 0;
  int64_t i = begin;
  if (!places && format == kFormatInt8) {
    for (; i < end; ++i) sum += static_cast<int8_t>(plain.codes[i]);
  } else if (!places && format == kFormatInt4 && begin % 2 == 0) {
    for (; i + 1 < end; i += 2) sum += (plain.codes[i / 2] & 15) + (plain.codes[i / 2] >> 4);
  }
  for (; i < end; ++i) sum += integer_value(format, plain.at(places ? places[i] : i));
  return sum;
}

// Fills one strip; returns true if it has fp8 codes for NaN or infinity.
bool pack_strip(const PackedHeader& header, const WoqLayout& at, const Source& from, int64_t strip,
                char* to) {
  std::memset(to, 0, static_cast<size_t>(at.strip_bytes));
  const int64_t first = strip * kStrip, k = header.k, groups = at.groups;
  const int64_t size = woq_scale_bytes(header.scale_type);
  if (header.scale_columns == 1) {
    const int64_t row = std::min(first / 128, (header.n + 127) / 128 - 1);
    std::memcpy(to + at.scales, from.scales + row * groups * size,
                static_cast<size_t>(groups * size));
  }
  const int64_t valid = std::clamp<int64_t>(header.n - first, 0, kStrip);
  if (valid == 0) return false;
  const auto move = [&](const char* plain, int64_t offset, int64_t bytes) {
    move_group_bytes<true>(const_cast<char*>(plain) + first * groups * bytes, to + offset, valid,
                           groups, bytes);
  };
  if (header.scale_columns != 1) move(from.scales, at.scales, size);
  if (header.zero_kind) move(from.zeros, at.zeros, woq_zero_bytes(header.zero_kind));
  auto* sums = header.order == kOrderVnni ? reinterpret_cast<int32_t*>(to + at.sums) : nullptr;
  const int64_t columns = woq_code_columns(header.format, k);
  const bool nibbles = woq_is_nibble(header.format);
  const uint8_t* codes = from.codes + first * columns;
  auto* weights = reinterpret_cast<uint8_t*>(to + at.weights);
  // Whole blocks of codes that stay in their order are words; what is left goes one by one.
  const int64_t block_k = woq_block_k(header.format), blocks = from.places ? 0 : k / block_k;
  BlockOrder(header, false).move<true>(codes, columns, weights, valid, blocks);
  for (int64_t c = 0; c < valid; ++c) {
    const PlainRow plain{codes + c * columns, nibbles};
    const PackedRow<uint8_t> packed(weights, c, header);
    for (int64_t i = blocks * block_k; i < k; ++i)
      packed.put(i, plain.at(from.places ? from.places[i] : i));
    for (int64_t g = 0; sums && g < groups; ++g) {
      int32_t zero = header.format == kFormatInt4 ? 8 : 0;
      if (header.zero_kind) zero = static_cast<int8_t>(from.zeros[(first + c) * groups + g]);
      const int64_t begin = g * header.group, end = std::min(begin + header.group, k);
      const int32_t sum = sum_of(header.format, plain, from.places, begin, end);
      sums[g * kStrip + c] = sum - zero * static_cast<int32_t>(end - begin);
    }
  }
  if (header.format < kFormatFp8E4M3) return false;
  const int least_special = header.format == kFormatFp8E4M3 ? 0x7f : 0x7c;
  int largest = 0;
  for (int64_t i = 0; i < valid * columns; ++i) largest = std::max(largest, codes[i] & 0x7f);
  return largest >= least_special;
}

Tensor pack(const Tensor& qweight, const Tensor& scales, const OptionalTensor& zeros,
            std::string format, int64_t in_features, int64_t group_size,
            const OptionalTensor& g_idx, std::string order) {
  PackedHeader header{};
  header.magic = kPackedMagic;
  header.version = kPackedVersion;
  header.panel = static_cast<uint32_t>(kPackedPanel);
  header.format = parse_woq_format(kOp, format);
  header.order = parse_woq_order(kOp, order, header.format);
  IPEX_CHECK(in_features > 0, kOp, ": in_features must be positive, got ", in_features);
  header.k = in_features;
  header.group = check_group_size(kOp, group_size, in_features);
  check_parts(qweight, scales, zeros, group_size, g_idx, &header);

  const Tensor plain = as_contiguous(qweight), plain_scales = as_contiguous(scales);
  Tensor plain_zeros;
  if (zeros) plain_zeros = as_contiguous(*zeros);
  std::vector<int32_t> places;
  if (g_idx) {
    const Tensor groups = as_contiguous(*g_idx);
    places =
        sort_by_group(static_cast<const int32_t*>(groups.const_data_ptr()), header.k, header.group);
  }
  const Source from{static_cast<const uint8_t*>(plain.const_data_ptr()),
                    static_cast<const char*>(plain_scales.const_data_ptr()),
                    zeros ? static_cast<const char*>(plain_zeros.const_data_ptr()) : nullptr,
                    g_idx ? places.data() : nullptr};
  const WoqLayout at = woq_layout(header);
  Tensor packed = arena::allocate(at.bytes);
  char* to = static_cast<char*>(packed.mutable_data_ptr());
  if (g_idx) {
    std::memset(to + at.permutation, 0, static_cast<size_t>(at.first_strip - at.permutation));
    std::memcpy(to + at.permutation, places.data(), places.size() * sizeof(int32_t));
  }
  std::atomic<bool> special{false};
  // In parallel over panels, as woq_linear with few rows: the thread that will read a panel is the
  // one that touches its memory first.
  parallel_for(at.strips / 2, 1, [&](int64_t begin, int64_t end) {
    bool found = false;
    for (int64_t s = 2 * begin; s < 2 * end; ++s)
      found |= pack_strip(header, at, from, s, to + at.first_strip + s * at.strip_bytes);
    if (found) special = true;
  });
  if (special) header.flags |= kFlagSpecial;
  std::memcpy(to, &header, sizeof(header));
  return packed;
}

}  // namespace
}  // namespace ipex

STABLE_TORCH_LIBRARY_IMPL(ipex, CPU, m) { IPEX_IMPL(m, "pack_woq_weight", ipex::pack); }
