// SPDX-License-Identifier: Apache-2.0
#include "column_sums.h"

#include "ipex/kernel/column_sums.h"

void ipex_k_column_sums_f32(const float*, const float* partial, int64_t blocks, int64_t stride,
                            float* out, int64_t cols) {
  ipex::finish_columns<float>(partial, blocks, stride, out, cols);
}
void ipex_k_column_sums_bf16(const ipex::BFloat16*, const float* partial, int64_t blocks,
                             int64_t stride, float* out, int64_t cols) {
  ipex::finish_columns<ipex::BFloat16>(partial, blocks, stride, out, cols);
}
void ipex_k_column_sums_f16(const ipex::Half*, const float* partial, int64_t blocks, int64_t stride,
                            float* out, int64_t cols) {
  ipex::finish_columns<ipex::Half>(partial, blocks, stride, out, cols);
}
