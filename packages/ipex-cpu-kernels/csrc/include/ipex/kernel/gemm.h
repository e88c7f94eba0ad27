// SPDX-License-Identifier: Apache-2.0
// Matrix product with a packed right-hand side: C[rows][columns] = A[rows][K] * W, C in float.
//
// W lies in panels of 32 columns (see ops/linear/packed.h): [K][32] for float and Half,
// [K/2][32][2] for BFloat16. One or two panels are multiplied at a time. Every level has one way
// per type: AMX tiles or VDPBF16PS for BFloat16 where they exist, float FMA with weights converted
// in registers everywhere else.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "ipex/kernel/gemm_sizes.h"
#include "ipex/kernel/vec.h"

namespace ipex {
namespace {

inline constexpr int kPanel = 32;

// Register tile of the vector kernels: kTileRows x (kTileVectors * kLanes) accumulators. AVX-512
// keeps 24 of its 32 registers as accumulators; the others have 16 registers and keep 12. A tile
// of four vectors reads whole cache lines of the weights in their order.
inline constexpr int kTileRows = kLanes == 16 ? 6 : 3;
inline constexpr int kTileVectors = 4;

// Whether many rows multiply copies of the panels: with 16 registers a tile of three rows reads the
// weights more often than L2 provides them. Six rows of 16 columns read half as much, from a copy
// where these columns lie side by side in L1. Zen 3, 128 rows: 0.85 of the peak, 0.65 before.
inline constexpr bool kCopies = kLanes < 16;

// Products of 16-bit numbers as floats, where no instruction multiplies them as they are.
template <class T>
inline constexpr bool kConverts = sizeof(T) == 2 && !(IPEX_HAVE_AVX512_BF16 && kIsBFloat16<T>);

// Whether many rows multiply weights that were converted before, or copied. A tile uses each number
// of the weights too seldom to convert it in two instructions, as BFloat16 takes, and Half on
// Intel's cores. Not where AMD's may be the processor: Zen 5 loses a tenth in Half.
template <class T>
inline constexpr bool kWidens =
    kCopies || (kConverts<T> && (!IPEX_HAVE_AVX512_BF16 || IPEX_HAVE_AMX));

// Rows that callers should pass at a time: a multiple of the tile height, small enough for C to
// stay in L1. More where all of them use what is converted once.
template <class T>
inline constexpr int kRowStep = kCopies      ? 192
                                : kWidens<T> ? 96
                                             : 24;
#if IPEX_HAVE_AMX
template <>
inline constexpr int kRowStep<BFloat16> = 32;
#endif

// Bytes that the weights of a product with few rows are fetched ahead of their use. Intel's cores
// need it to reach the rate of the memory (a third more on a 5th-generation Xeon); AMD's Zen 4
// loses a tenth by it and has no AMX.
inline constexpr int64_t kFetchAhead = 4096;

// Steps along K that weights in float are fetched into L1 ahead of their use: two panels are more
// than L1 holds, so each tile of rows reads them from L2 again. Cascade Lake: 5 to 10 % faster.
// Not where Zen 4 may be the processor, which loses by fetches.
inline constexpr int64_t kFetchSteps = kLanes == 16 && !IPEX_HAVE_AVX512_BF16 ? 8 : 0;

// Elements along K for which A is converted to float at a time, so that the copy stays in L1.
inline constexpr int64_t kDepth = 512;

// Where vector v of a group of columns starts in one or two panels.
template <class W>
IPEX_INLINE const W* column(const W* p0, const W* p1, int64_t vector, int64_t inner) {
  const int64_t at = vector * kLanes;
  return (at < kPanel ? p0 + at * inner : p1 + (at - kPanel) * inner);
}

template <int kRows, int kVectors>
IPEX_INLINE void load_tile(f32v (&acc)[kRows][kVectors], const float* c, int64_t ldc,
                           bool accumulate) {
#pragma GCC unroll 6
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v)
      acc[r][v] = accumulate ? load(c + r * ldc + v * kLanes) : zero();
}

template <int kRows, int kVectors>
IPEX_INLINE void store_tile(const f32v (&acc)[kRows][kVectors], float* c, int64_t ldc) {
#pragma GCC unroll 6
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) store(c + r * ldc + v * kLanes, acc[r][v]);
}

