// SPDX-License-Identifier: Apache-2.0
#include "linear.h"

#include "ipex/kernel/gemm_block.h"

namespace ipex {
namespace {

template <class T>
void run(const LinearArgs& args, int64_t row_begin, int64_t row_end, int64_t panel_begin,
         int64_t panel_end, char* scratch) {
  GemmBlock<T> block{};
  block.epilogue = &args.epilogue;
  block.x = static_cast<const T*>(args.x) + row_begin * args.x_stride;
  block.x_stride = args.x_stride;
  block.rows = row_end - row_begin;
  block.w = static_cast<const T*>(args.weight) + panel_begin * panel_size<T>(args.k);
  block.panels = panel_end - panel_begin;
  block.k = args.k;
  block.row = row_begin;
  block.column = panel_begin * block.panel_columns();
  block.columns = args.n - block.column;
  block.y = static_cast<T*>(args.y) + row_begin * args.y_stride + block.column;
  block.y_stride = args.y_stride;
  gemm_block(block, scratch);
}

}  // namespace
}  // namespace ipex

void ipex_k_linear_f32(const ipex::LinearArgs* args, int64_t row_begin, int64_t row_end,
                       int64_t panel_begin, int64_t panel_end, char* scratch) {
  ipex::run<float>(*args, row_begin, row_end, panel_begin, panel_end, scratch);
}

void ipex_k_linear_bf16(const ipex::LinearArgs* args, int64_t row_begin, int64_t row_end,
                        int64_t panel_begin, int64_t panel_end, char* scratch) {
  ipex::run<ipex::BFloat16>(*args, row_begin, row_end, panel_begin, panel_end, scratch);
}

void ipex_k_linear_f16(const ipex::LinearArgs* args, int64_t row_begin, int64_t row_end,
                       int64_t panel_begin, int64_t panel_end, char* scratch) {
  ipex::run<ipex::Half>(*args, row_begin, row_end, panel_begin, panel_end, scratch);
}
