// SPDX-License-Identifier: Apache-2.0
// A convolution with a window of 3 x 3 by Winograd's minimal filtering F(2x2, 3x3): of each block
// of 2 x 2 pixels of y, a block of 4 x 4 pixels of x and the window are transformed, multiplied
// place by place and transformed back: 16 products instead of 36. The weight was transformed when
// it was packed.
//
// Source: Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks", 2015.
#pragma once

#include <algorithm>
#include <cstring>

#include "convolution/direct.h"

namespace ipex {
namespace {

// The blocks [begin, end) of y, which are numbered line by line, image by image. All is computed in
// float, whatever T is.
template <class T>
class WinogradBlocks {
 public:
  WinogradBlocks(const ConvolutionArgs& args, int64_t begin, int64_t end, char* scratch)
      : args_(args),
        places_(args, end - begin),
        begin_(begin),
        count_(end - begin),
        zeros_(reinterpret_cast<T*>(scratch)),
        rows_(reinterpret_cast<const float**>(scratch + places_.table)),
        x_(reinterpret_cast<float*>(scratch + places_.x)),
        products_(reinterpret_cast<float*>(scratch + places_.products)),
        sums_(reinterpret_cast<float*>(scratch + places_.sums)) {
    std::memset(zeros_, 0, static_cast<size_t>(args.channels) * sizeof(T));
    for (int64_t t = 0; t < count_; ++t) rows_[t] = x_ + t * places_.stride;
  }

  void transform_x() const {
    for (int64_t t = 0; t < count_; ++t) {
      const auto [image, line, column] = place(begin_ + t);
      const T* from[4][4];
      for (int64_t i = 0; i < 4; ++i)
        for (int64_t j = 0; j < 4; ++j) {
          const int64_t h = 2 * line + i - args_.padding_y, w = 2 * column + j - args_.padding_x;
          const bool inside = h >= 0 && h < args_.height && w >= 0 && w < args_.width;
          from[i][j] = inside ? static_cast<const T*>(args_.x) +
                                    ((image * args_.height + h) * args_.width + w) * args_.channels
                              : zeros_;
        }
      float* const to = x_ + t * places_.stride;
      int64_t c = 0;
      for (; c + kLanes <= args_.channels; c += kLanes) {
        const auto at = [&](int64_t i, int64_t j) IPEX_LAMBDA { return load(from[i][j] + c); };
        forward(at, [&](int64_t p, f32v v) IPEX_LAMBDA { store(to + p * size() + c, v); });
      }
      if (const int64_t left = args_.channels - c; left > 0) {
        const auto at = [&](int64_t i, int64_t j)
                            IPEX_LAMBDA { return load_n(from[i][j] + c, left); };
        forward(at, [&](int64_t p, f32v v) IPEX_LAMBDA { store_n(to + p * size() + c, v, left); });
      }
    }
  }

  // What two panels (or one: p1 == nullptr) give; `next` is fetched meanwhile, or null.
  void multiply(const float* p0, const float* p1, int vectors, const float* next) const {
    const int64_t depth = args_.channels, fetched = fetched_bytes<float>(count_);
    for (int64_t p = 0; p < kWinogradPlaces; ++p, p0 += depth * kPanel) {
      if (p1 && p > 0) p1 += depth * kPanel;
      const bool more = p + 1 < kWinogradPlaces;
      const float* following = more ? p0 + depth * kPanel : next ? next : p0;
      DirectPiece<float> piece{nullptr, 1, 1, p * size(), depth, true, true, nullptr};
      piece.next_step = more || next ? fetched : 0;
      const int64_t apart = panel_size<float>(args_.k());
      for (int64_t r = 0, tile = 0; r < count_; r += kDirectRows, ++tile) {
        piece.from = rows_ + r;
        piece.next = reinterpret_cast<const char*>(p1 && tile % 2 ? following + apart : following) +
                     tile / 2 * depth * piece.next_step;
        const auto rows =
            piece.next_step ? direct_rows<true, false, float> : direct_rows<false, false, float>;
        rows(piece, std::min<int64_t>(kDirectRows, count_ - r), vectors, p0, p1,
             products_ + (p * count_ + r) * kColumns, kColumns, nullptr);
      }
    }
  }

