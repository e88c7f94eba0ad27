// SPDX-License-Identifier: Apache-2.0
// Sorts lookups by row, stable within a row: a radix sort from the lowest digit. For
// glue.
#pragma once

#include <algorithm>
#include <bit>
#include <utility>
#include <vector>

#include "ipex/glue/dispatch.h"
#include "merged_embeddingbag/merged_embeddingbag.h"

namespace ipex {

class LookupSort {
 public:
  // `rows` is larger than any row. Digits are as short as the number of passes allows.
  explicit LookupSort(uint64_t rows) {
    const int bits = std::bit_width(rows - 1);
    passes_ = (bits + kMostBits - 1) / kMostBits;
    bits_ = passes_ > 0 ? (bits + passes_ - 1) / passes_ : 0;
  }

  // Whether the result is where `to` was.
  bool moves() const { return passes_ % 2 != 0; }

  // Both arrays hold `count` lookups; the given ones are in `from`. The result is the only stable
  // order, so it does not depend on the number of threads.
  void sort(Lookup* from, Lookup* to, int64_t count) const {
    const int64_t digits = int64_t{1} << bits_;
    const int64_t pieces = std::clamp<int64_t>(count / kLeastPiece, 1, kMostPieces);
    const int64_t size = (count + pieces - 1) / pieces;
    std::vector<int64_t> places(static_cast<size_t>(pieces * digits));
    for (int pass = 0; pass < passes_; ++pass) {
      std::fill(places.begin(), places.end(), 0);
      const auto for_pieces = [&](const auto& f) {
        parallel_for(pieces, 1, [&](int64_t first, int64_t last) {
          for (int64_t p = first; p < last; ++p) {
            int64_t* place = places.data() + p * digits;
            const int64_t end = std::min(count, (p + 1) * size);
            for (int64_t i = p * size; i < end; ++i)
              f(from[i],
                place[(from[i].row >> (pass * bits_)) & static_cast<uint64_t>(digits - 1)]);
          }
        });
      };
      for_pieces([](const Lookup&, int64_t& number) { ++number; });
      int64_t total = 0;
      for (int64_t d = 0; d < digits; ++d)
        for (int64_t p = 0; p < pieces; ++p)
          total += std::exchange(places[static_cast<size_t>(p * digits + d)], total);
      for_pieces([to](const Lookup& lookup, int64_t& place) { to[place++] = lookup; });
      std::swap(from, to);
    }
  }

 private:
  static constexpr int kMostBits = 11;
  static constexpr int64_t kLeastPiece = 16384, kMostPieces = 256;

  int passes_, bits_;
};

}  // namespace ipex
