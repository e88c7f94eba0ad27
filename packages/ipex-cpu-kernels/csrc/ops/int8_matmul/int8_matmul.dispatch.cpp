// SPDX-License-Identifier: Apache-2.0
// Both factors are quantized on the way in: rows of a to uint8, columns of b to int8 (codes less
// 128) in the panels of gemm_int8.h.
//
// With a' = a - az, b' = b - bz the sum of a'b' is  ab - az * sum(b) + (K az - sum(a)) bz. For
// K <= 32768 no partial sum of this leaves int32.
#include "int8_matmul.h"

#include <emmintrin.h>

#include "ipex/kernel/gemm_int8.h"
#include "ipex/kernel/quant.h"

namespace ipex {
namespace {

constexpr int64_t kWidth = 2 * kPanel;

// Codes of n numbers. Whole blocks only are fast in quantize_row, so the rest is filled up.
template <class T>
IPEX_INLINE void quantize_line(const T* x, int64_t n, const Quantizer& by, uint8_t* q) {
  constexpr int64_t kBlock = 4 * kLanes;
  const int64_t whole = n / kBlock * kBlock, rest = n - whole;
  quantize_row<true, true>(x, whole, by, q);
  if (rest == 0) return;
  alignas(64) T last[kBlock] = {};
  alignas(64) uint8_t codes[kBlock];
  std::memcpy(last, x + whole, static_cast<size_t>(rest) * sizeof(T));
  quantize_row<true, true>(last, kBlock, by, codes);
  std::memcpy(q + whole, codes, static_cast<size_t>(rest));
}

// Sum of n codes; what follows them up to a multiple of 64 is 0.
IPEX_INLINE int32_t sum_of(const uint8_t* q, int64_t n) {
  __m128i sum = _mm_setzero_si128();
  for (int64_t i = 0; i < n; i += 16)
    sum = _mm_add_epi64(sum, _mm_sad_epu8(_mm_load_si128(reinterpret_cast<const __m128i*>(q + i)),
                                          _mm_setzero_si128()));
  return _mm_cvtsi128_si32(_mm_add_epi64(sum, _mm_srli_si128(sum, 8)));
}

IPEX_INLINE __m128i load_signed(const uint8_t* p) {
  return _mm_xor_si128(_mm_load_si128(reinterpret_cast<const __m128i*>(p)), _mm_set1_epi8(-128));
}

// Four rows of 32 codes side by side, as a panel has them.
IPEX_INLINE void interleave_rows(const uint8_t (&rows)[4][kPanel], int8_t* to) {
#pragma GCC unroll 2
  for (int64_t half = 0; half < kPanel; half += 16) {
    const __m128i r0 = load_signed(rows[0] + half), r1 = load_signed(rows[1] + half);
    const __m128i r2 = load_signed(rows[2] + half), r3 = load_signed(rows[3] + half);
    const __m128i a = _mm_unpacklo_epi8(r0, r1), b = _mm_unpacklo_epi8(r2, r3);
    const __m128i c = _mm_unpackhi_epi8(r0, r1), d = _mm_unpackhi_epi8(r2, r3);
    auto* p = reinterpret_cast<__m128i*>(to + 4 * half);
    _mm_store_si128(p, _mm_unpacklo_epi16(a, b));
    _mm_store_si128(p + 1, _mm_unpackhi_epi16(a, b));
    _mm_store_si128(p + 2, _mm_unpacklo_epi16(c, d));
    _mm_store_si128(p + 3, _mm_unpackhi_epi16(c, d));
  }
}

// One panel of b. Columns behind n are not read and get any numbers; rows behind k are 0.
template <class T>
void pack_rows(const Int8MatmulArgs& args, int64_t column, const Quantizer& by, int8_t* panel) {
  const T* from = static_cast<const T*>(args.b) + column;
  const int64_t columns = args.n - column < kPanel ? args.n - column : kPanel;
  alignas(64) uint8_t rows[4][kPanel];
  std::memset(rows, 0, sizeof(rows));
  for (int64_t i = 0; i < args.k; i += 4) {
    const int64_t count = args.k - i < 4 ? args.k - i : 4;
    if (columns == kPanel && count == 4) {
      // Two rows make a block of quantize_row where registers are longest.
#pragma GCC unroll 2
      for (int64_t r = 0; r < 4; r += 2) {
        alignas(64) T pair[2 * kPanel];
        const T* at = from + (i + r) * args.b_stride;
        std::memcpy(pair, at, sizeof(T) * kPanel);
        std::memcpy(pair + kPanel, at + args.b_stride, sizeof(T) * kPanel);
        quantize_row<true, true>(pair, 2 * kPanel, by, rows[r]);
      }
    } else {
      for (int64_t r = 0; r < 4; ++r) {
        if (r < count)
          quantize_line(from + (i + r) * args.b_stride, columns, by, rows[r]);
        else
          std::memset(rows[r], 128, kPanel);  // 0 in the panel
      }
    }
    interleave_rows(rows, panel + i * kPanel);
  }
}

template <class T>
void pack_columns(const Int8MatmulArgs& args, int64_t column, const Quantizer& by, int8_t* panel) {
  constexpr int64_t kPiece = 512;
  const int64_t columns = args.n - column < kPanel ? args.n - column : kPanel;
  alignas(64) uint8_t codes[kPiece];
  if (columns < kPanel) std::memset(panel, 0, static_cast<size_t>((args.k + 3) / 4 * 4 * kPanel));
  for (int64_t j = 0; j < columns; ++j) {
    const T* from = static_cast<const T*>(args.b) + (column + j) * args.b_stride;
    for (int64_t first = 0; first < args.k; first += kPiece) {
      const int64_t n = args.k - first < kPiece ? args.k - first : kPiece;
      quantize_line(from + first, n, by, codes);
      for (int64_t i = n; i % 4; ++i) codes[i] = 128;  // 0 in the panel
      for (int64_t i = 0; i < n; i += 4) {
        uint32_t four;
        std::memcpy(&four, codes + i, sizeof(four));
        four ^= 0x80808080u;
        std::memcpy(panel + (first + i) * kPanel + 4 * j, &four, sizeof(four));
      }
    }
  }
}

// One row of sums as numbers.
template <class T>
IPEX_INLINE void scale_row(const int32_t* acc, const int32_t* sums, int32_t a_zero, int32_t shift,
                           float scale, int64_t count, T* y) {
  const i32v zero_code = iset1(a_zero), more = iset1(shift);
  const f32v by = set1(scale);
  const auto at = [&](int64_t i) IPEX_LAMBDA {
    return to_float(load_ints(acc + i) - zero_code * load_ints(sums + i) + more) * by;
  };
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(y + i, at(i));
  if (i < count) store_n(y + i, at(i), count - i);
}

Quantizer quantizer_of(float scale, int32_t zero) {
  Quantizer by;
  by.inverse = 1.0f / scale;
  by.zero = zero;
  return by;
}

template <class T>
IPEX_INLINE void run(const Int8MatmulArgs& args, int64_t row_begin, int64_t row_end,
                     char* scratch) {
  const int64_t rows = row_end - row_begin, k = args.k, padded = (k + 3) / 4 * 4;
  const int64_t stride = int8_matmul_stride(k), panels = (args.n + kPanel - 1) / kPanel;
  auto* codes = reinterpret_cast<uint8_t*>(scratch);
  uint8_t* ones = codes + rows * stride;
  auto* packed = reinterpret_cast<int8_t*>(ones + stride);
  const int64_t group = panels < kInt8MatmulPanels ? panels : kInt8MatmulPanels;
  auto* shifts = reinterpret_cast<int32_t*>(packed + group * kPanel * padded);
  const Quantizer by_a = quantizer_of(args.a_scale, args.a_zero);
  const Quantizer by_b = quantizer_of(args.b_scale, args.b_zero);
  const int32_t b_zero = args.b_zero - 128;
  for (int64_t r = 0; r < rows; ++r) {
    uint8_t* q = codes + r * stride;
    quantize_line(static_cast<const T*>(args.a) + (row_begin + r) * args.a_stride, k, by_a, q);
    std::memset(q + k, 0, static_cast<size_t>(stride - k));
    shifts[r] = b_zero * (static_cast<int32_t>(k) * args.a_zero - sum_of(q, k));
  }
  std::memset(ones, 1, static_cast<size_t>(stride));
  const float scale = args.a_scale * args.b_scale;
  alignas(64) int32_t acc[kRowStep8 * kWidth], sums[kWidth];
  TileScope scope;
  for (int64_t first = 0; first < panels; first += group) {
    const int64_t last = panels < first + group ? panels : first + group;
    for (int64_t p = first; p < last; ++p) {
      int8_t* panel = packed + (p - first) * kPanel * padded;
      args.by_column ? pack_columns<T>(args, p * kPanel, by_b, panel)
                     : pack_rows<T>(args, p * kPanel, by_b, panel);
    }
    for (int64_t p = first; p < last; p += 2) {
      const int8_t* p0 = packed + (p - first) * kPanel * padded;
      const int8_t* p1 = p + 1 < last ? p0 + kPanel * padded : nullptr;
      const int64_t column = p * kPanel, most = (p1 ? 2 : 1) * kPanel;
      const int64_t count = args.n - column < most ? args.n - column : most;
      multiply8(scope, ones, stride, 1, p0, p1, padded, sums, kWidth, false);
      for (int64_t r = 0; r < rows; r += kRowStep8) {
        const int64_t step = rows - r < kRowStep8 ? rows - r : kRowStep8;
        multiply8(scope, codes + r * stride, stride, step, p0, p1, padded, acc, kWidth, false);
        for (int64_t i = 0; i < step; ++i)
          scale_row(acc + i * kWidth, sums, args.a_zero, shifts[r + i], scale, count,
                    static_cast<T*>(args.y) + (row_begin + r + i) * args.n + column);
      }
    }
  }
}

}  // namespace
}  // namespace ipex

#define IPEX_DEFINE_INT8_MATMUL(suffix, T)                                              \
  void ipex_k_int8_matmul_##suffix(const ipex::Int8MatmulArgs* args, int64_t row_begin, \
                                   int64_t row_end, char* scratch) {                    \
    ipex::run<T>(*args, row_begin, row_end, scratch);                                   \
  }
IPEX_DEFINE_INT8_MATMUL(f32, float)
IPEX_DEFINE_INT8_MATMUL(bf16, ipex::BFloat16)
IPEX_DEFINE_INT8_MATMUL(f16, ipex::Half)
