// SPDX-License-Identifier: Apache-2.0
// Steps of the fused optimizers of torch, float32; rest is 1 - beta, which is not exact as a
// difference of floats. Numbers that a training loop keeps on the device (steps, learning rate,
// scale of the gradients, whether one of them was infinite) come as pointers, which may be null.
#include "names.h"

// 1 - beta^step, exact also where that is near 0.
inline float correction(float log_beta, float step) { return -sycl::expm1(step * log_beta); }

// The gradient as the step uses it; it is written back where it was scaled.
inline float gradient(float* grads, unsigned long i, const float* scale, int maximize) {
  float g = grads[i];
  if (scale) {
    g /= *scale;
    grads[i] = g;
  }
  return maximize ? -g : g;
}

IPEX_KERNEL(1)
void adam(float* w, float* grads, float* m, float* v, float* top, unsigned long n,
          const float* step, const float* rates, float rate, float beta1, float beta2, float rest1,
          float rest2, float log_beta1, float log_beta2, float decay, float eps, int decoupled,
          int maximize, const float* scale, const float* infinite) {
  const unsigned long i = global_id();
  if (i >= n || (infinite && *infinite == 1.f)) return;
  const float t = *step;
  const float lr = rates ? *rates : rate;
  float g = gradient(grads, i, scale, maximize);
  float weight = w[i];
  if (decoupled) {
    weight -= lr * decay * weight;
  } else {
    g += weight * decay;
  }
  const float mean = beta1 * m[i] + rest1 * g;
  float square = beta2 * v[i] + rest2 * g * g;
  m[i] = mean;
  v[i] = square;
  if (top) {
    square = sycl::fmax(top[i], square);
    top[i] = square;
  }
  const float root = sycl::sqrt(square) / sycl::sqrt(correction(log_beta2, t)) + eps;
  w[i] = weight - lr / correction(log_beta1, t) * mean / root;
}

// `buffer` is null without momentum; `first`: it has no history yet.
IPEX_KERNEL(1)
void sgd(float* w, float* grads, float* buffer, unsigned long n, const float* rates, float rate,
         float decay, float momentum, float share, int nesterov, int first, int maximize,
         const float* scale, const float* infinite) {
  const unsigned long i = global_id();
  if (i >= n || (infinite && *infinite == 1.f)) return;
  float g = gradient(grads, i, scale, maximize) + w[i] * decay;
  if (buffer) {
    const float moved = first ? g : momentum * buffer[i] + share * g;
    buffer[i] = moved;
    g = nesterov ? g + momentum * moved : moved;
  }
  w[i] -= (rates ? *rates : rate) * g;
}