  // Transforms the products back and finishes the columns from `panel` of `block` on.
  void finish(const GemmBlock<T>& block, int64_t panel, int64_t width, int vectors) const {
    const Finisher<T> finisher = block.finisher(panel, width);
    for (int64_t t = 0, n; t < count_; t += n) {  // blocks side by side
      const auto [image, line, column] = place(begin_ + t);
      n = std::min(count_ - t, args_.blocks_across() - column);
      const int64_t pixels = std::min(2 * n, args_.out_width - 2 * column);
      GemmBlock<T> lines[2] = {block, block};
      const int64_t kept = std::min<int64_t>(2, args_.out_height - 2 * line);
      for (int64_t i = 0; i < kept; ++i) {
        const int64_t row = image * args_.out_height + 2 * line + i;
        place_rows(lines[i], row * args_.out_width + 2 * column, pixels);
        if (block.addend) lines[i].load_addend(panel, width, 0, pixels, sums(i), kColumns);
      }
      for (int64_t b = 0; b < n; ++b) backward(t + b, b, vectors, block.addend != nullptr);
      for (int64_t i = 0; i < kept; ++i)
        lines[i].finish(finisher, panel, sums(i), kColumns, 0, pixels);
    }
  }

 private:
  static constexpr int64_t kColumns = 2 * kPanel;
  struct Place {
    int64_t image, line, column;
  };

  int64_t size() const { return count_ * places_.stride; }
  float* sums(int64_t line) const { return sums_ + line * 2 * count_ * kColumns; }
  Place place(int64_t block) const {
    const int64_t across = args_.blocks_across(), down = args_.blocks_down();
    return {block / across / down, block / across % down, block % across};
  }

  template <class Load, class Store>
  IPEX_INLINE static void forward(const Load& x, const Store& put) {
    const auto row = [&](int64_t p, const auto& of) IPEX_LAMBDA {
      const f32v a = of(0), b = of(1), c = of(2), d = of(3);
      put(p, a - c);
      put(p + 1, b + c);
      put(p + 2, c - b);
      put(p + 3, b - d);
    };
    row(0, [&](int64_t j) IPEX_LAMBDA { return x(0, j) - x(2, j); });
    row(4, [&](int64_t j) IPEX_LAMBDA { return x(1, j) + x(2, j); });
    row(8, [&](int64_t j) IPEX_LAMBDA { return x(2, j) - x(1, j); });
    row(12, [&](int64_t j) IPEX_LAMBDA { return x(1, j) - x(3, j); });
  }

  // Block `t`, which is block `b` of those side by side.
  IPEX_INLINE void backward(int64_t t, int64_t b, int vectors, bool accumulate) const {
    for (int64_t v = 0; v < vectors * kLanes; v += kLanes) {
      const float* const from = products_ + t * kColumns + v;
      f32v upper[4], lower[4];
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        const auto m = [&](int64_t i)
                           IPEX_LAMBDA { return load(from + (4 * i + j) * count_ * kColumns); };
        const f32v sum = m(1) + m(2), difference = m(1) - m(2);
        upper[j] = m(0) + sum;
        lower[j] = difference - m(3);
      }
      const auto put = [&](int64_t line, const f32v(&s)[4]) IPEX_LAMBDA {
        float* const to = sums(line) + 2 * b * kColumns + v;
        f32v left = s[0] + s[1] + s[2], right = s[1] - s[2] - s[3];
        if (accumulate) {
          left = left + load(to);
          right = right + load(to + kColumns);
        }
        store(to, left);
        store(to + kColumns, right);
      };
      put(0, upper);
      put(1, lower);
    }
  }

  const ConvolutionArgs& args_;
  WinogradScratch places_;
  int64_t begin_, count_;
  T* zeros_;
  const float** rows_;
  float *x_, *products_, *sums_;
};

// The blocks [begin, end) of what the panels [panel_begin, panel_end) give.
template <class T>
void convolve_winograd(const ConvolutionArgs& args, int64_t begin, int64_t end, int64_t panel_begin,
                       int64_t panel_end, char* scratch) {
  const WinogradBlocks<T> blocks(args, begin, end, scratch);
  blocks.transform_x();
  const int64_t size = panel_size<float>(args.k());
  const float* w = static_cast<const float*>(args.weight) + panel_begin * size;
  for_groups<T>(args, panel_begin, panel_end, [&](int64_t, const GemmBlock<T>& block) IPEX_LAMBDA {
    for (int64_t p = 0; p < block.panels; p += 2, w += 2 * size) {
      const bool both = p + 1 < block.panels;
      const int64_t width = (both ? 2 : 1) * kPanel;
      const int64_t columns = std::min(width, block.columns - p * kPanel);
      const auto vectors = static_cast<int>((columns + kLanes - 1) / kLanes);
      blocks.multiply(w, both ? w + size : nullptr, vectors,
                      p + 2 < block.panels ? w + 2 * size : nullptr);
      blocks.finish(block, p, width, vectors);
    }
  });
}

}  // namespace
}  // namespace ipex