// With few rows the weights come from memory, which needs a hint on the cores that have AMX (see
// kFetchAhead).
template <int kRows>
IPEX_INLINE void fetch_ahead(const void* weights) {
  if constexpr (IPEX_HAVE_AMX && kRows <= 4)
    __builtin_prefetch(static_cast<const char*>(weights) + kFetchAhead);
}

// What is used kFetchSteps later.
template <int kRows, class W>
IPEX_INLINE void fetch_next(const W* weights) {
  if constexpr (kFetchSteps > 0 && sizeof(W) == 4 && kRows > 2) __builtin_prefetch(weights);
}

// The weights after the ones that tiles of rows multiply. The tiles fetch them into L2 bit by bit:
// otherwise the first tile would wait for the memory, which would rest while the others multiply.
class Following {
 public:
  // Nothing follows: what is there already is fetched.
  explicit Following(const void* there) : at_(static_cast<const char*>(there)) {}
  // The next pieces of two panels, `apart` elements from each other, for so many tiles of this one.
  template <class W>
  Following(const W* next, int64_t apart, int64_t tiles)
      : at_(reinterpret_cast<const char*>(next)),
        apart_(apart * int64_t{sizeof(W)}),
        stride_(kTileVectors * kLanes * (kIsBFloat16<W> ? 4 : int64_t{sizeof(W)}) / 2 / tiles) {}

  IPEX_INLINE void step() {
    __builtin_prefetch(at_, 0, 2);
    __builtin_prefetch(at_ + apart_, 0, 2);
    at_ += stride_;
  }

 private:
  const char* at_;
  int64_t apart_ = 0, stride_ = 0;
};

// A in float, W converted on the way; `first` is the first vector of the panels' columns.
template <int kRows, int kVectors, class W>
IPEX_INLINE void tile_fma(const float* a, int64_t lda, const W* p0, const W* p1, int first,
                          int64_t k, float* c, int64_t ldc, bool accumulate, Following& following) {
  f32v acc[kRows][kVectors];
  load_tile(acc, c, ldc, accumulate);
  const W* w[kVectors];
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) w[v] = column(p0, p1, first + v, 1);
  const auto step = [&](int64_t i, int64_t next) IPEX_LAMBDA {
    following.step();
    if constexpr (kLanes < 16 && sizeof(W) == 2) {
      // 12 sums and 4 converted vectors leave no register for x: one vector at a time.
      f32v x[kRows];
#pragma GCC unroll 6
      for (int r = 0; r < kRows; ++r) x[r] = set1(a[r * lda + i]);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        const f32v b = load(w[v] + i * kPanel);
#pragma GCC unroll 6
        for (int r = 0; r < kRows; ++r) acc[r][v] = fma(x[r], b, acc[r][v]);
      }
      return;
    }
    f32v b[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      b[v] = load(w[v] + i * kPanel);
      fetch_ahead<kRows>(w[v] + i * kPanel);
      fetch_next<kRows>(w[v] + next * kPanel);
    }
#pragma GCC unroll 6
    for (int r = 0; r < kRows; ++r) {
      const f32v x = set1(a[r * lda + i]);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) acc[r][v] = fma(x, b[v], acc[r][v]);
    }
  };
  int64_t i = 0;
  if constexpr (kFetchSteps > 0)
    for (; i + kFetchSteps < k; ++i) step(i, i + kFetchSteps);
  // The next tile of rows begins where this one did.
  for (int64_t next = 0; i < k; ++i, ++next) step(i, next);
  store_tile(acc, c, ldc);
}

