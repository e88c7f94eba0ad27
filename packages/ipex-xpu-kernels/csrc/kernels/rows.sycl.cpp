// SPDX-License-Identifier: Apache-2.0
// Norms and softmax: one work-group for each row, whose work-items take neighboring elements. The
// passes over a row find it in the cache.
#include "names.h"

// Softmax
// ---------------------------------------------------------------------------------------------------------------

// Powers of a row that is not longer.
#ifndef IPEX_GPU  // which has registers for them
constexpr unsigned long kPowers = 8192;
sycl::ext::oneapi::experimental::work_group_static<float[kPowers]> powers_of_row;
#endif

// exp(value - top) of rows of T; `shift` is of `top`. On a GPU, where the result is rounded to 16
// bits, as a power of 2 that has an instruction: sycl::exp and sycl::native::exp may be calls. What
// the rounding of `shift` is, all powers of a row share.
#ifdef IPEX_GPU
template <typename T>
constexpr bool kShort = sizeof(T) == 2;
#else
template <typename T>
constexpr bool kShort = false;
#endif
using ipex::kLog2e;
template <typename T>
IPEX_INLINE inline float shift_of(float top) {
  return kShort<T> ? top * kLog2e : top;
}
template <typename T>
IPEX_INLINE inline float power(float value, float shift) {
  if constexpr (kShort<T>) return __builtin_elementwise_exp2(value * kLog2e - shift);
  return sycl::exp(value - shift);
}

template <typename T, bool logarithm>
IPEX_KERNEL(1)
void softmax(const T* x, T* y, unsigned long columns) {
  const Row row(columns);
  x += row.begin;
  y += row.begin;
  with_values(row, x, y, [=](const auto& values) IPEX_INLINE {
    const float top = row.maximum_of(values);
#ifndef IPEX_GPU
    if constexpr (!logarithm) {
      if (columns <= kPowers) {
        float* powers = *&powers_of_row;  // of which an item has its own only
        const float scale =
            1.f / row.sum([=](unsigned long i) { return powers[i] = sycl::exp(load(x, i) - top); });
        row.each([=](unsigned long i) { store(y, i, powers[i] * scale); });
        return;
      }
    }
#endif
    const float shift = shift_of<T>(top);
    const float sum = row.sum_of(
        values, [=](unsigned long, float value) IPEX_INLINE { return power<T>(value, shift); });
    if constexpr (logarithm) {
      const float less = top + sycl::log(sum);
      values.put(y, [=](unsigned long, float value) IPEX_INLINE { return value - less; });
    } else {
      const float scale = 1.f / sum;
      values.put(y, [=](unsigned long, float value)
                        IPEX_INLINE { return power<T>(value, shift) * scale; });
    }
  });
}

template <typename T, bool logarithm>
IPEX_KERNEL(1)
void softmax_backward(const T* grad, const T* y, T* out, unsigned long columns) {
  const Row row(columns);
  grad += row.begin;
  y += row.begin;
  out += row.begin;
  const float sum = row.sum(
      [=](unsigned long i) { return logarithm ? load(grad, i) : load(grad, i) * load(y, i); });
  row.each([=](unsigned long i) {
    const float g = load(grad, i);
    const float value = load(y, i);
    store(out, i, logarithm ? g - sycl::exp(value) * sum : (g - sum) * value);
  });
}

// Norms: weight and bias are of the dtype of the rows or float; either may be missing (null).
// ----------------------------------------------------------------------------

// With a residual, x + residual is rounded to the dtype, kept in `sum` and normalized.
template <typename T>
IPEX_INLINE inline void add_residual(const Row& row, const T* x, const T* residual, T* sum) {
  x += row.begin;
  residual += row.begin;
  sum += row.begin;
#ifdef IPEX_GPU
  constexpr int kCount = ipex::Wide<T>::count;
  if (row.columns % kCount == 0 && ipex::aligned(x, residual, sum)) {
    row.each_of(row.columns / kCount, [=](unsigned long i) IPEX_INLINE {
      const auto a = ipex::load_wide(x + i * kCount);
      const auto b = ipex::load_wide(residual + i * kCount);
      ipex::store_wide(sum + i * kCount,
                       ipex::Wide<T>::of([&](int j) IPEX_INLINE { return a.get(j) + b.get(j); }));
    });
  } else {
    row.each([=](unsigned long i) { store(sum, i, load(x, i) + load(residual, i)); });
  }
  sycl::group_barrier(row.group);  // other items may read them
#else
  row.each([=](unsigned long i) { store(sum, i, load(x, i) + load(residual, i)); });
#endif
}

