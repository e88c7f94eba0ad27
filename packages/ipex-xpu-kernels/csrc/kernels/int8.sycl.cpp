// SPDX-License-Identifier: Apache-2.0
// Products of 8-bit codes with packed int8 weights (docs of pack_int8_weight): panels of 32
// columns, of which four neighbors along the sum make a word. An item owns a column and reads words
// next to the words of its neighbors.
#include "names.h"

constexpr int kPanel = 32;
constexpr int kTileRows = 8;

// y[m, n] = (x[m, :] - zero) . weight[n, :] * scale * weight_scale in float32, of exact sums. Rows
// of x are whole words. What has one number for all rows or columns has the step 0.
template <typename T>
IPEX_KERNEL(2)
void int8_product(const T* x, const int* sums, const unsigned int* weights, float* y,
                  const float* x_scales, const int* x_zeros, const float* weight_scales, long m,
                  long n, long words, long scale_step, long weight_step) {
  const auto item = sycl::ext::oneapi::this_work_item::get_nd_item<2>();
  const long first = static_cast<long>(item.get_group(0)) * kTileRows;
  const unsigned long lane = item.get_local_id(1);
  const unsigned long panel = item.get_group(1);
  const unsigned long column = panel * kPanel + lane;
  const unsigned int* const own = weights + panel * static_cast<unsigned long>(words) * kPanel;
  const unsigned int* row[kTileRows];
#pragma unroll
  for (int r = 0; r < kTileRows; ++r)
    row[r] = reinterpret_cast<const unsigned int*>(x) + (first + r < m ? first + r : m - 1) * words;
  int total[kTileRows] = {};
  for (long w = 0; w < words; ++w) {
    const unsigned int weight = own[static_cast<unsigned long>(w) * kPanel + lane];
#pragma unroll
    for (int r = 0; r < kTileRows; ++r) {
      const unsigned int codes = row[r][w];
#pragma unroll
      for (int j = 0; j < 32; j += 8)
        total[r] += static_cast<T>(codes >> j) * static_cast<signed char>(weight >> j);
    }
  }
  if (column >= static_cast<unsigned long>(n)) return;
  const float scale = weight_scales[column * static_cast<unsigned long>(weight_step)];
#pragma unroll
  for (int r = 0; r < kTileRows; ++r) {
    if (first + r >= m) break;
    const long at = (first + r) * scale_step;
    const long shift = x_zeros != nullptr ? static_cast<long>(x_zeros[at]) * sums[column] : 0;
    y[(first + r) * n + column] = static_cast<float>(total[r] - shift) * (x_scales[at] * scale);
  }
}

// The codes of x, with one scale and zero point (null: 0) or one for each row. Numbers that are not
// numbers, and all of a scale that is not finite, get the code of 0.
template <typename T, typename C>
IPEX_KERNEL(2)
void int8_codes(const T* x, C* y, const float* scales, const int* zeros, unsigned long columns,
                long step) {
  const auto item = sycl::ext::oneapi::this_work_item::get_nd_item<2>();
  const unsigned long column = item.get_global_id(1);
  const long at = static_cast<long>(item.get_global_id(0)) * step;
  const unsigned long i = item.get_global_id(0) * columns + column;
  if (column >= columns) return;
  constexpr bool kSigned = std::is_same_v<C, signed char>;
  const float scale = scales[at];
  float value = sycl::rint(load(x, i) * (1.f / scale));
  if (value != value || !(sycl::fabs(scale) < __builtin_inff())) value = 0.f;
  if (zeros != nullptr) value += static_cast<float>(zeros[at]);
  y[i] = static_cast<C>(static_cast<int>(
      sycl::fmin(sycl::fmax(value, kSigned ? -128.f : 0.f), kSigned ? 127.f : 255.f)));
}

#define CODES(T)                                                                                 \
  template void int8_codes<T, signed char>(const T*, signed char*, const float*, const int*,     \
                                           unsigned long, long);                                 \
  template void int8_codes<T, unsigned char>(const T*, unsigned char*, const float*, const int*, \
                                             unsigned long, long);
CODES(float)
CODES(half)
CODES(bf16)

#define INT8(T)                                                                                  \
  template void int8_product<T>(const T*, const int*, const unsigned int*, float*, const float*, \
                                const int*, const float*, long, long, long, long, long);
INT8(signed char)
INT8(unsigned char)
