// SPDX-License-Identifier: Apache-2.0
// Built-in instructions that compute: a few element-wise functions, for what no op covers. Each
// rounds once, as stock PyTorch does.
#include <algorithm>
#include <cmath>

#include "ipex/glue/op_loops.h"
#include "program/convert.h"
#include "program/scalars.h"

namespace ipex::program {
namespace {

constexpr int64_t kMaxDim = 16;

// Calls f.operator()<T>() for the storage type of a dtype.
template <class F>
void visit_float(const char* op, const char* name, ScalarType dtype, const F& f) {
  if (dtype == ScalarType::Float) return f.template operator()<float>();
  if (dtype == ScalarType::BFloat16) return f.template operator()<BFloat16>();
  if (dtype == ScalarType::Half) return f.template operator()<Half>();
  fail(op, ": ", name, " must have dtype float32, bfloat16, float16, got ", dtype_name(dtype));
}

template <class F>
void visit_number(const char* op, const char* name, ScalarType dtype, const F& f) {
  if (dtype == ScalarType::Long) return f.template operator()<int64_t>();
  if (dtype == ScalarType::Int) return f.template operator()<int32_t>();
  visit_float(op, name, dtype, f);
}

// The common shape of two tensors and the steps through each, 0 where it is repeated.
struct Broadcast {
  int64_t dim = 0;
  int64_t sizes[kMaxDim], a_steps[kMaxDim], b_steps[kMaxDim];

