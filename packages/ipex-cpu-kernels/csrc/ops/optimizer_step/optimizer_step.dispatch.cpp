// SPDX-License-Identifier: Apache-2.0
// Built without contraction to fused multiply-adds: every level then gives the bits of the
// definition, so that the lower halves of split parameters are the same everywhere.
#include "optimizer_step.h"

#include "ipex/kernel/vec.h"

namespace ipex {
namespace {

typedef uint16_t u16x __attribute__((vector_size(2 * kLanes)));

// kLanes or, at the end of an array, fewer elements.
IPEX_INLINE u16x load_bits(const uint16_t* p, int64_t count) {
  u16x r = {};
  if (count == kLanes)
    __builtin_memcpy(&r, p, sizeof(r));
  else
    for (int64_t i = 0; i < count; ++i) r[i] = p[i];
  return r;
}
IPEX_INLINE void store_bits(uint16_t* p, u16x v, int64_t count) {
  if (count == kLanes)
    __builtin_memcpy(p, &v, sizeof(v));
  else
    for (int64_t i = 0; i < count; ++i) p[i] = v[i];
}
IPEX_INLINE f32v join(u16x top, u16x low) {
  return as_float((__builtin_convertvector(top, i32v) << 16) | __builtin_convertvector(low, i32v));
}
IPEX_INLINE u16x upper(f32v x) { return __builtin_convertvector(as_int(x) >> 16, u16x); }
IPEX_INLINE u16x lower(f32v x) { return __builtin_convertvector(as_int(x), u16x); }

template <typename T>
IPEX_INLINE f32v get(const T* p, int64_t count) {
  return count == kLanes ? load(p) : load_n(p, count);
}
template <typename T>
IPEX_INLINE void put(T* p, f32v x, int64_t count) {
  if (count == kLanes)
    store(p, x);
  else
    store_n(p, x, count);
}

// A parameter in float32, with or without a copy of type T.
template <typename T>
struct Whole {
  float* values;
  T* copy;
  explicit Whole(const StepArrays& a)
      : values(static_cast<float*>(a.param)), copy(static_cast<T*>(a.param2)) {}
  IPEX_INLINE f32v read(int64_t i, int64_t count) const { return get(values + i, count); }
  IPEX_INLINE void write(int64_t i, f32v x, int64_t count) const {
    put(values + i, x, count);
    if (copy) put(copy + i, x, count);
  }
};

// A parameter as upper and lower halves of its bits.
struct Split {
  uint16_t* top;
  uint16_t* low;
  explicit Split(const StepArrays& a)
      : top(static_cast<uint16_t*>(a.param)), low(static_cast<uint16_t*>(a.param2)) {}
  IPEX_INLINE f32v read(int64_t i, int64_t count) const {
    return join(load_bits(top + i, count), load_bits(low + i, count));
  }
  IPEX_INLINE void write(int64_t i, f32v x, int64_t count) const {
    store_bits(top + i, upper(x), count);
    store_bits(low + i, lower(x), count);
  }
};

// Calls f(i, count) for vectors of elements; count is a constant in all calls but the last.
template <typename F>
IPEX_INLINE void for_vectors(int64_t n, const F& f) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) f(i, int64_t{kLanes});
  if (i < n) f(i, n - i);
}

// Calls f(parameter, grad) with the parameter in its form.
template <typename T, typename F>
IPEX_INLINE void with_param(const StepArrays& a, const F& f) {
  const T* grad = static_cast<const T*>(a.grad);
  if constexpr (kIsBFloat16<T>) {
    if (a.split) return f(Split(a), grad);
  }
  f(Whole<T>(a), grad);
}

