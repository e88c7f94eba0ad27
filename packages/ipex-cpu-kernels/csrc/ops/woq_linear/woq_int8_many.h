// SPDX-License-Identifier: Apache-2.0
// Many rows: the weights of two panels are laid out as int8 panels once and multiplied by all rows.
#pragma once

#include "ipex/kernel/epilogue.h"
#include "woq_linear/woq_int8_decode.h"

namespace ipex {
namespace {

inline constexpr int64_t kInt8Width = 2 * kPanel;

// Blocks [begin, end) of a strip as columns of a panel of gemm_int8.h; `panel` is the place of the
// strip's first column. Bytes: code - 8 for int4 without zero points, code for int4 with them.
template <Codes kCodes>
void lay_out_strip(const WoqInt8Args& args, const ByteTable& table, const char* strip,
                   int64_t begin, int64_t end, int8_t* panel) {
  const int32_t less = args.header.zero_kind == kZeroNone ? 0x08080808 : 0;
  const char* from = strip + args.at.weights;
  constexpr int64_t kStep = 4 * kPanel;  // bytes of a panel for 4 elements of K
  for (int64_t b = begin; b < end; ++b)
    for (int64_t v = 0; v < kStrip; v += kLanes) {
      const i32v word = load_ints(from + b * kBlockBytes + v * 4);
      if constexpr (kCodes == Codes::kBytes) {
        const i32v value = word ^ iset1(static_cast<int32_t>(0x80808080));
        std::memcpy(panel + (b - begin) * kStep + v * 4, &value, sizeof(value));
      } else {
        i32v low = low_nibbles(word), high = high_nibbles(word);
        if constexpr (kCodes == Codes::kTable) {
          low = table[low];
          high = table[high];
        } else {
          typedef int8_t Bytes __attribute__((vector_size(kLanes * 4)));
          const Bytes offset = reinterpret_cast<Bytes>(iset1(less));
          low = reinterpret_cast<i32v>(reinterpret_cast<Bytes>(low) - offset);
          high = reinterpret_cast<i32v>(reinterpret_cast<Bytes>(high) - offset);
        }
        int8_t* to = panel + 2 * (b - begin) * kStep + v * 4;
        std::memcpy(to, &low, sizeof(low));
        std::memcpy(to + kStep, &high, sizeof(high));
      }
    }
}

// What belongs to the columns of two panels for a chunk.
struct ChunkColumns {
  float* scale;
  int32_t* zero;  // of the bytes that lay_out_strip makes
  int32_t* sum;   // of v

  ChunkColumns at(int64_t chunk) const {
    return {scale + chunk * kInt8Width, zero + chunk * kInt8Width, sum + chunk * kInt8Width};
  }
};

// Adds scaled sums of a row to c, or starts it.
IPEX_INLINE void add_chunk(const int32_t* acc, const ChunkColumns& by, float x_scale,
                           int32_t x_zero, int32_t x_sum, int64_t width, bool first, float* c) {
  const f32v scale = set1(x_scale);
  const i32v zero_code = iset1(x_zero), total = iset1(x_sum);
  for (int64_t i = 0; i < width; i += kLanes) {
    const i32v sum =
        load_ints(acc + i) - total * load_ints(by.zero + i) - zero_code * load_ints(by.sum + i);
    const f32v step = scale * load(by.scale + i);
    store(c + i, first ? step * to_float(sum) : fma(step, to_float(sum), load(c + i)));
  }
}

// A run of K that is laid out at a time: chunks, or a part of a long one.
struct Run {
  int64_t begin, end, chunk;  // `chunk`: the first one
};

template <class T>
class ManyRows {
 public:
  ManyRows(const WoqInt8Args& args, char* scratch, int64_t row_begin, int64_t row_end)
      : args_(args),
        row_begin_(row_begin),
        row_end_(row_end),
        table_(integer_table(args.header.format), 0) {
    const int64_t rows = row_end - row_begin;
    auto* place = scratch;
    const auto take = [&](int64_t bytes) {
      char* taken = place;
      place += bytes;
      return taken;
    };
    panels_ = reinterpret_cast<int8_t*>(take(kInt8Width * kWoqInt8Depth));
    acc_ = reinterpret_cast<int32_t*>(take(rows * kInt8Width * 4));
    c_ = reinterpret_cast<float*>(take(rows * kInt8Width * 4));
    columns_.scale = reinterpret_cast<float*>(take(kWoqInt8Chunks * kInt8Width * 4));
    columns_.zero = reinterpret_cast<int32_t*>(take(kWoqInt8Chunks * kInt8Width * 4));
    columns_.sum = reinterpret_cast<int32_t*>(take(kWoqInt8Chunks * kInt8Width * 4));
    std::memset(ones_, 1, sizeof(ones_));
  }

  void panels(int64_t panel, bool two) {
    const int64_t per_panel = args_.epilogue.gated ? kPanel / 2 : kPanel;  // columns of y
    const int64_t column = panel * per_panel;
    const int64_t most = (two ? 2 : 1) * per_panel;
    const int64_t count = args_.n - column < most ? args_.n - column : most;
    const Finisher<T> finisher(args_.epilogue, column, count);
    two_ = two;
    first_strip_ = args_.packed + args_.at.first_strip + 2 * panel * args_.at.strip_bytes;
    const int64_t k = args_.at.k_padded, chunk = args_.chunk;
    int64_t per_run = kWoqInt8Depth / chunk;
    if (per_run > kWoqInt8Chunks) per_run = kWoqInt8Chunks;
    for (Run run{0, 0, 0}; run.begin < k; run.begin = run.end) {
      run.chunk = run.begin / chunk;
      const int64_t chunk_end = chunk_begin(run.chunk + 1);
      run.end = per_run > 0 ? chunk_begin(run.chunk + per_run) : run.begin + kWoqInt8Depth;
      if (per_run == 0 && run.end > chunk_end) run.end = chunk_end;
      lay_out(run);
      multiply_run(run, finisher, column);
    }
  }