// The same for pairs of bfloat16: a 32-bit word holds two of them, and a bfloat16 is the upper half
// of a float.
template <int kRows, int kVectors>
IPEX_INLINE void tile_fma(const float* a, int64_t lda, const BFloat16* p0, const BFloat16* p1,
                          int first, int64_t k, float* c, int64_t ldc, bool accumulate,
                          Following& following) {
  f32v acc[kRows][kVectors];
  load_tile(acc, c, ldc, accumulate);
  // One row has too few sums to hide the latency of two FMAs in a row, so each half has its own.
  constexpr bool kApart = kRows == 1;
  f32v apart[kVectors];
  if constexpr (kApart)
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) apart[v] = zero();
  const float* w[kVectors];
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v)
    w[v] = reinterpret_cast<const float*>(column(p0, p1, first + v, 2));
  for (int64_t i = 0; i < k; i += 2) {
    following.step();
    f32v x0[kRows], x1[kRows];
#pragma GCC unroll 6
    for (int r = 0; r < kRows; ++r) {
      x0[r] = set1(a[r * lda + i]);
      x1[r] = set1(a[r * lda + i + 1]);
    }
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      const f32v pair = load(w[v] + i / 2 * kPanel);
      const f32v even = as_float(as_int(pair) << 16), odd = clear_bits(pair, 0xffff);
#pragma GCC unroll 6
      for (int r = 0; r < kRows; ++r) {
        acc[r][v] = fma(x0[r], even, acc[r][v]);
        f32v& second = kApart ? apart[v] : acc[r][v];
        second = fma(x1[r], odd, second);
      }
    }
  }
  if constexpr (kApart)
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) acc[0][v] = acc[0][v] + apart[v];
  store_tile(acc, c, ldc);
}

// Rows of the next tile. The last two are of one size: a tile of a row or two waits for weights.
template <int kMost = kTileRows>
IPEX_INLINE int64_t rows_of_tile(int64_t left) {
  return left <= kMost ? left : left < 2 * kMost ? (left + 1) / 2 : kMost;
}

// Calls f(integral_constant) for the number of rows 1 .. kTileRows.
template <int kRows = kTileRows, class F>
IPEX_INLINE void with_rows(int64_t rows, const F& f) {
  if constexpr (kRows == 1) {
    f.template operator()<1>();
  } else {
    if (rows == kRows) {
      f.template operator()<kRows>();
    } else {
      with_rows<kRows - 1>(rows, f);
    }
  }
}

// All rows and all columns of one (p1 == nullptr) or two panels, A in float.
template <class W>
void panels_fma(const float* a, int64_t lda, int64_t rows, const W* p0, const W* p1, int64_t k,
                float* c, int64_t ldc, bool accumulate, Following* next = nullptr) {
  Following nothing(p0);
  Following& following = next ? *next : nothing;
  const int vectors = (p1 ? 2 : 1) * kPanel / static_cast<int>(kLanes);
  for (int64_t r = 0, n; r < rows; r += n) {
    n = rows_of_tile(rows - r);
    int v = 0;
    for (; v + kTileVectors <= vectors; v += kTileVectors)
      with_rows(n, [&]<int kRows>() IPEX_LAMBDA {
        tile_fma<kRows, kTileVectors>(a + r * lda, lda, p0, p1, v, k, c + r * ldc + v * kLanes, ldc,
                                      accumulate, following);
      });
    if constexpr (kLanes == 16) {  // one panel of two vectors
      for (; v < vectors; v += 2)
        with_rows(n, [&]<int kRows>() IPEX_LAMBDA {
          tile_fma<kRows, 2>(a + r * lda, lda, p0, p1, v, k, c + r * ldc + v * kLanes, ldc,
                             accumulate, following);
        });
    }
  }
}

// Copies rows of A as float, `k` elements each; an odd `k` gets a zero behind it for the pairs of
// bfloat16.
template <class T>
void convert_rows(const T* a, int64_t lda, int64_t rows, int64_t k, float* to,
                  int64_t to_stride = kDepth) {
  for (int64_t r = 0; r < rows; ++r) {
    const T* from = a + r * lda;
    float* row = to + r * to_stride;
    int64_t i = 0;
    for (; i + kLanes <= k; i += kLanes) store(row + i, load(from + i));
    if (i < k) store_n(row + i, load_n(from + i, k - i), k - i);
    if (k % 2) row[k] = 0.0f;
  }
}

// Rows from which W is converted or copied before, and the depth of a piece of it. A copy of what
// is float already pays off later; attention's 48 rows meet panels that L1 holds.
template <class T>
inline constexpr int64_t kWidenedRows = !kCopies         ? 4 * kTileRows
                                        : kIsBFloat16<T> ? kWideRows
                                                         : 64;
inline constexpr int64_t kWideDepth = kCopies ? 256 : 64;

// Columns that lie side by side in a piece of a panel in float. The piece is [k][32], or [2][k][16]
// where it is a copy.
inline constexpr int kWideColumns = kCopies ? 16 : kPanel;