// The steps below copy their settings and pointers: otherwise the compiler reads them from memory
// again after each store, and fewer vectors are on their way at once.
template <typename T>
IPEX_INLINE void sgd(const StepArrays& a, int64_t n, const SgdStep& step) {
  const SgdStep s = step;
  with_param<T>(a, [&](const auto& param, const T* grad) IPEX_LAMBDA {
    float* const buffer = a.state[0];
    for_vectors(n, [&](int64_t i, int64_t count) IPEX_LAMBDA {
      const f32v w = param.read(i, count);
      f32v g = get(grad + i, count) * set1(s.sign);
      if (s.weight_decay != 0.0f) g = g + w * set1(s.weight_decay);
      if (s.factor != 1.0f) g = g * set1(s.factor);
      if (buffer) {
        const f32v b = s.first ? g : get(buffer + i, count) * set1(s.momentum) + g * set1(s.keep);
        put(buffer + i, b, count);
        g = s.nesterov ? g + b * set1(s.momentum) : b;
      }
      param.write(i, w - g * set1(s.lr), count);
    });
  });
}

template <typename T>
IPEX_INLINE void adagrad(const StepArrays& a, int64_t n, const AdagradStep& step) {
  const AdagradStep s = step;
  with_param<T>(a, [&](const auto& param, const T* grad) IPEX_LAMBDA {
    float* const squares = a.state[0];
    for_vectors(n, [&](int64_t i, int64_t count) IPEX_LAMBDA {
      const f32v w = param.read(i, count);
      f32v g = get(grad + i, count) * set1(s.sign);
      if (s.weight_decay != 0.0f) g = g + w * set1(s.weight_decay);
      const f32v sum = get(squares + i, count) + g * g;
      put(squares + i, sum, count);
      param.write(i, w - g / (sqrt(sum) + set1(s.eps)) * set1(s.lr), count);
    });
  });
}

template <typename T>
IPEX_INLINE void adam(const StepArrays& a, int64_t n, const AdamStep& step) {
  const AdamStep s = step;
  with_param<T>(a, [&](const auto& param, const T* grad) IPEX_LAMBDA {
    float *const means = a.state[0], *const squares = a.state[1], *const largest = a.state[2];
    for_vectors(n, [&](int64_t i, int64_t count) IPEX_LAMBDA {
      f32v w = param.read(i, count);
      f32v g = get(grad + i, count) * set1(s.sign);
      if (s.weight_decay != 0.0f) g = g + w * set1(s.weight_decay);
      w = w * set1(s.shrink);
      const f32v m = get(means + i, count) * set1(s.beta1) + g * set1(s.rest1);
      f32v v = get(squares + i, count) * set1(s.beta2) + g * g * set1(s.rest2);
      put(means + i, m, count);
      put(squares + i, v, count);
      if (largest) {
        v = max(get(largest + i, count), v);
        put(largest + i, v, count);
      }
      const f32v d = sqrt(v) / set1(s.root2) + set1(s.eps);
      param.write(i, w - m / d * set1(s.lr), count);
    });
  });
}

IPEX_INLINE f32v lamb_direction(f32v w, f32v m, f32v v, const LambStep& s) {
  const f32v d = sqrt(v / set1(s.correction2)) + set1(s.eps);
  return m / set1(s.correction1) / d + w * set1(s.weight_decay);
}

// A sum of squares in double, a part for each lane.
struct Squares {
  double lanes[kLanes] = {};
  IPEX_INLINE void add(f32v x, int64_t count) {
    const f32v y = count == kLanes ? x : keep_n(x, count, zero());
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) lanes[i] += static_cast<double>(y[i]) * y[i];
  }
  double total() const {
    double r = 0;
    for (const double one : lanes) r += one;
    return r;
  }
};

template <typename T>
IPEX_INLINE void lamb_state(const StepArrays& a, int64_t n, const LambStep& s, double* sums) {
  Squares of_param, of_direction;
  with_param<T>(a, [&](const auto& param, const T* grad) IPEX_LAMBDA {
    for_vectors(n, [&](int64_t i, int64_t count) IPEX_LAMBDA {
      const f32v w = param.read(i, count), g = get(grad + i, count);
      const f32v m = get(a.state[0] + i, count) * set1(s.beta1) + g * set1(s.rest1);
      const f32v v = get(a.state[1] + i, count) * set1(s.beta2) + g * g * set1(s.rest2);
      put(a.state[0] + i, m, count);
      put(a.state[1] + i, v, count);
      of_param.add(w, count);
      of_direction.add(lamb_direction(w, m, v, s), count);
    });
  });
  sums[0] += of_param.total();
  sums[1] += of_direction.total();
}

