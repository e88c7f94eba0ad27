// SPDX-License-Identifier: Apache-2.0
#include "ipex/kernel/epilogue.h"
#include "ipex/kernel/quant.h"
#include "woq_linear/woq_int8_few.h"
#include "woq_linear/woq_int8_kernel.h"
#include "woq_linear/woq_int8_many.h"

namespace ipex {
namespace {

template <class T>
const T* row_of(const WoqInt8Args& args, int64_t row) {
  return static_cast<const T*>(args.x) + row * args.x_stride;
}

int64_t chunk_length(const WoqInt8Args& args, int64_t chunk) {
  const int64_t left = args.k - chunk * args.chunk;
  return left < args.chunk ? left : args.chunk;
}

template <class T>
Range activation_range(const T* x, int64_t n, bool symmetric) {
  if (!symmetric) return range_of(x, n);
  const float most = absolute_maximum(x, n);
  return {-most, most};
}

Quantizer quantizer_of(Range range, bool symmetric) {
  Quantizer q = symmetric ? symmetric_quantizer(range.high) : asymmetric_quantizer(range);
  if (symmetric) q.zero = 128;
  // The codes do not tell then.
  if (!q.finite) q.scale = __builtin_nanf("");
  return q;
}

template <class T>
void ranges(const WoqInt8Args& args, int64_t row_begin, int64_t row_end, float* ends) {
  const int64_t blocks = args.by_chunk ? args.chunks : 1;
  for (int64_t r = row_begin; r < row_end; ++r)
    for (int64_t b = 0; b < blocks; ++b) {
      const int64_t n = args.by_chunk ? chunk_length(args, b) : args.k;
      const Range range = activation_range(row_of<T>(args, r) + b * args.chunk, n, args.symmetric);
      ends[2 * (r * blocks + b)] = range.low;
      ends[2 * (r * blocks + b) + 1] = range.high;
    }
}

int32_t sum_codes(const uint8_t* codes, int64_t n) {
  int32_t sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += codes[i];
  return sum;
}

template <class T>
void prepare_int8(const WoqInt8Args& args, int64_t row_begin, int64_t row_end) {
  for (int64_t r = row_begin; r < row_end; ++r) {
    const T* x = row_of<T>(args, r);
    uint8_t* codes = args.codes + r * args.codes_stride;
    Quantizer by;
    for (int64_t i = 0; i < args.chunks; ++i) {
      const int64_t begin = i * args.chunk, n = chunk_length(args, i);
      if (i == 0 || args.by_chunk) {
        const float* ends = args.ends ? args.ends + 2 * i : nullptr;
        const Range range =
            ends ? Range{ends[0], ends[1]}
                 : activation_range(x + begin, args.by_chunk ? n : args.k, args.symmetric);
        by = quantizer_of(range, args.symmetric);
      }
      quantize_row<true>(x + begin, n, by, codes + begin);
      const int64_t place = r * args.chunks + i;
      const int32_t less = args.few ? 128 : 0;
      args.scales[place] = by.scale;
      args.zeros[place] = by.zero - less;
      args.sums[place] = sum_codes(codes + begin, n) - less * static_cast<int32_t>(n);
    }
    if (args.few)
      for (int64_t i = 0; i < args.k; ++i) codes[i] ^= 0x80;
    std::memset(codes + args.k, 0, static_cast<size_t>(args.codes_stride - args.k));
  }
}

template <class T>
void few(const WoqInt8Args& args, int64_t rows, int64_t panel_begin, int64_t panel_end) {
  alignas(64) float c[4 * kInt8Columns];
  const ByteTable table(integer_table(args.header.format), 128);
  const int64_t columns = args.epilogue.gated ? kPanel / 2 : kPanel;  // of y, for a panel
  for (int64_t p = panel_begin; p < panel_end; p += 2) {
    const bool two = p + 1 < panel_end;
    const int64_t column = p * columns;
    const int64_t width = (two ? 2 : 1) * columns;
    const int64_t count = args.n - column < width ? args.n - column : width;
    const Finisher<T> finisher(args.epilogue, column, count);
    // The last panel alone is computed twice: rarer than a kernel for it is worth.
    const char* first = args.packed + args.at.first_strip + 2 * p * args.at.strip_bytes;
    const char* strips[4];
    for (int s = 0; s < 4; ++s) strips[s] = first + (two ? s : s % 2) * args.at.strip_bytes;
    by_tiles(rows, 4, 1, [&](int64_t r, int64_t n, int64_t tile, int64_t tiles) {
      few_rows_int8(args, table, strips, r, n, FollowingStrips::of(args.at, tile, tiles), c);
      finisher.rows(c, kInt8Columns, n, r, static_cast<T*>(args.y) + r * args.n + column, args.n);
    });
  }
}

template <class T>
void many(const WoqInt8Args& args, char* scratch, int64_t row_begin, int64_t row_end,
          int64_t panel_begin, int64_t panel_end) {
  ManyRows<T> rows(args, scratch, row_begin, row_end);
  for (int64_t p = panel_begin; p < panel_end; p += 2) rows.panels(p, p + 1 < panel_end);
}

}  // namespace
}  // namespace ipex

#define IPEX_DEFINE_WOQ_INT8(suffix, T)                                                       \
  void ipex_k_woq_int8_range_##suffix(const ipex::WoqInt8Args* args, int64_t row_begin,       \
                                      int64_t row_end, float* ends) {                         \
    ipex::ranges<T>(*args, row_begin, row_end, ends);                                         \
  }                                                                                           \
  void ipex_k_woq_int8_prepare_##suffix(const ipex::WoqInt8Args* args, int64_t row_begin,     \
                                        int64_t row_end) {                                    \
    ipex::prepare_int8<T>(*args, row_begin, row_end);                                         \
  }                                                                                           \
  void ipex_k_woq_int8_few_##suffix(const ipex::WoqInt8Args* args, int64_t rows,              \
                                    int64_t panel_begin, int64_t panel_end) {                 \
    ipex::few<T>(*args, rows, panel_begin, panel_end);                                        \
  }                                                                                           \
  void ipex_k_woq_int8_many_##suffix(const ipex::WoqInt8Args* args, char* scratch,            \
                                     int64_t row_begin, int64_t row_end, int64_t panel_begin, \
                                     int64_t panel_end) {                                     \
    ipex::many<T>(*args, scratch, row_begin, row_end, panel_begin, panel_end);                \
  }
IPEX_DEFINE_WOQ_INT8(f32, float)
IPEX_DEFINE_WOQ_INT8(bf16, ipex::BFloat16)
IPEX_DEFINE_WOQ_INT8(f16, ipex::Half)
