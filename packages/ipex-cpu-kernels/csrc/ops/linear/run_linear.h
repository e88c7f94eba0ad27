// SPDX-License-Identifier: Apache-2.0
// A product with packed panels, spread over the threads. For glue only.
#pragma once

#include "ipex/glue/gemm_schedule.h"
#include "linear/linear.h"

namespace ipex {

template <class Kernels>
void run_linear(const Kernels& kernels, ScalarType dtype, const LinearArgs& args,
                const GemmShape& shape) {
  const bool tiles = shape.on_tiles();
  kernels.visit(dtype, [&]<class T>(auto* kernel) {
    const bool scratch = tiles || shape.rows >= widened_from<T>();
    run_gemm(shape, tiles ? kTileRowsMost : block_of_rows(shape.rows),
             tiles ? kTilePanelsMost : shape.panels,
             [&](int64_t row_begin, int64_t row_end, int64_t panel_begin, int64_t panel_end) {
               kernel(&args, row_begin, row_end, panel_begin, panel_end, gemm_scratch(scratch));
             });
  });
}

}  // namespace ipex
