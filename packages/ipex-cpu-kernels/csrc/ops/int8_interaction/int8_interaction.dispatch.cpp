// SPDX-License-Identifier: Apache-2.0
// The products of all pairs of N short vectors of codes, sample by sample: a matrix product of the
// vectors, with 128 added, and the same vectors as panels, of which half is used.
#include "int8_interaction.h"

#include <emmintrin.h>

#include "ipex/kernel/gemm_int8.h"
#include "ipex/kernel/quant.h"

namespace ipex {
namespace {

constexpr int64_t kWidth = 2 * kPanel;

// Codes of one vector with 128 added, and 0 behind them.
template <class T>
IPEX_INLINE void read_vector(const Int8InteractionArgs& args, int64_t i, int64_t sample,
                             int64_t stride, uint8_t* to) {
  const int64_t at = sample * args.strides[i];
  if (args.codes) {
    const auto* from = static_cast<const uint8_t*>(args.inputs[i]) + at;
    for (int64_t d = 0; d < args.dim; ++d) to[d] = from[d] ^ 0x80;
  } else {
    Quantizer by;
    by.inverse = 1.0f / args.scales[i];
    by.zero = 128;
    quantize_row<true, true>(static_cast<const T*>(args.inputs[i]) + at, args.dim, by, to);
  }
  std::memset(to + args.dim, 0, static_cast<size_t>(stride - args.dim));
}

// Sum of the codes of a vector, as they are without 128.
IPEX_INLINE int32_t sum_of(const uint8_t* q, int64_t dim) {
  __m128i sum = _mm_setzero_si128();
  for (int64_t i = 0; i < dim; i += 16)
    sum = _mm_add_epi64(sum, _mm_sad_epu8(_mm_load_si128(reinterpret_cast<const __m128i*>(q + i)),
                                          _mm_setzero_si128()));
  const int32_t all = _mm_cvtsi128_si32(_mm_add_epi64(sum, _mm_srli_si128(sum, 8)));
  return all - 128 * static_cast<int32_t>(dim);
}

IPEX_INLINE void pack_vector(const uint8_t* codes, int64_t dim, int64_t padded, int64_t j,
                             int8_t* panels) {
  int8_t* to = panels + j / kPanel * kPanel * padded + 4 * (j % kPanel);
  for (int64_t d = 0; d < dim; d += 4) {
    uint32_t four;
    std::memcpy(&four, codes + d, sizeof(four));
    four ^= 0x80808080u;
    if (dim - d < 4) four &= (1u << 8 * (dim - d)) - 1;
    std::memcpy(to + d * kPanel, &four, sizeof(four));
  }
}

template <class T>
IPEX_INLINE void write_row(const Int8InteractionArgs& args, const float* row, int64_t width,
                           int64_t sample) {
  if (args.to_codes) {
    Quantizer by;
    by.inverse = 1.0f / args.out_scale;
    by.zero = args.out_zero;
    auto* to = static_cast<uint8_t*>(args.out) + sample * width;
    args.is_signed ? quantize_row<false, true>(row, width, by, to)
                   : quantize_row<true, true>(row, width, by, to);
    return;
  }
  T* to = static_cast<T*>(args.out) + sample * width;
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes) store(to + i, loadu(row + i));
  if (i < width) store_n(to + i, loadu_n(row + i, width - i), width - i);
}

template <class T>
IPEX_INLINE void run(const Int8InteractionArgs& args, int64_t begin, int64_t end, char* scratch) {
  const int64_t count = args.count, dim = args.dim, padded = int8_interaction_depth(dim);
  const int64_t stride = int8_interaction_stride(dim), width = dim + count * (count - 1) / 2;
  const int64_t columns = (count + kPanel - 1) / kPanel * kPanel;
  auto* codes = reinterpret_cast<uint8_t*>(scratch);
  auto* panels = reinterpret_cast<int8_t*>(codes + count * stride);
  auto* sums = reinterpret_cast<int32_t*>(panels + columns * padded);
  auto* row = reinterpret_cast<float*>(sums + columns);
  std::memset(panels, 0, static_cast<size_t>(columns * padded));
  std::memset(sums, 0, static_cast<size_t>(4 * columns));
  alignas(64) int32_t acc[kRowStep8 * kWidth];
  TileScope scope;
  for (int64_t sample = begin; sample < end; ++sample) {
    for (int64_t i = 0; i < count; ++i) {
      uint8_t* q = codes + i * stride;
      read_vector<T>(args, i, sample, stride, q);
      sums[i] = sum_of(q, dim);
      pack_vector(q, dim, padded, i, panels);
    }
    for (int64_t d = 0; d < dim; ++d) row[d] = static_cast<float>(codes[d] - 128) * args.scales[0];
    for (int64_t first = 0; first < count; first += kWidth) {
      const int8_t* p0 = panels + first * padded;
      const int8_t* p1 = first + kPanel < columns ? p0 + kPanel * padded : nullptr;
      for (int64_t i = first + 1; i < count; i += kRowStep8) {
        const int64_t rows = count - i < kRowStep8 ? count - i : kRowStep8;
        multiply8(scope, codes + i * stride, stride, rows, p0, p1, padded, acc, kWidth, false);
        for (int64_t r = 0; r < rows; ++r) {
          const int64_t all = i + r - first, n = all < kWidth ? all : kWidth;
          const float scale = args.scales[i + r];
          const int32_t* from = acc + r * kWidth;
          float* to = row + dim + (i + r) * (i + r - 1) / 2 + first;
          for (int64_t j = 0; j < n; ++j)
            to[j] = static_cast<float>(from[j] - 128 * sums[first + j]) *
                    (scale * args.scales[first + j]);
        }
      }
    }
    write_row<T>(args, row, width, sample);
  }
}

}  // namespace
}  // namespace ipex

#define IPEX_DEFINE_INT8_INTERACTION(suffix, T)                                               \
  void ipex_k_int8_interaction_##suffix(const ipex::Int8InteractionArgs* args, int64_t begin, \
                                        int64_t end, char* scratch) {                         \
    ipex::run<T>(*args, begin, end, scratch);                                                 \
  }
IPEX_DEFINE_INT8_INTERACTION(f32, float)
IPEX_DEFINE_INT8_INTERACTION(bf16, ipex::BFloat16)
IPEX_DEFINE_INT8_INTERACTION(f16, ipex::Half)
