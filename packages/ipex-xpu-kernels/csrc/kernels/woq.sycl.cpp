// SPDX-License-Identifier: Apache-2.0
// Products with packed weights of 4 or 8 bits in the order for float activations (docs of
// pack_woq_weight). A strip holds 16 columns, whose codes lie side by side: an item owns a column,
// reads words next to the words of its neighbors, and multiplies kRows rows of x with each. On a
// GPU several items of a group share a column, each with a part of its codes.
#include "names.h"

constexpr unsigned long kStrip = 16;
constexpr unsigned long kMostParts = 16;  // items that share a column
sycl::ext::oneapi::experimental::work_group_static<float[kMostParts * 8 * kStrip]> part_tile;

inline float number(const unsigned char* p, unsigned long i, int kind) {
  switch (kind) {
    case 0:
      return reinterpret_cast<const float*>(p)[i];
    case 1:
      return static_cast<float>(reinterpret_cast<const bf16*>(p)[i]);
    case 2:
      return static_cast<float>(reinterpret_cast<const half*>(p)[i]);
    case 4: {  // a power of two, by its exponent; the least is below the normal numbers
      const unsigned int exponent = p[i];
      return sycl::bit_cast<float>(exponent == 0     ? 0x00400000u
                                   : exponent == 255 ? 0x7fc00000u
                                                     : exponent << 23);
    }
    default:
      return static_cast<float>(reinterpret_cast<const signed char*>(p)[i]);
  }
}

// The values of the codes of a word, by k: as they stand in the table, or whole numbers.
template <bool kNibbles>
inline void unpack(unsigned int word, float zero, const float* table,
                   float (&value)[kNibbles ? 8 : 4]) {
  constexpr int kBits = kNibbles ? 4 : 8;
#pragma unroll
  for (int j = 0; j < 32 / kBits; ++j) {
    const unsigned int code = (word >> ((j % 2) * 16 + (j / 2) * kBits)) & ((1u << kBits) - 1);
    const float whole =
        kNibbles ? static_cast<float>(code) : static_cast<float>(static_cast<signed char>(code));
    value[j] = (table != nullptr ? table[code] : whole) - zero;
  }
}

// The numbers of a row of x that belong to a word.
template <typename T, int kCodes>
IPEX_INLINE inline void load_codes(const T* p, float (&out)[kCodes]) {
#ifdef IPEX_GPU
  using Words = unsigned int __attribute__((ext_vector_type(kCodes * sizeof(T) / 4)));
  const Words words = *reinterpret_cast<const Words*>(p);
#pragma unroll
  for (int j = 0; j < kCodes; ++j) {
    if constexpr (sizeof(T) == 4) {
      out[j] = sycl::bit_cast<float>(static_cast<unsigned int>(words[j]));
    } else {
      const auto bits = static_cast<unsigned short>(words[j / 2] >> (j % 2 * 16));
      out[j] = static_cast<float>(sycl::bit_cast<T>(bits));
    }
  }
#else
#pragma unroll
  for (int j = 0; j < kCodes; ++j) out[j] = load(p, j);
#endif
}

