// SPDX-License-Identifier: Apache-2.0
// Attention to keys and values of the dtype of the queries.
#include "attention.h"

template <typename T>
IPEX_KERNEL(3)
void attention(const T* q, const T* k, const T* v, T* out, const float* mask, const float* slopes,
               const float* sinks, const int* q_starts, const int* k_starts, const int* k_lengths,
               const int* table, long group, long queries, long keys, long size, long value_size,
               long q_batch, long q_head, long q_row, long k_batch, long k_head, long k_row,
               long v_batch, long v_head, long v_row, long o_batch, long o_head, long o_row,
               long m_batch, long m_head, long m_row, long m_key, long slope_batch, long table_row,
               long block_size, long behind, long ahead, float scale, float softcap,
               int bottom_right) {
  attend<T, T>(q, k, v, out, mask, slopes, sinks, q_starts, k_starts, k_lengths, table, group,
               queries, keys, size, value_size, q_batch, q_head, q_row, k_batch, k_head, k_row,
               v_batch, v_head, v_row, o_batch, o_head, o_row, m_batch, m_head, m_row, m_key,
               slope_batch, table_row, block_size, behind, ahead, scale, softcap, bottom_right, 1.f,
               nullptr, nullptr, 0, 0, 0, 0, 0, 0);
}

#define ATTENTION(T) template void attention<T>(IPEX_ATTENTION_ARGUMENTS(T));
ATTENTION(float)
ATTENTION(half)
ATTENTION(bf16)