// Where column `column` of step `i` lies in a piece of `k` steps.
IPEX_INLINE int64_t wide_place(int64_t column, int64_t i, int64_t k) {
  return (column / kWideColumns * k + i) * kWideColumns + column % kWideColumns;
}

// `k` steps of a panel in float; see kWideColumns.
template <class T>
void convert_panel(const T* p, int64_t k, float* to) {
  for (int64_t i = 0; i < k; ++i)
    for (int64_t v = 0; v < kPanel; v += kLanes)
      store(to + wide_place(v, i, k), load(p + i * kPanel + v));
}

inline void convert_panel(const BFloat16* p, int64_t k, float* to) {
  const auto* pairs = reinterpret_cast<const float*>(p);
  for (int64_t i = 0; i < k; i += 2)
    for (int64_t v = 0; v < kPanel; v += kLanes) {
      const f32v pair = load(pairs + i / 2 * kPanel + v);
      store(to + wide_place(v, i, k), as_float(as_int(pair) << 16));
      if (i + 1 < k) store(to + wide_place(v, i + 1, k), clear_bits(pair, 0xffff));
    }
}

// Calls f(d, depth, w0, w1) for pieces of one or two panels in float, from step d on.
template <class T, class F>
IPEX_INLINE void for_widened(const T* p0, const T* p1, int64_t k, const F& f) {
  alignas(64) float wide[2][kWideDepth * kPanel];
  for (int64_t d = 0; d == 0 || d < k; d += kWideDepth) {  // k = 0 gives zeros
    const int64_t depth = k - d < kWideDepth ? k - d : kWideDepth;
    convert_panel(p0 + d * kPanel, depth, wide[0]);
    if (p1) convert_panel(p1 + d * kPanel, depth, wide[1]);
    f(d, depth, wide[0], p1 ? wide[1] : nullptr);
  }
}

// A tile of kRows rows and kWideColumns columns of a copy, A in float.
template <int kRows>
IPEX_INLINE void tile_copied(const float* a, int64_t lda, const float* w, int64_t k, float* c,
                             int64_t ldc, bool accumulate) {
  constexpr int kVectors = kWideColumns / static_cast<int>(kLanes);
  f32v acc[kRows][kVectors];
  load_tile(acc, c, ldc, accumulate);
  // Two bases: an address is one of them and one or two times the stride, which no register holds.
  const float* lower = a + 3 * lda;
  for (int64_t i = 0; i < k; ++i, ++a, ++lower, w += kWideColumns) {
    f32v b[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) b[v] = load(w + v * kLanes);
#pragma GCC unroll 6
    for (int r = 0; r < kRows; ++r) {
      const f32v x = set1(r < 3 ? a[r * lda] : lower[(r - 3) * lda]);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) acc[r][v] = fma(x, b[v], acc[r][v]);
    }
  }
  store_tile(acc, c, ldc);
}

// All rows and all columns of one (p1 == nullptr) or two panels, which are copied piece by piece.
// Meanwhile the next piece is fetched into L2: what lies behind this one, as panels follow each
// other. A is converted where it is not float.
template <class A, class W>
void panels_copied(const A* a, int64_t lda, int64_t rows, const W* p0, const W* p1, int64_t k,
                   float* c, int64_t ldc, bool accumulate) {
  constexpr bool kPlain = std::is_same_v<A, float>;
  constexpr int kTile = kLanes == 8 ? 6 : 3;
  constexpr int64_t kConverted = 24;  // rows of A whose copies stay in L1
  alignas(64) float copy[kWideDepth * kPanel];
  alignas(64) float row_copy[kPlain ? 1 : kConverted * kWideDepth];
  const int64_t step = kPlain ? rows : kConverted;
  const int64_t tiles = (rows + kTile - 1) / kTile * (kPanel / kWideColumns);
  for (int panel = 0; panel < (p1 ? 2 : 1); ++panel, c += kPanel) {
    for (int64_t d = 0; d == 0 || d < k; d += kWideDepth) {  // k = 0 gives zeros
      const int64_t depth = k - d < kWideDepth ? k - d : kWideDepth;
      const W* w = (panel ? p1 : p0) + d * kPanel;
      convert_panel(w, depth, copy);
      const char* next = reinterpret_cast<const char*>(w + depth * kPanel);
      const int64_t bytes = depth * kPanel * int64_t{sizeof(W)} / tiles / 64 * 64 + 64;
      for (int64_t begin = 0; begin < rows; begin += step) {
        const int64_t count = rows - begin < step ? rows - begin : step;
        const float* x;
        int64_t stride = lda;
        if constexpr (kPlain) {
          x = a + begin * lda + d;
        } else {
          convert_rows(a + begin * lda + d, lda, count, depth, row_copy, kWideDepth);
          x = row_copy;
          stride = kWideDepth;
        }
        for (int64_t v = 0; v < kPanel; v += kWideColumns)
          for (int64_t r = 0, n; r < count; r += n) {
            n = rows_of_tile<kTile>(count - r);
            for (int64_t line = 0; line < bytes; line += 64) __builtin_prefetch(next + line, 0, 2);
            next += bytes;
            with_rows<kTile>(n, [&]<int kRows>() IPEX_LAMBDA {
              tile_copied<kRows>(x + r * stride, stride, copy + v * depth, depth,
                                 c + (begin + r) * ldc + v, ldc, accumulate || d > 0);
            });
          }
      }
    }
  }
}

