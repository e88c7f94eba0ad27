// SPDX-License-Identifier: Apache-2.0
// Sorts lookups by row, stable within a row: a radix sort from the lowest digit. For
// glue.
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "ipex/glue/dispatch.h"
#include "merged_embeddingbag/merged_embeddingbag.h"

namespace ipex {

class LookupSort {
 public:
  // Both arrays hold `count` lookups; the given ones are in `from`. Returns that which holds the
  // sorted ones. `rows` is larger than any row. The result is the only stable order, so it does
  // not depend on the number of threads.
  static const Lookup* sort(Lookup* from, Lookup* to, int64_t count, uint64_t rows) {
    const int64_t pieces = std::clamp<int64_t>(count / kLeastPiece, 1, kMostPieces);
    const int64_t size = (count + pieces - 1) / pieces;
    std::vector<int64_t> places(static_cast<size_t>(pieces) * kDigits);
    for (int shift = 0; shift < 64 && ((rows - 1) >> shift) != 0; shift += kBits) {
      std::fill(places.begin(), places.end(), 0);
      const auto for_pieces = [&](const auto& f) {
        parallel_for(pieces, 1, [&](int64_t first, int64_t last) {
          for (int64_t p = first; p < last; ++p) {
            int64_t* place = places.data() + p * kDigits;
            const int64_t end = std::min(count, (p + 1) * size);
            for (int64_t i = p * size; i < end; ++i) f(from[i], place[digit(from[i], shift)]);
          }
        });
      };
      for_pieces([](const Lookup&, int64_t& number) { ++number; });
      int64_t total = 0;
      for (int64_t d = 0; d < kDigits; ++d)
        for (int64_t p = 0; p < pieces; ++p)
          total += std::exchange(places[static_cast<size_t>(p * kDigits + d)], total);
      for_pieces([to](const Lookup& lookup, int64_t& place) { to[place++] = lookup; });
      std::swap(from, to);
    }
    return from;
  }

 private:
  static constexpr int kBits = 11;
  static constexpr int64_t kDigits = int64_t{1} << kBits;
  static constexpr int64_t kLeastPiece = 16384, kMostPieces = 256;

  static int64_t digit(const Lookup& lookup, int shift) {
    return static_cast<int64_t>((lookup.row >> shift) & (kDigits - 1));
  }
};

}  // namespace ipex