template <typename T, typename W, bool with_residual>
IPEX_KERNEL(1)
void rms_norm(const T* x, const T* residual, const W* weight, T* y, T* sum, unsigned long columns,
              float eps, float offset) {
  const Row row(columns);
  if constexpr (with_residual) add_residual(row, x, residual, sum);
  T* const out = y + row.begin;
  with_values(row, (with_residual ? sum : x) + row.begin, out, [=](const auto& values) IPEX_INLINE {
    const float squares =
        row.sum_of(values, [](unsigned long, float value) IPEX_INLINE { return value * value; });
    const float scale = 1.f / sycl::sqrt(squares / columns + eps);
    // Without weights a factor of 1.
    const float more = weight ? offset : 0.f;
    values.put(out, weight, static_cast<const W*>(nullptr), 1.f, 0.f,
               [=](float value, float factor, float)
                   IPEX_INLINE { return value * scale * (factor + more); });
  });
}

template <typename T, typename W, bool with_residual>
IPEX_KERNEL(1)
void layer_norm(const T* x, const T* residual, const W* weight, const W* bias, T* y, T* sum,
                W* means, W* rstds, unsigned long columns, float eps) {
  const Row row(columns);
  if constexpr (with_residual) add_residual(row, x, residual, sum);
  T* const out = y + row.begin;
  with_values(row, (with_residual ? sum : x) + row.begin, out, [=](const auto& values) IPEX_INLINE {
    const float mean =
        row.sum_of(values, [](unsigned long, float value) IPEX_INLINE { return value; }) / columns;
    const float squares = row.sum_of(values, [=](unsigned long, float value) IPEX_INLINE {
      return (value - mean) * (value - mean);
    });
    const float rstd = 1.f / sycl::sqrt(squares / columns + eps);
    if (means && row.leader()) {
      store(means, row.index, mean);
      store(rstds, row.index, rstd);
    }
    values.put(out, weight, bias, 1.f, 0.f,
               [=](float value, float factor, float addend)
                   IPEX_INLINE { return (value - mean) * rstd * factor + addend; });
  });
}

template <typename T, typename W>
IPEX_KERNEL(1)
void layer_norm_backward(const T* grad, const T* x, const W* means, const W* rstds, const W* weight,
                         T* out, unsigned long columns) {
  const Row row(columns);
  grad += row.begin;
  x += row.begin;
  out += row.begin;
  const float mean = load(means, row.index);
  const float rstd = load(rstds, row.index);
  const auto weighted = [=](unsigned long i) {
    return weight ? load(grad, i) * load(weight, i) : load(grad, i);
  };
  const float sum = row.sum(weighted) / columns;
  const float products =
      row.sum([=](unsigned long i) { return weighted(i) * (load(x, i) - mean); }) * rstd / columns;
  row.each([=](unsigned long i) {
    const float normal = (load(x, i) - mean) * rstd;
    store(out, i, (weighted(i) - sum - normal * products) * rstd);
  });
}

// Gradients of weight and bias: each work-item sums one column over a part of the rows; the parts
// are added by the caller. parts: [number of parts, 2, columns].
template <typename T, typename W>
IPEX_KERNEL(2)
void layer_norm_weight_backward(const T* grad, const T* x, const W* means, const W* rstds,
                                float* parts, unsigned long rows, unsigned long columns,
                                unsigned long rows_per_part) {
  const auto item = sycl::ext::oneapi::this_work_item::get_nd_item<2>();
  const unsigned long part = item.get_global_id(0);
  const unsigned long column = item.get_global_id(1);
  if (column >= columns) return;
  const unsigned long begin = part * rows_per_part;
  const unsigned long end = begin + rows_per_part < rows ? begin + rows_per_part : rows;
  float weight = 0.f;
  float bias = 0.f;
  for (unsigned long r = begin; r < end; ++r) {
    const float g = load(grad, r * columns + column);
    weight += g * (load(x, r * columns + column) - load(means, r)) * load(rstds, r);
    bias += g;
  }
  parts[2 * part * columns + column] = weight;
  parts[(2 * part + 1) * columns + column] = bias;
}

#define SOFTMAX(T, logarithm)                                       \
  template void softmax<T, logarithm>(const T*, T*, unsigned long); \
  template void softmax_backward<T, logarithm>(const T*, const T*, T*, unsigned long);
SOFTMAX(float, false)
SOFTMAX(float, true)
SOFTMAX(half, false)
SOFTMAX(half, true)
SOFTMAX(bf16, false)
SOFTMAX(bf16, true)

#define NORMS_OF(T, W, with_residual)                                                              \
  template void rms_norm<T, W, with_residual>(const T*, const T*, const W*, T*, T*, unsigned long, \
                                              float, float);                                       \
  template void layer_norm<T, W, with_residual>(const T*, const T*, const W*, const W*, T*, T*,    \
                                                W*, W*, unsigned long, float);
#define NORMS(T, W)                                                                              \
  NORMS_OF(T, W, false)                                                                          \
  NORMS_OF(T, W, true)                                                                           \
  template void layer_norm_backward<T, W>(const T*, const T*, const W*, const W*, const W*, T*,  \
                                          unsigned long);                                        \
  template void layer_norm_weight_backward<T, W>(const T*, const T*, const W*, const W*, float*, \
                                                 unsigned long, unsigned long, unsigned long);
NORMS(float, float)
NORMS(half, half)
NORMS(half, float)
NORMS(bf16, bf16)
NORMS(bf16, float)
