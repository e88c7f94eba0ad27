// SPDX-License-Identifier: Apache-2.0
// Steps of optimizers for parameters whose float32 numbers the optimizer keeps; the gradient has
// the dtype G. P is float (`other` is the copy of the model, or null) or bf16 (the upper halves of
// the numbers; `other` has the lower ones).
#include "names.h"

using Index = unsigned long;

template <typename P, typename G>
struct Weight {
  P* w;
  G* other;

  IPEX_INLINE float read(Index i) const {
    if constexpr (std::is_same_v<P, bf16>) {
      return sycl::bit_cast<float>(static_cast<unsigned int>(w[i].bits) << 16 | other[i].bits);
    } else {
      return w[i];
    }
  }
  IPEX_INLINE void write(Index i, float value) const {
    if constexpr (std::is_same_v<P, bf16>) {
      const unsigned int bits = sycl::bit_cast<unsigned int>(value);
      unsigned int low = bits & 0xffff;
#ifdef __NVPTX__
      // Or else the register of the float is stored as 16 bits, which its assembler (CUDA 13)
      // takes for a conversion to an integer.
      asm volatile("" : "+r"(low));
#endif
      w[i].bits = static_cast<unsigned short>(bits >> 16);
      other[i].bits = static_cast<unsigned short>(low);
    } else {
      w[i] = value;
      if (other != nullptr) store(other, i, value);
    }
  }
};

template <typename P, typename G>
IPEX_KERNEL(1)
void read_weights(P* w, G* other, float* out, Index n) {
  const Index i = global_id();
  if (i < n) out[i] = Weight<P, G>{w, other}.read(i);
}

// rest is 1 - beta, which is not exact as a difference of floats.
template <typename P, typename G>
IPEX_KERNEL(1)
void adam_step(P* w, G* other, const G* grads, float* m, float* v, float* top, Index n, float beta1,
               float beta2, float rest1, float rest2, float root_correction, float rate,
               float decay, float shrink, float eps, int decoupled, int maximize) {
  const Index i = global_id();
  if (i >= n) return;
  const Weight<P, G> weight{w, other};
  float value = weight.read(i);
  float g = maximize ? -load(grads, i) : load(grads, i);
  if (decoupled) {
    value *= shrink;
  } else {
    g += value * decay;
  }
  const float mean = m[i] * beta1 + g * rest1;
  float square = v[i] * beta2 + g * g * rest2;
  m[i] = mean;
  v[i] = square;
  if (top) {
    square = sycl::fmax(top[i], square);
    top[i] = square;
  }
  weight.write(i, value - mean / (sycl::sqrt(square) / root_correction + eps) * rate);
}

// With norms (or null) a step of LARS. `buffer` is null without momentum; `first`: it has no
// history yet.
template <typename P, typename G>
IPEX_KERNEL(1)
void sgd_step(P* w, G* other, const G* grads, float* buffer, Index n, const float* norm_w,
              const float* norm_g, float lr, float decay, float momentum, float share, float eeta,
              float eps, int nesterov, int first, int maximize) {
  const Index i = global_id();
  if (i >= n) return;
  const Weight<P, G> weight{w, other};
  const float value = weight.read(i);
  float g = (maximize ? -load(grads, i) : load(grads, i)) + value * decay;
  if (norm_w && *norm_w > 0.f && *norm_g > 0.f)
    g *= eeta * *norm_w / (*norm_g + decay * *norm_w + eps);
  if (buffer) {
    const float moved = first ? g : buffer[i] * momentum + g * share;
    buffer[i] = moved;
    g = nesterov ? g + moved * momentum : moved;
  }
  weight.write(i, value - g * lr);
}

template <typename P, typename G>
IPEX_KERNEL(1)
void adagrad_step(P* w, G* other, const G* grads, float* sums, Index n, float rate, float decay,
                  float eps, int maximize) {
  const Index i = global_id();
  if (i >= n) return;
  const Weight<P, G> weight{w, other};
  const float value = weight.read(i);
  const float g = (maximize ? -load(grads, i) : load(grads, i)) + value * decay;
  const float sum = sums[i] + g * g;
  sums[i] = sum;
  weight.write(i, value - g / (sycl::sqrt(sum) + eps) * rate);
}

// Means and direction of LAMB; the caller computes the norms of weights and direction.
template <typename P, typename G>
IPEX_KERNEL(1)
void lamb_direction(P* w, G* other, const G* grads, float* m, float* v, float* direction, Index n,
                    float beta1, float beta2, float rest1, float rest2, float correction1,
                    float correction2, float decay, float eps) {
  const Index i = global_id();
  if (i >= n) return;
  const float g = load(grads, i);
  const float mean = m[i] * beta1 + g * rest1;
  const float square = v[i] * beta2 + g * g * rest2;
  m[i] = mean;
  v[i] = square;
  direction[i] = mean / correction1 / (sycl::sqrt(square / correction2) + eps) +
                 Weight<P, G>{w, other}.read(i) * decay;
}
template <typename P, typename G>
IPEX_KERNEL(1)
void lamb_apply(P* w, G* other, const float* direction, Index n, const float* norm_w,
                const float* norm_direction, float lr) {
  const Index i = global_id();
  if (i >= n) return;
  const Weight<P, G> weight{w, other};
  const float ratio = *norm_w > 0.f && *norm_direction > 0.f ? *norm_w / *norm_direction : 1.f;
  weight.write(i, weight.read(i) - direction[i] * (lr * ratio));
}

#define STEPS(P, G)                                                                                \
  template void read_weights<P, G>(P*, G*, float*, Index);                                         \
  template void adam_step<P, G>(P*, G*, const G*, float*, float*, float*, Index, float, float,     \
                                float, float, float, float, float, float, float, int, int);        \
  template void sgd_step<P, G>(P*, G*, const G*, float*, Index, const float*, const float*, float, \
                               float, float, float, float, float, int, int, int);                  \
  template void adagrad_step<P, G>(P*, G*, const G*, float*, Index, float, float, float, int);     \
  template void lamb_direction<P, G>(P*, G*, const G*, float*, float*, float*, Index, float,       \
                                     float, float, float, float, float, float, float);             \
  template void lamb_apply<P, G>(P*, G*, const float*, Index, const float*, const float*, float);
STEPS(float, float)
STEPS(float, half)
STEPS(float, bf16)
STEPS(bf16, bf16)
