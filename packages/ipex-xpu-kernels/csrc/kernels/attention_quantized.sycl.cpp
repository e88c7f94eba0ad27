// SPDX-License-Identifier: Apache-2.0
// Attention to keys and values that a cache holds in 8 bits.
#include "attention.h"

template <typename T, typename C>
IPEX_KERNEL(3)
void attention_quantized(const T* q, const C* k, const C* v, T* out, const float* mask,
                         const float* slopes, const float* sinks, const int* q_starts,
                         const int* k_starts, const int* k_lengths, const int* table, long group,
                         long queries, long keys, long size, long value_size, long q_batch,
                         long q_head, long q_row, long k_batch, long k_head, long k_row,
                         long v_batch, long v_head, long v_row, long o_batch, long o_head,
                         long o_row, long m_batch, long m_head, long m_row, long m_key,
                         long slope_batch, long table_row, long block_size, long behind, long ahead,
                         float scale, float softcap, int bottom_right, float value_scale,
                         const float* k_rows, const float* v_rows, long kr_batch, long kr_head,
                         long kr_row, long vr_batch, long vr_head, long vr_row) {
  attend<T, C>(q, k, v, out, mask, slopes, sinks, q_starts, k_starts, k_lengths, table, group,
               queries, keys, size, value_size, q_batch, q_head, q_row, k_batch, k_head, k_row,
               v_batch, v_head, v_row, o_batch, o_head, o_row, m_batch, m_head, m_row, m_key,
               slope_batch, table_row, block_size, behind, ahead, scale, softcap, bottom_right,
               value_scale, k_rows, v_rows, kr_batch, kr_head, kr_row, vr_batch, vr_head, vr_row);
}

#define QUANTIZED_OF(T, C)                                                                      \
  template void attention_quantized<T, C>(                                                      \
      const T*, const C*, const C*, T*, const float*, const float*, const float*, const int*,   \
      const int*, const int*, const int*, long, long, long, long, long, long, long, long, long, \
      long, long, long, long, long, long, long, long, long, long, long, long, long, long, long, \
      long, long, float, float, int, float, const float*, const float*, long, long, long, long, \
      long, long);
#define QUANTIZED(T) QUANTIZED_OF(T, signed char) QUANTIZED_OF(T, e5m2) QUANTIZED_OF(T, e4m3)
QUANTIZED(float)
QUANTIZED(half)
QUANTIZED(bf16)
