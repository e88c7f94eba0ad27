// SPDX-License-Identifier: Apache-2.0
// The products of a convolution: one for each group of channels.
#pragma once

#include <algorithm>

#include "convolution/convolution.h"
#include "ipex/kernel/gemm_operands.h"

namespace ipex {
namespace {

// Calls f(group, block) for each group that has some of the panels [begin, end); the block has the
// weight, and y and the addend of row 0.
template <class T, class F>
IPEX_INLINE void for_groups(const ConvolutionArgs& args, int64_t begin, int64_t end, const F& f) {
  const int64_t panels = args.panels();
  while (begin < end) {
    const int64_t group = begin / panels, first = begin % panels;
    const int64_t column = group * args.columns() + first * kPanel;
    GemmBlock<T> block{};
    block.epilogue = &args.epilogue;
    block.w = static_cast<const T*>(args.weight) + begin * panel_size<T>(args.k());
    block.panels = std::min(end - begin, panels - first);
    block.k = args.k();
    block.column = column;
    block.columns = args.columns() - first * kPanel;
    block.y = static_cast<T*>(args.y) + column;
    block.y_stride = args.n;
    if (args.residual) block.addend = static_cast<const T*>(args.residual) + column;
    f(group, block);
    begin += block.panels;
  }
}

// Moves a block from row 0 to the rows [begin, begin + rows).
template <class T>
IPEX_INLINE void place_rows(GemmBlock<T>& block, int64_t begin, int64_t rows) {
  block.row = begin;
  block.rows = rows;
  block.y += begin * block.y_stride;
  if (block.addend) block.addend += begin * block.y_stride;
}

}  // namespace
}  // namespace ipex
