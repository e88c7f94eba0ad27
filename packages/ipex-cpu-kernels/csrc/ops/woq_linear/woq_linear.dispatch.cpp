// SPDX-License-Identifier: Apache-2.0
#include "woq_linear/woq_linear.h"

#include "ipex/kernel/epilogue.h"
#include "ipex/kernel/gemm.h"
#include "woq_linear/woq_few_bf16.h"
#include "woq_linear/woq_few_float.h"
#include "woq_linear/woq_few_half.h"
#include "woq_linear/woq_few_int16.h"
#include "woq_linear/woq_few_planes.h"
#include "woq_linear/woq_few_shared.h"
#include "woq_linear/woq_few_tiles.h"
#include "woq_linear/woq_panel.h"
#include "woq_linear/woq_prepare.h"

namespace ipex {
namespace {

bool is_int(uint32_t format) { return format == kFormatInt4 || format == kFormatInt8; }

WoqOperand operand_kind(const PackedHeader& header, WoqCompute compute) {
  if (compute == WoqCompute::kFloat) return WoqOperand::kFloat;
  // With 16 registers, what is not converted anyway is as fast in 16 bits.
  const bool bytes = IPEX_HAVE_AVX512_VNNI && is_int(header.format);
  if (bytes || ((IPEX_HAVE_AVX512_VNNI || IPEX_HAVE_AVX_VNNI) && header.format == kFormatFp4))
    return WoqOperand::kPlanes;
  if (IPEX_HAVE_AVX512_BF16 && compute == WoqCompute::kBFloat16) return WoqOperand::kBFloat16;
  // nf4 takes bits from the activations of long groups.
  const bool looked_up =
      IPEX_HAVE_AVX2 && !IPEX_HAVE_AVX512 &&
      (header.format == kFormatFp4 || (header.format == kFormatNf4 && header.group <= 64));
  return looked_up || is_int(header.format) ? WoqOperand::kInt16 : WoqOperand::kFloat;
}

// Whether the codes of a piece are decoded for all rows before they are multiplied. Decoding int8
// is as short as reading it back.
bool decodes_first(const WoqLinearArgs& args, int64_t rows) {
  if (!kHaveShared) return false;
  if (args.kind == WoqOperand::kInt16) return rows > (args.header.format == kFormatInt8 ? 4 : 2);
  return args.kind == WoqOperand::kFloat && rows > 2;
}

// Rows that share the codes of one pass.
int64_t rows_at_once(const WoqLinearArgs& args, int64_t rows) {
  if (IPEX_HAVE_AMX && woq_takes_tiles(args, rows))
    return args.kind == WoqOperand::kPlanes ? 16 : 32;
  if (decodes_first(args, rows)) return kSharedRows;
  return args.kind == WoqOperand::kBFloat16 ? 8 : 4;
}

// Calls f for kStrips of the four strips at a time.
template <int kStrips, class F>
IPEX_INLINE void by_strips(const StripList& strips, float* c, const F& f) {
  for (int s = 0; s < 4; s += kStrips) f(strips.at + s, c + s * kStrip);
}

void product_float(const WoqLinearArgs& args, const StripList& strips, int64_t row, int64_t rows,
                   float* c) {
  with_format(args.header.format, [&]<uint32_t kFormat>() {
    constexpr bool kHalves = IPEX_HAVE_AVX2 && !IPEX_HAVE_AVX512 && kFormat >= kFormatFp8E4M3;
    with_rows<kHalves ? 2 : 4>(rows, [&]<int kRows>() IPEX_LAMBDA {
      constexpr int kStrips = kFewStrips<kRows>;
      by_strips<kStrips>(strips, c, [&](const char* const* at, float* to) {
#if IPEX_HAVE_AVX2 && !IPEX_HAVE_AVX512
        if constexpr (kHalves) return few_half<kFormat, kRows, kStrips>(args, at, row, to);
#endif
        few_float<kFormat, kRows, kStrips>(args, at, row, to);
      });
    });
  });
}

void product_int16(const WoqLinearArgs& args, const StripList& strips, int64_t row, int64_t rows,
                   float* c) {
  with_pair_codes(args.header.format, [&]<uint32_t kFormat>() {
    with_rows<4>(rows, [&]<int kRows>() IPEX_LAMBDA {
      constexpr int kStrips = kFewStrips<kRows>;
      by_strips<kStrips>(strips, c, [&](const char* const* at, float* to) {
        few_int16<kFormat, kRows, kStrips>(args, at, row, to);
      });
    });
  });
}

#if IPEX_HAVE_AVX512_VNNI || IPEX_HAVE_AVX_VNNI
void product_planes(const WoqLinearArgs& args, const StripList& strips, int64_t row, int64_t rows,
                    const FollowingStrips& following, float* c) {
  with_rows<4>(rows, [&]<int kRows>() IPEX_LAMBDA {
    // Twice the sums of other kernels.
    constexpr int kStrips = kLanes == 16 ? (kRows <= 2 ? 4 : 2) : kRows == 1 ? 2 : 1;
    by_strips<kStrips>(strips, c, [&](const char* const* at, float* to) {
      if (args.header.format == kFormatInt4)
        few_planes<kFormatInt4, kRows, kStrips>(args, at, row, following, to);
      else if (args.header.format == kFormatFp4)
        few_planes<kFormatFp4, kRows, kStrips>(args, at, row, following, to);
      else
        few_planes<kFormatInt8, kRows, kStrips>(args, at, row, following, to);
    });
  });
}
#endif

#if IPEX_HAVE_AVX512_BF16
void product_bf16(const WoqLinearArgs& args, const StripList& strips, int64_t row, int64_t rows,
                  const FollowingStrips& following, float* c) {
  with_format(args.header.format, [&]<uint32_t kFormat>() {
    constexpr uint32_t kCodes = kFormat == kFormatInt4 ? kFormatNf4 : kFormat;
    with_rows<8>(rows, [&]<int kRows>() IPEX_LAMBDA {
      constexpr int kStrips = kRows <= 4 ? 4 : 2;
      by_strips<kStrips>(strips, c, [&](const char* const* at, float* to) {
        few_bf16<kCodes, kRows, kStrips>(args, at, row, following, to);
      });
    });
  });
}
#endif

#if IPEX_HAVE_AMX
// `last`: no strips come after these.
void product_tiles(const WoqLinearArgs& args, const StripList& strips, int64_t row, int64_t rows,
                   bool last, float* c, TileScope& scope) {
  const auto ahead = [&](const char* const* at, int64_t count) {
    return last && at + count >= strips.at + 4 ? 0 : fetch_distance(args.at, count);
  };
  if (args.kind == WoqOperand::kPlanes) {
    scope.configure_planes(rows);
    by_strips<2>(strips, c, [&](const char* const* at, float* to) {
      if (args.header.format == kFormatInt4)
        FewByteTiles<true>(args, at, row, rows, ahead(at, 2), to).run();
      else
        FewByteTiles<false>(args, at, row, rows, ahead(at, 2), to).run();
    });
    return;
  }
  const bool two = rows > 16;
  two ? scope.configure(rows) : scope.configure_wide(rows);
  with_format(args.header.format, [&]<uint32_t kFormat>() {
    constexpr uint32_t kCodes = kFormat == kFormatInt4 ? kFormatNf4 : kFormat;
    if (two) {
      by_strips<2>(strips, c, [&](const char* const* at, float* to) {
        FewTiles<kCodes, true>(args, at, row, rows, ahead(at, 2), to).run();
      });
    } else {
      FewTiles<kCodes, false>(args, strips.at, row, rows, ahead(strips.at, 4), c).run();
    }
  });
}
#endif

void product_shared(const WoqLinearArgs& args, const StripList& strips, int64_t row, int64_t rows,
                    float* c) {
  if (args.kind == WoqOperand::kInt16) {
    with_pair_codes(args.header.format,
                    [&]<uint32_t kFormat>() { shared_int16<kFormat>(args, strips, row, rows, c); });
  } else {
    with_format(args.header.format,
                [&]<uint32_t kFormat>() { shared_float<kFormat>(args, strips, row, rows, c); });
  }
}

void product(const WoqLinearArgs& args, const StripList& strips, int64_t row, int64_t rows,
             bool shared, [[maybe_unused]] const FollowingStrips& following, float* c) {
  if (kHaveShared && shared) return product_shared(args, strips, row, rows, c);
#if IPEX_HAVE_AVX512_BF16
  if (args.kind == WoqOperand::kBFloat16)
    return product_bf16(args, strips, row, rows, following, c);
#endif
#if IPEX_HAVE_AVX512_VNNI || IPEX_HAVE_AVX_VNNI
  if (args.kind == WoqOperand::kPlanes)
    return product_planes(args, strips, row, rows, following, c);
#endif
  if (args.kind == WoqOperand::kInt16) return product_int16(args, strips, row, rows, c);
  product_float(args, strips, row, rows, c);
}

template <class T>
void few_rows(const WoqLinearArgs& args, int64_t row_begin, int64_t row_end, int64_t panel_begin,
              int64_t panel_end) {
  const int64_t rows = row_end - row_begin;
  alignas(64) float c[(IPEX_HAVE_AMX ? 32 : kHaveShared ? kSharedRows : 8) * kFewColumns];
  const int64_t columns = args.epilogue.gated ? kPanel / 2 : kPanel;  // of y, for a panel
  const int64_t step = rows_at_once(args, rows);
  const bool shared = decodes_first(args, rows);
  [[maybe_unused]] const bool tiles = IPEX_HAVE_AMX && woq_takes_tiles(args, rows);
  [[maybe_unused]] TileScope scope;
  for (int64_t p = panel_begin; p < panel_end; p += 2) {
    const bool two = p + 1 < panel_end;
    const int64_t column = p * columns;
    const int64_t width = (two ? 2 : 1) * columns;
    const int64_t count = args.n - column < width ? args.n - column : width;
    const Finisher<T> finisher(args.epilogue, column, count);
    // The last panel alone is computed twice: rarer than a kernel for it is worth.
    const char* first = args.packed + args.at.first_strip + 2 * p * args.at.strip_bytes;
    StripList strips;
    for (int s = 0; s < 4; ++s) strips.at[s] = first + (two ? s : s % 2) * args.at.strip_bytes;
    by_tiles(rows, step, tiles ? 16 : 1, [&](int64_t at, int64_t n, int64_t tile, int64_t parts) {
      const int64_t r = row_begin + at;
#if IPEX_HAVE_AMX
      if (tiles)
        product_tiles(args, strips, r, n, p + 2 >= panel_end, c, scope);
      else
#endif
        product(args, strips, r, n, shared, FollowingStrips::of(args.at, tile, parts), c);
      finisher.rows(c, kFewColumns, n, r, static_cast<T*>(args.y) + r * args.n + column, args.n);
    });
  }
}

template <class T>
void many(const WoqLinearArgs& args, char* scratch, int64_t row_begin, int64_t row_end,
          int64_t panel_begin, int64_t panel_end) {
  const auto run = [&]<class C>() {
    many_rows<C, T>(args, scratch, row_begin, row_end, panel_begin, panel_end);
  };
  if (args.compute == WoqCompute::kBFloat16)
    run.template operator()<BFloat16>();
  else if (args.compute == WoqCompute::kHalf)
    run.template operator()<Half>();
  else
    run.template operator()<float>();
}

}  // namespace
}  // namespace ipex