// Any type, with A converted piece by piece.
template <class T>
void panels_converted(const T* a, int64_t lda, int64_t rows, const T* p0, const T* p1, int64_t k,
                      float* c, int64_t ldc, bool accumulate, Following* next) {
  if constexpr (kCopies) {
    if (rows >= kWidenedRows<T>) return panels_copied(a, lda, rows, p0, p1, k, c, ldc, accumulate);
  }
  alignas(64) float row_copy[kTileRows * kDepth];
  const auto piece = [&](int64_t d, int64_t depth, const auto* w0, const auto* w1) IPEX_LAMBDA {
    for (int64_t r = 0; r < rows; r += kTileRows) {
      const int64_t n = rows - r < kTileRows ? rows - r : kTileRows;
      convert_rows(a + r * lda + d, lda, n, depth, row_copy);
      panels_fma(row_copy, kDepth, n, w0, w1, depth, c + r * ldc, ldc, accumulate || d > 0, next);
    }
  };
  if constexpr (kWidens<T> && !kCopies) {
    if (rows >= kWidenedRows<T>) return for_widened(p0, p1, k, piece);
  }
  for (int64_t d = 0; d == 0 || d < k; d += kDepth)  // as above
    piece(d, k - d < kDepth ? k - d : kDepth, p0 + d * kPanel, p1 ? p1 + d * kPanel : nullptr);
}

#if IPEX_HAVE_AVX512_BF16

// Pairs of bfloat16 of one row as the broadcast operand.
IPEX_INLINE __m512bh broadcast_pair(const BFloat16* a) {
  int32_t pair;
  std::memcpy(&pair, a, sizeof(pair));
  return reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair));
}

template <int kRows, int kVectors>
IPEX_INLINE void tile_dot(const BFloat16* a, int64_t lda, const BFloat16* p0, const BFloat16* p1,
                          int64_t k, float* c, int64_t ldc, bool accumulate, Following& following) {
  f32v acc[kRows][kVectors];
  load_tile(acc, c, ldc, accumulate);
  const BFloat16* w[kVectors];
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) w[v] = column(p0, p1, v, 2);
  const auto step = [&](int64_t i, const auto& operand) IPEX_LAMBDA {
    following.step();
    __m512bh b[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v)
      b[v] = reinterpret_cast<__m512bh>(_mm512_loadu_si512(w[v] + i * kPanel));
#pragma GCC unroll 6
    for (int r = 0; r < kRows; ++r) {
      const __m512bh x = operand(a + r * lda + i);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) acc[r][v] = _mm512_dpbf16_ps(acc[r][v], x, b[v]);
    }
  };
  int64_t i = 0;
  for (; i + 2 <= k; i += 2) step(i, broadcast_pair);
  if (i < k)  // the second half of the last pair would lie behind the row
    step(i, [](const BFloat16* p)
                IPEX_LAMBDA { return reinterpret_cast<__m512bh>(_mm512_set1_epi32(p->bits)); });
  store_tile(acc, c, ldc);
}