template <typename T>
IPEX_INLINE void lamb_apply(const StepArrays& a, int64_t n, const LambStep& s) {
  with_param<T>(a, [&](const auto& param, const T*) IPEX_LAMBDA {
    for_vectors(n, [&](int64_t i, int64_t count) IPEX_LAMBDA {
      const f32v w = param.read(i, count);
      const f32v u = lamb_direction(w, get(a.state[0] + i, count), get(a.state[1] + i, count), s);
      param.write(i, w - u * set1(s.lr), count);
    });
  });
}

template <typename T>
IPEX_INLINE void lars_sums(const StepArrays& a, int64_t n, double* sums) {
  Squares of_param, of_grad;
  with_param<T>(a, [&](const auto& param, const T* grad) IPEX_LAMBDA {
    for_vectors(n, [&](int64_t i, int64_t count) IPEX_LAMBDA {
      of_param.add(param.read(i, count), count);
      of_grad.add(get(grad + i, count), count);
    });
  });
  sums[0] += of_param.total();
  sums[1] += of_grad.total();
}

}  // namespace
}  // namespace ipex

#define IPEX_STEP_KERNELS(name, T)                                                        \
  void ipex_k_sgd_step_##name(const ipex::StepArrays& arrays, int64_t n,                  \
                              const ipex::SgdStep& step) {                                \
    ipex::sgd<T>(arrays, n, step);                                                        \
  }                                                                                       \
  void ipex_k_adagrad_step_##name(const ipex::StepArrays& arrays, int64_t n,              \
                                  const ipex::AdagradStep& step) {                        \
    ipex::adagrad<T>(arrays, n, step);                                                    \
  }                                                                                       \
  void ipex_k_adam_step_##name(const ipex::StepArrays& arrays, int64_t n,                 \
                               const ipex::AdamStep& step) {                              \
    ipex::adam<T>(arrays, n, step);                                                       \
  }                                                                                       \
  void ipex_k_lamb_state_##name(const ipex::StepArrays& arrays, int64_t n,                \
                                const ipex::LambStep& step, double* sums) {               \
    ipex::lamb_state<T>(arrays, n, step, sums);                                           \
  }                                                                                       \
  void ipex_k_lamb_apply_##name(const ipex::StepArrays& arrays, int64_t n,                \
                                const ipex::LambStep& step) {                             \
    ipex::lamb_apply<T>(arrays, n, step);                                                 \
  }                                                                                       \
  void ipex_k_lars_sums_##name(const ipex::StepArrays& arrays, int64_t n, double* sums) { \
    ipex::lars_sums<T>(arrays, n, sums);                                                  \
  }

IPEX_STEP_KERNELS(f32, float)
IPEX_STEP_KERNELS(bf16, ipex::BFloat16)
IPEX_STEP_KERNELS(f16, ipex::Half)

void ipex_k_split_bits_f32(const float* x, uint16_t* top, uint16_t* low, int64_t n) {
  using namespace ipex;
  for_vectors(n, [&](int64_t i, int64_t count) IPEX_LAMBDA {
    const f32v v = get(x + i, count);
    store_bits(top + i, upper(v), count);
    store_bits(low + i, lower(v), count);
  });
}

void ipex_k_join_bits_bf16(const uint16_t* top, const uint16_t* low, float* y, int64_t n) {
  using namespace ipex;
  for_vectors(n, [&](int64_t i, int64_t count) IPEX_LAMBDA {
    put(y + i, join(load_bits(top + i, count), load_bits(low + i, count)), count);
  });
}