  Broadcast(const char* op, const Tensor& a, const Tensor& b) {
    dim = std::max(a.dim(), b.dim());
    bool fits = dim <= kMaxDim;
    for (int64_t i = 0; fits && i < dim; ++i) {
      const int64_t ia = i - (dim - a.dim()), ib = i - (dim - b.dim());
      const int64_t na = ia < 0 ? 1 : a.size(ia), nb = ib < 0 ? 1 : b.size(ib);
      fits = na == nb || na == 1 || nb == 1;
      sizes[i] = na == 1 ? nb : na;
      a_steps[i] = na == 1 ? 0 : a.stride(ia);
      b_steps[i] = nb == 1 ? 0 : b.stride(ib);
    }
    IPEX_CHECK(fits, op, ": b must broadcast with a of shape ", shape_text(a), ", got ",
               shape_text(b));
  }
};

template <class T, class F>
void row(const T* a, int64_t a_step, const T* b, int64_t b_step, T* to, int64_t n, const F& f) {
  if (a_step == 1 && b_step == 1) {
    for (int64_t i = 0; i < n; ++i) store(to[i], f(load(a[i]), load(b[i])));
  } else {
    for (int64_t i = 0; i < n; ++i) store(to[i], f(load(a[i * a_step]), load(b[i * b_step])));
  }
}

template <class F>
Tensor binary(const char* op, const Tensor& a, const Tensor& b, const F& f) {
  const ScalarType dtype = a.scalar_type();
  IPEX_CHECK(b.scalar_type() == dtype, op, ": b must have the dtype of a = ", dtype_name(dtype),
             ", got ", dtype_name(b.scalar_type()));
  const Broadcast shape(op, a, b);
  Tensor y = new_contiguous(shape.sizes, shape.dim, dtype);
  const int64_t numel = y.numel();
  visit_number(op, "a", dtype, [&]<class T>() {
    if (numel == 0) return;
    const T* pa = static_cast<const T*>(a.const_data_ptr());
    const T* pb = static_cast<const T*>(b.const_data_ptr());
    T* to = static_cast<T*>(y.mutable_data_ptr());
    if (a.numel() == numel && b.numel() == numel && a.is_contiguous() && b.is_contiguous()) {
      constexpr int64_t kGrain = kPieceBytes / static_cast<int64_t>(sizeof(T));
      return parallel_for(numel, kGrain, [&](int64_t begin, int64_t end) {
        row(pa + begin, 1, pb + begin, 1, to + begin, end - begin, f);
      });
    }
    const int64_t last = shape.dim - 1;
    const int64_t columns = shape.sizes[last];
    parallel_for(numel / columns, row_grain<T>(columns), [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        int64_t at_a = 0, at_b = 0;
        for (int64_t i = last - 1, rest = r; i >= 0; rest /= shape.sizes[i--]) {
          at_a += rest % shape.sizes[i] * shape.a_steps[i];
          at_b += rest % shape.sizes[i] * shape.b_steps[i];
        }
        row(pa + at_a, shape.a_steps[last], pb + at_b, shape.b_steps[last], to + r * columns,
            columns, f);
      }
    });
  });
  return y;
}

// f on each element, in any layout of x; the result is contiguous.
template <class F>
Tensor unary(const char* op, const Tensor& x, const F& f) {
  Tensor y = new_contiguous_like(x);
  const Tensor from = as_contiguous(x);
  visit_float(op, "a", x.scalar_type(), [&]<class T>() {
    for_elements(static_cast<const T*>(from.const_data_ptr()),
                 static_cast<T*>(y.mutable_data_ptr()), x.numel(),
                 [&](const T* a, T* to, int64_t n) {
                   for (int64_t i = 0; i < n; ++i) store(to[i], f(load(a[i])));
                 });
  });
  return y;
}

Tensor add_tensors(const Tensor& a, const Tensor& b) {
  return binary("add", a, b, [](auto x, auto y) -> decltype(x) { return x + y; });
}

Tensor mul_tensors(const Tensor& a, const Tensor& b) {
  return binary("mul", a, b, [](auto x, auto y) -> decltype(x) { return x * y; });
}

// As stock PyTorch: a number that is added is first rounded to the dtype, one that multiplies is
// not.
Tensor add_scalar(const Tensor& a, double b) {
  float s = 0;
  visit_float("add", "a", a.scalar_type(), [&]<class T>() {
    T rounded;
    store(rounded, static_cast<float>(b));
    s = load(rounded);
  });
  return unary("add", a, [s](float x) { return x + s; });
}

Tensor mul_scalar(const Tensor& a, double b) {
  return unary("mul", a, [s = static_cast<float>(b)](float x) { return x * s; });
}

Tensor clamp(const Tensor& x, double low, double high) {
  IPEX_CHECK(low <= high, "clamp: low must be at most high = ", high, ", got ", low);
  const float least = static_cast<float>(low), most = static_cast<float>(high);
  return unary("clamp", x, [=](float v) { return v < least ? least : v > most ? most : v; });
}

// torch's own, which is vectorized.
Tensor tanh(const Tensor& x) {
  StableIValue stack[1] = {torch::stable::detail::from(x)};
  IPEX_SHIM_CALL(torch_call_dispatcher("aten::tanh", "", stack, TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

// Whether the elements fill their memory, in any order of the dimensions.
bool is_dense(const Tensor& x) {
  if (x.is_contiguous()) return true;
  bool used[kMaxDim] = {};
  if (x.dim() > kMaxDim) return false;
  int64_t expected = 1;
  for (int64_t found = 0; found < x.dim(); ++found) {
    int64_t next = -1;
    for (int64_t d = 0; next < 0 && d < x.dim(); ++d)
      if (!used[d] && (x.size(d) == 1 || x.stride(d) == expected)) next = d;
    if (next < 0) return false;
    used[next] = true;
    expected *= x.size(next);
  }
  return true;
}

Tensor cast(const Tensor& x, ScalarType dtype) {
  const ScalarType from = x.scalar_type();
  if (from == dtype) return x;
  if (!is_pointwise_dtype(from) || !is_pointwise_dtype(dtype) || !is_dense(x))
    return torch::stable::to(x, dtype);
  return convert(x, dtype);
}

const bool registered = [] {
  add("add", Adapter<&add_tensors>::entry());
  add("mul", Adapter<&mul_tensors>::entry());
  add("add_scalar", Adapter<&add_scalar>::entry());
  add("mul_scalar", Adapter<&mul_scalar>::entry());
  add("tanh", Adapter<&tanh>::entry());
  add("clamp", Adapter<&clamp>::entry());
  add("cast", Adapter<&cast>::entry());
  return true;
}();

}  // namespace
}  // namespace ipex::program