inline void panels_dot(const BFloat16* a, int64_t lda, int64_t rows, const BFloat16* p0,
                       const BFloat16* p1, int64_t k, float* c, int64_t ldc, bool accumulate,
                       Following* next = nullptr) {
  Following nothing(p0);
  Following& following = next ? *next : nothing;
  for (int64_t r = 0, n; r < rows; r += n) {
    n = rows_of_tile(rows - r);
    with_rows(n, [&]<int kRows>() IPEX_LAMBDA {
      if (p1)
        tile_dot<kRows, 4>(a + r * lda, lda, p0, p1, k, c + r * ldc, ldc, accumulate, following);
      else
        tile_dot<kRows, 2>(a + r * lda, lda, p0, p1, k, c + r * ldc, ldc, accumulate, following);
    });
  }
}

#endif  // IPEX_HAVE_AVX512_BF16

#if IPEX_HAVE_AMX

struct alignas(64) TileConfig {
  uint8_t palette = 0, start_row = 0, reserved[14] = {};
  uint16_t bytes_per_row[16] = {};
  uint8_t rows[16] = {};
};

// GCC's intrinsics that load tiles or their configuration do not tell the compiler what memory they
// read: this must stand between writing `memory` in C++ and loading from it. Those that store tiles
// say that they write memory, so nothing has to stand between them and reading it in C++.
IPEX_INLINE void tile_fence(const void* memory) { __asm__ volatile("" : : "r"(memory) : "memory"); }

// Tile registers: 0..3 C (2 x 2), 4..5 A, 6..7 W.
// The tile configuration is per thread and belongs to the code that set it last (oneDNN keeps one
// across calls): it is saved and put back.
class TileScope {
 public:
  TileScope() {
    tile_fence(&saved_);
    _tile_storeconfig(&saved_);
    tile_fence(&saved_);
  }
  TileScope(const TileScope&) = delete;
  TileScope& operator=(const TileScope&) = delete;
  ~TileScope() {
    if (saved_.palette)
      _tile_loadconfig(&saved_);
    else
      _tile_release();
  }

  // Tiles for `rows` rows of A and C, 1 .. 32.
  void configure(int64_t rows) {
    const int64_t upper = rows < 16 ? rows : 16, lower = rows > 16 ? rows - 16 : 1;
    load(rows, {upper, upper, lower, lower, upper, lower, 16, 16});
  }
  // The same for one row of tiles, 1 .. 16 rows: 0..3 C, 4 A, 5..7 W.
  void configure_wide(int64_t rows) { load(-rows, {rows, rows, rows, rows, rows, 16, 16, 16}); }
  // Two A for one row of tiles: 0..3 C, 4 and 5 A, 6 and 7 W.
  void configure_planes(int64_t rows) {
    load(-16 - rows, {rows, rows, rows, rows, rows, rows, 16, 16});
  }

 private:
  struct Heights {
    int64_t of[8];
  };
  void load(int64_t name, const Heights& rows) {
    if (name == configured_) return;
    TileConfig config;
    config.palette = 1;
    for (int t = 0; t < 8; ++t) {
      config.bytes_per_row[t] = 64;
      config.rows[t] = static_cast<uint8_t>(rows.of[t]);
    }
    tile_fence(&config);
    _tile_loadconfig(&config);
    configured_ = name;
  }

  TileConfig saved_;
  int64_t configured_ = 0;
};

// One panel, up to 32 rows, k a multiple of 32.
inline void panel_amx(const BFloat16* a, int64_t lda, int64_t rows, const BFloat16* p, int64_t k,
                      float* c, int64_t ldc, bool accumulate) {
  const int64_t a_stride = lda * 2, c_stride = ldc * 4;
  constexpr int64_t w_stride = kPanel * 4;
  const bool two = rows > 16;
  tile_fence(a);
  tile_fence(p);
  tile_fence(c);
  if (accumulate) {
    _tile_loadd(0, c, c_stride);
    _tile_loadd(1, c + 16, c_stride);
    if (two) {
      _tile_loadd(2, c + 16 * ldc, c_stride);
      _tile_loadd(3, c + 16 * ldc + 16, c_stride);
    }
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  if (two) {
    for (int64_t i = 0; i < k; i += 32) {
      _tile_loadd(6, p + i * kPanel, w_stride);
      _tile_loadd(4, a + i, a_stride);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, p + i * kPanel + 32, w_stride);
      _tile_dpbf16ps(1, 4, 7);
      _tile_loadd(5, a + 16 * lda + i, a_stride);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  } else {
    for (int64_t i = 0; i < k; i += 32) {
      const char* ahead = reinterpret_cast<const char*>(p + i * kPanel) + kFetchAhead;
      for (int64_t line = 0; line < 2048; line += 64) __builtin_prefetch(ahead + line);
      _tile_loadd(4, a + i, a_stride);
      _tile_loadd(6, p + i * kPanel, w_stride);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, p + i * kPanel + 32, w_stride);
      _tile_dpbf16ps(1, 4, 7);
    }
  }
  _tile_stored(0, c, c_stride);
  _tile_stored(1, c + 16, c_stride);
  if (two) {
    _tile_stored(2, c + 16 * ldc, c_stride);
    _tile_stored(3, c + 16 * ldc + 16, c_stride);
  }
}