int32_t ipex_k_woq_operand(const ipex::PackedHeader* header, int32_t compute) {
  return static_cast<int32_t>(ipex::operand_kind(*header, static_cast<ipex::WoqCompute>(compute)));
}

int64_t ipex_k_woq_few_limit(int32_t operand) {
  const auto kind = static_cast<ipex::WoqOperand>(operand);
  if (kind == ipex::WoqOperand::kFloat) return 16;
  // Twice the products of float panels.
  if (ipex::kHaveShared && kind == ipex::WoqOperand::kInt16) return INT64_MAX;
  return ipex::kWoqFewRows - 1;
}

#define IPEX_DEFINE_WOQ(suffix, T)                                                                 \
  int32_t ipex_k_woq_prepare_##suffix(const ipex::WoqLinearArgs* args, bool panels,                \
                                      int64_t row_begin, int64_t row_end) {                        \
    return ipex::prepare<T>(*args, panels, row_begin, row_end);                                    \
  }                                                                                                \
  void ipex_k_woq_few_##suffix(const ipex::WoqLinearArgs* args, int64_t row_begin,                 \
                               int64_t row_end, int64_t panel_begin, int64_t panel_end) {          \
    ipex::few_rows<T>(*args, row_begin, row_end, panel_begin, panel_end);                          \
  }                                                                                                \
  void ipex_k_woq_many_##suffix(const ipex::WoqLinearArgs* args, char* scratch, int64_t row_begin, \
                                int64_t row_end, int64_t panel_begin, int64_t panel_end) {         \
    ipex::many<T>(*args, scratch, row_begin, row_end, panel_begin, panel_end);                     \
  }                                                                                                \
  void ipex_k_woq_dequantize_##suffix(const char* packed, int64_t panel, void* to) {               \
    const auto& header = *reinterpret_cast<const ipex::PackedHeader*>(packed);                     \
    ipex::decode_panel<T>(header, ipex::woq_layout(header), packed, panel, 0, header.k,            \
                          static_cast<T*>(to));                                                    \
  }
IPEX_DEFINE_WOQ(f32, float)
IPEX_DEFINE_WOQ(bf16, ipex::BFloat16)
IPEX_DEFINE_WOQ(f16, ipex::Half)
#undef IPEX_DEFINE_WOQ
