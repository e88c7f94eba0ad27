// SPDX-License-Identifier: Apache-2.0
// Cells of recurrent networks, one element of the hidden state per work-item. Gates are in torch's
// order: input, forget, cell, output; reset, update, new. Missing biases and gradients are null.
#include "names.h"

inline float sigmoid(float x) { return 1.f / (1.f + sycl::exp(-x)); }
template <typename T>
inline float load_or_zero(const T* p, unsigned long i) {
  return p != nullptr ? load(p, i) : 0.f;
}

template <typename T>
IPEX_KERNEL(1)
void lstm_cell(const T* input, const T* hidden, const T* cx, const T* input_bias,
               const T* hidden_bias, T* hy, T* cy, T* workspace, unsigned long n,
               unsigned long size) {
  const unsigned long item = global_id();
  if (item >= n) return;
  const unsigned long j = item % size;
  const unsigned long at = item / size * 4 * size + j;
  float gate[4];
#pragma unroll
  for (unsigned long g = 0; g < 4; ++g) {
    gate[g] = load(input, at + g * size) + load(hidden, at + g * size) +
              load_or_zero(input_bias, g * size + j) + load_or_zero(hidden_bias, g * size + j);
    gate[g] = g == 2 ? sycl::tanh(gate[g]) : sigmoid(gate[g]);
    store(workspace, at + g * size, gate[g]);
  }
  const float c = gate[1] * load(cx, item) + gate[0] * gate[2];
  store(cy, item, c);
  store(hy, item, gate[3] * sycl::tanh(c));
}

template <typename T>
IPEX_KERNEL(1)
void lstm_cell_backward(const T* grad_hy, const T* grad_cy, const T* cx, const T* cy,
                        const T* workspace, T* grad_gates, T* grad_cx, unsigned long n,
                        unsigned long size) {
  const unsigned long item = global_id();
  if (item >= n) return;
  const unsigned long at = item / size * 4 * size + item % size;
  const float i = load(workspace, at);
  const float f = load(workspace, at + size);
  const float g = load(workspace, at + 2 * size);
  const float o = load(workspace, at + 3 * size);
  const float t = sycl::tanh(load(cy, item));
  const float dh = load_or_zero(grad_hy, item);
  const float dc = dh * o * (1.f - t * t) + load_or_zero(grad_cy, item);
  store(grad_gates, at, dc * g * i * (1.f - i));
  store(grad_gates, at + size, dc * load(cx, item) * f * (1.f - f));
  store(grad_gates, at + 2 * size, dc * i * (1.f - g * g));
  store(grad_gates, at + 3 * size, dh * t * o * (1.f - o));
  store(grad_cx, item, dc * f);
}

// The workspace holds reset, update, new, hx and the hidden part of new with its bias.
template <typename T>
IPEX_KERNEL(1)
void gru_cell(const T* input, const T* hidden, const T* hx, const T* input_bias,
              const T* hidden_bias, T* hy, T* workspace, unsigned long n, unsigned long size) {
  const unsigned long item = global_id();
  if (item >= n) return;
  const unsigned long j = item % size;
  const unsigned long row = item / size;
  const unsigned long at = row * 3 * size + j;
  float in[3];
  float own[3];
#pragma unroll
  for (unsigned long g = 0; g < 3; ++g) {
    in[g] = load(input, at + g * size) + load_or_zero(input_bias, g * size + j);
    own[g] = load(hidden, at + g * size) + load_or_zero(hidden_bias, g * size + j);
  }
  const float r = sigmoid(in[0] + own[0]);
  const float z = sigmoid(in[1] + own[1]);
  const float value = sycl::tanh(in[2] + r * own[2]);
  const float h = load(hx, item);
  store(hy, item, value + z * (h - value));
  T* saved = workspace + row * 5 * size + j;
  store(saved, 0, r);
  store(saved, size, z);
  store(saved, 2 * size, value);
  store(saved, 3 * size, h);
  store(saved, 4 * size, own[2]);
}

template <typename T>
IPEX_KERNEL(1)
void gru_cell_backward(const T* grad_hy, const T* workspace, T* grad_input, T* grad_hidden,
                       T* grad_hx, unsigned long n, unsigned long size) {
  const unsigned long item = global_id();
  if (item >= n) return;
  const unsigned long row = item / size;
  const T* saved = workspace + row * 5 * size + item % size;
  const float r = load(saved, 0);
  const float z = load(saved, size);
  const float value = load(saved, 2 * size);
  const float grad = load(grad_hy, item);
  const float dz = grad * (load(saved, 3 * size) - value) * z * (1.f - z);
  const float dn = grad * (1.f - z) * (1.f - value * value);
  const float dr = dn * load(saved, 4 * size) * r * (1.f - r);
  const unsigned long at = row * 3 * size + item % size;
  store(grad_input, at, dr);
  store(grad_input, at + size, dz);
  store(grad_input, at + 2 * size, dn);
  store(grad_hidden, at, dr);
  store(grad_hidden, at + size, dz);
  store(grad_hidden, at + 2 * size, dn * r);
  store(grad_hx, item, grad * z);
}

#define CELLS(T)                                                                                \
  template void lstm_cell<T>(const T*, const T*, const T*, const T*, const T*, T*, T*, T*,      \
                             unsigned long, unsigned long);                                     \
  template void lstm_cell_backward<T>(const T*, const T*, const T*, const T*, const T*, T*, T*, \
                                      unsigned long, unsigned long);                            \
  template void gru_cell<T>(const T*, const T*, const T*, const T*, const T*, T*, T*,           \
                            unsigned long, unsigned long);                                      \
  template void gru_cell_backward<T>(const T*, const T*, T*, T*, T*, unsigned long, unsigned long);
CELLS(float)
CELLS(half)
CELLS(bf16)