#else

// Without AMX there is nothing to save.
class TileScope {};

#endif  // IPEX_HAVE_AMX

// A in float whatever the panels hold: for operands that were computed in float anyway. An odd k
// needs a zero behind each row of A.
template <class W>
IPEX_INLINE void multiply_float(const float* a, int64_t lda, int64_t rows, const W* p0, const W* p1,
                                int64_t k, float* c, int64_t ldc, bool accumulate,
                                Following* next = nullptr) {
  if constexpr (kCopies) {
    if (rows >= kWidenedRows<W>) return panels_copied(a, lda, rows, p0, p1, k, c, ldc, accumulate);
  } else if constexpr (kWidens<W>) {
    if (rows >= kWidenedRows<W>)
      return for_widened(
          p0, p1, k, [&](int64_t d, int64_t depth, const float* w0, const float* w1) IPEX_LAMBDA {
            panels_fma(a + d, lda, rows, w0, w1, depth, c, ldc, accumulate || d > 0);
          });
  }
  panels_fma(a, lda, rows, p0, p1, k, c, ldc, accumulate, next);
}

// C[rows][32 or 64] (+)= A[rows][k] * panels. `scope` must live around a series of calls. `next`:
// what to fetch meanwhile.
IPEX_INLINE void multiply(TileScope&, const float* a, int64_t lda, int64_t rows, const float* p0,
                          const float* p1, int64_t k, float* c, int64_t ldc, bool accumulate,
                          Following* next = nullptr) {
  multiply_float(a, lda, rows, p0, p1, k, c, ldc, accumulate, next);
}

IPEX_INLINE void multiply(TileScope&, const Half* a, int64_t lda, int64_t rows, const Half* p0,
                          const Half* p1, int64_t k, float* c, int64_t ldc, bool accumulate,
                          Following* next = nullptr) {
  panels_converted(a, lda, rows, p0, p1, k, c, ldc, accumulate, next);
}

inline void multiply([[maybe_unused]] TileScope& scope, const BFloat16* a, int64_t lda,
                     int64_t rows, const BFloat16* p0, const BFloat16* p1, int64_t k, float* c,
                     int64_t ldc, bool accumulate, [[maybe_unused]] Following* next = nullptr) {
#if IPEX_HAVE_AMX
  const int64_t whole = k / 32 * 32;
  // For a single row too: the tiles stream the weights faster than VDPBF16PS does on the same
  // cores.
  if (whole) {
    for (int64_t r = 0; r < rows; r += 32) {
      const int64_t n = rows - r < 32 ? rows - r : 32;
      scope.configure(n);
      panel_amx(a + r * lda, lda, n, p0, whole, c + r * ldc, ldc, accumulate);
      if (p1) panel_amx(a + r * lda, lda, n, p1, whole, c + r * ldc + kPanel, ldc, accumulate);
    }
    if (whole < k)
      panels_dot(a + whole, lda, rows, p0 + whole * kPanel, p1 ? p1 + whole * kPanel : nullptr,
                 k - whole, c, ldc, true);
    return;
  }
#endif
#if IPEX_HAVE_AVX512_BF16
  panels_dot(a, lda, rows, p0, p1, k, c, ldc, accumulate, next);
#else
  panels_converted(a, lda, rows, p0, p1, k, c, ldc, accumulate, next);
#endif
}

// Elements between two panels.
template <class T>
IPEX_INLINE int64_t panel_size(int64_t k) {
  return kPanel * k;
}
template <>
IPEX_INLINE int64_t panel_size<BFloat16>(int64_t k) {
  return kPanel * ((k + 1) / 2 * 2);
}

}  // namespace
}  // namespace ipex