// y[m, n] = x[m, :] . weight[n, :] in float32. Rows of x hold numbers (zeros at the end) for all
// blocks of the weight. Kinds of scales and zeros: 0 float32, 1 bfloat16, 2 float16, 3 int8, 4
// powers of two, -1 none.
template <typename T, bool kNibbles, int kRows>
IPEX_INLINE inline void product(const T* x, const unsigned char* strips, const float* table,
                                float* y, long m, long n, long x_row, long blocks,
                                long blocks_of_group, long strip_bytes, long zero_offset,
                                long weight_offset, int scale_kind, int scale_columns,
                                int zero_kind) {
  constexpr int kCodes = kNibbles ? 8 : 4;
  const auto position = sycl::ext::oneapi::this_work_item::get_nd_item<2>();
  const unsigned long lane = position.get_local_id(1) % kStrip;
  const long part_index = static_cast<long>(position.get_local_id(1) / kStrip);
  const long parts = static_cast<long>(position.get_local_range(1) / kStrip);
  const long first = static_cast<long>(position.get_group(0)) * kRows;
  const unsigned long strip = position.get_group(1);
  const unsigned char* own = strips + strip * strip_bytes;
  const unsigned int* words = reinterpret_cast<const unsigned int*>(own + weight_offset);
  const T* row[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) row[r] = x + (first + r < m ? first + r : m - 1) * x_row;
  float sum[kRows] = {};
  const long chunk = (blocks + parts - 1) / parts;
  const long last = (part_index + 1) * chunk < blocks ? (part_index + 1) * chunk : blocks;
  for (long begin = part_index * chunk; begin < last;) {
    const unsigned long group = begin / blocks_of_group;
    const long whole = static_cast<long>(group + 1) * blocks_of_group;
    const long end = whole < last ? whole : last;
    const unsigned long at = scale_columns == 1 ? group : group * kStrip + lane;
    const float scale = number(own, at, scale_kind);
    const float zero = zero_kind >= 0 ? number(own + zero_offset, group * kStrip + lane, zero_kind)
                       : kNibbles && table == nullptr ? 8.f
                                                      : 0.f;
    float part[kRows] = {};
#ifdef IPEX_GPU
#pragma unroll 4
#endif
    for (long block = begin; block < end; ++block) {
      float value[kCodes];
      unpack<kNibbles>(words[block * kStrip + lane], zero, table, value);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        float factors[kCodes];
        load_codes<T, kCodes>(row[r] + block * kCodes, factors);
#pragma unroll
        for (int j = 0; j < kCodes; ++j) part[r] += value[j] * factors[j];
      }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) sum[r] += part[r] * scale;
    begin = end;
  }
  const unsigned long column = strip * kStrip + lane;
  if (parts > 1) {
    float* const of_parts = *&part_tile;
#pragma unroll
    for (int r = 0; r < kRows; ++r) of_parts[(part_index * kRows + r) * kStrip + lane] = sum[r];
    sycl::group_barrier(position.get_group());
    if (part_index != 0) return;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      for (long p = 1; p < parts; ++p) sum[r] += of_parts[(p * kRows + r) * kStrip + lane];
    }
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (first + r < m && column < static_cast<unsigned long>(n))
      y[(first + r) * n + column] = sum[r];
  }
}

template <typename T, bool kNibbles, int kRows>
IPEX_KERNEL(2)
void woq_product(const T* x, const unsigned char* strips, float* y, long m, long n, long x_row,
                 long blocks, long blocks_of_group, long strip_bytes, long zero_offset,
                 long weight_offset, int scale_kind, int scale_columns, int zero_kind) {
  product<T, kNibbles, kRows>(x, strips, nullptr, y, m, n, x_row, blocks, blocks_of_group,
                              strip_bytes, zero_offset, weight_offset, scale_kind, scale_columns,
                              zero_kind);
}

// Codes that stand for the numbers of a table.
template <typename T, bool kNibbles, int kRows>
IPEX_KERNEL(2)
void woq_table_product(const T* x, const unsigned char* strips, const float* table, float* y,
                       long m, long n, long x_row, long blocks, long blocks_of_group,
                       long strip_bytes, long zero_offset, long weight_offset, int scale_kind,
                       int scale_columns, int zero_kind) {
  product<T, kNibbles, kRows>(x, strips, table, y, m, n, x_row, blocks, blocks_of_group,
                              strip_bytes, zero_offset, weight_offset, scale_kind, scale_columns,
                              zero_kind);
}

#define WOQ_OF(T, nibbles, rows)                                                                  \
  template void woq_product<T, nibbles, rows>(const T*, const unsigned char*, float*, long, long, \
                                              long, long, long, long, long, long, int, int, int); \
  template void woq_table_product<T, nibbles, rows>(const T*, const unsigned char*, const float*, \
                                                    float*, long, long, long, long, long, long,   \
                                                    long, long, int, int, int);
#define WOQ(T)        \
  WOQ_OF(T, false, 1) \
  WOQ_OF(T, false, 8) \
  WOQ_OF(T, true, 1)  \
  WOQ_OF(T, true, 8)
WOQ(float)
WOQ(half)
WOQ(bf16)