 private:
  // In padded K; the last chunk ends with it.
  int64_t chunk_begin(int64_t chunk) const {
    return chunk < args_.chunks ? chunk * args_.chunk : args_.at.k_padded;
  }

  void lay_out(const Run& run) {
    const int64_t block_k = woq_block_k(args_.header.format);
    for (int64_t s = 0; s < (two_ ? 4 : 2); ++s) {
      const char* strip = first_strip_ + s * args_.at.strip_bytes;
      int8_t* to = panels_ + s / 2 * kPanel * kWoqInt8Depth + s % 2 * kStrip * 4;
      with_codes(args_.header.format, [&]<Codes kCodes>() {
        lay_out_strip<kCodes>(args_, table_, strip, run.begin / block_k, run.end / block_k, to);
      });
      for (int64_t i = run.chunk; i < args_.chunks && chunk_begin(i) < run.end; ++i) {
        const int64_t group = group_of(args_, i);
        const ChunkColumns by = columns_.at(i - run.chunk);
        chunk_scales(args_, strip, group, by.scale + s * kStrip);
        chunk_zeros(args_, strip, group, 0, by.zero + s * kStrip);
        if (args_.stored_sums)
          std::memcpy(by.sum + s * kStrip, stored_sums(args_, strip, group), kStrip * 4);
      }
    }
    if (!args_.stored_sums)
      for_pieces(run, [&](int64_t begin, int64_t end, int64_t chunk) {
        const ChunkColumns by = columns_.at(chunk - run.chunk);
        const int64_t real = end < args_.k ? end : args_.k;  // the padding of K does not count
        std::memset(ones_ + (real - begin), 0, static_cast<size_t>(end - real));
        multiply(run, ones_, 0, 1, begin, end, by.sum, chunk);
        std::memset(ones_ + (real - begin), 1, static_cast<size_t>(end - real));
        if (end == chunk_begin(chunk + 1)) take_zeros(real - chunk_begin(chunk), by);
      });
  }

  // Sums of bytes to sums of v.
  void take_zeros(int64_t length, const ChunkColumns& by) const {
    for (int64_t i = 0; i < kInt8Width; ++i) by.sum[i] -= static_cast<int32_t>(length) * by.zero[i];
  }

  // f(begin, end, chunk) for the chunks of a run, or the part of one.
  template <class F>
  void for_pieces(const Run& run, const F& f) const {
    for (int64_t begin = run.begin, chunk = run.chunk; begin < run.end; ++chunk) {
      const int64_t of_chunk = chunk_begin(chunk + 1);
      const int64_t end = of_chunk < run.end ? of_chunk : run.end;
      f(begin, end, chunk);
      begin = end;
    }
  }

  void multiply(const Run& run, const uint8_t* a, int64_t lda, int64_t rows, int64_t begin,
                int64_t end, int32_t* acc, int64_t chunk) {
    const int8_t* p0 = panels_ + (begin - run.begin) * kPanel;
    multiply8(scope_, a, lda, rows, p0, two_ ? p0 + kPanel * kWoqInt8Depth : nullptr, end - begin,
              acc, kInt8Width, begin != chunk_begin(chunk));
  }

  void multiply_run(const Run& run, const Finisher<T>& finisher, int64_t column) {
    const int64_t width = two_ ? kInt8Width : kPanel;
    for (int64_t r = row_begin_; r < row_end_; r += kRowStep8) {
      const int64_t rows = row_end_ - r < kRowStep8 ? row_end_ - r : kRowStep8;
      int32_t* acc = acc_ + (r - row_begin_) * kInt8Width;
      float* c = c_ + (r - row_begin_) * kInt8Width;
      for_pieces(run, [&](int64_t begin, int64_t end, int64_t chunk) {
        multiply(run, args_.codes + r * args_.codes_stride + begin, args_.codes_stride, rows, begin,
                 end, acc, chunk);
        if (end != chunk_begin(chunk + 1)) return;
        for (int64_t i = 0; i < rows; ++i) {
          const int64_t place = (r + i) * args_.chunks + chunk;
          add_chunk(acc + i * kInt8Width, columns_.at(chunk - run.chunk), args_.scales[place],
                    args_.zeros[place], args_.sums[place], width, chunk == 0, c + i * kInt8Width);
        }
      });
      if (run.end == args_.at.k_padded)
        finisher.rows(c, kInt8Width, rows, r, static_cast<T*>(args_.y) + r * args_.n + column,
                      args_.n);
    }
  }

  const WoqInt8Args& args_;
  int64_t row_begin_, row_end_;
  ByteTable table_;
  TileScope scope_;
  int8_t* panels_;
  int32_t* acc_;
  float* c_;
  ChunkColumns columns_;
  const char* first_strip_ = nullptr;
  bool two_ = false;
  alignas(64) uint8_t ones_[kWoqInt8Depth];
};

}  // namespace
}  // namespace ipex
