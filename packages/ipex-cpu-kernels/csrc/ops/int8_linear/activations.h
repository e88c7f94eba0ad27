// SPDX-License-Identifier: Apache-2.0
// The activations of int8_linear: checks, and uint8 codes as its kernels read them.
#pragma once

#include <string>
#include <vector>

#include "int8_linear/int8_linear.h"
#include "ipex/glue/op_loops.h"
#include "quantize/tensor_range.h"
#include "runtime/scratch.h"

namespace ipex {

inline bool is_code_dtype(ScalarType dtype) {
  return dtype == ScalarType::Char || dtype == ScalarType::Byte;
}

// What the caller says about the quantization of x.
struct ActivationArguments {
  const OptionalTensor& scale;
  const OptionalTensor& zero;
  bool per_token;  // where scale is None
  bool symmetric;
};

// Checks x_scale and x_zero; `count` is the number of rows of x.
inline void check_activations(const char* op, const Tensor& x, int64_t count,
                              const ActivationArguments& a) {
  const bool codes = is_code_dtype(x.scalar_type());
  IPEX_CHECK(!codes || a.scale, op, ": x_scale must be given for x of dtype ",
             dtype_name(x.scalar_type()), ", got None");
  if (a.scale) {
    IPEX_CHECK(a.scale->is_cpu(), op, ": x_scale must be on the device of x = cpu");
    IPEX_CHECK(a.scale->scalar_type() == ScalarType::Float, op,
               ": x_scale must have dtype float32, got ", dtype_name(a.scale->scalar_type()));
    if (codes)
      IPEX_CHECK(a.scale->numel() == 1 || a.scale->numel() == count, op,
                 ": x_scale must have one element or one for each row of x = ", count, ", got ",
                 shape_text(*a.scale));
    else
      IPEX_CHECK(a.scale->numel() == 1, op, ": x_scale must have one element, got ",
                 shape_text(*a.scale));
  }
  if (!a.zero) return;
  IPEX_CHECK(a.scale, op, ": x_zero must be None without x_scale, got a tensor");
  IPEX_CHECK(codes || !a.symmetric, op, ": x_zero must be None for symmetric codes, got a tensor");
  IPEX_CHECK(a.zero->is_cpu(), op, ": x_zero must be on the device of x = cpu");
  IPEX_CHECK(a.zero->scalar_type() == ScalarType::Int, op, ": x_zero must have dtype int32, got ",
             dtype_name(a.zero->scalar_type()));
  IPEX_CHECK(a.zero->numel() == a.scale->numel(), op,
             ": x_zero must have as many elements as x_scale = ", a.scale->numel(), ", got ",
             shape_text(*a.zero));
}

// Handles of the kernels that quantize.
template <class Rows8, class Static8, class Copy8, class Ranges>
struct ActivationKernels {
  const Rows8& rows;
  const Static8& fixed;
  const Copy8& copy;
  const Ranges& range;
};

// Codes, scales and zero points of x; valid until the calling thread makes the next ones.
class Activations {
 public:
  // x must have passed check_activations. `k` is the number of columns of x, padded.
  template <class Kernels>
  Activations(const char* op, const Tensor& x, int64_t k, const ActivationArguments& a,
              const Kernels& kernels)
      : x_(as_rows(x)), dtype_(x.scalar_type()), stride_(row_stride(k)) {
    const bool codes = is_code_dtype(dtype_);
    const bool in_place = dtype_ == ScalarType::Byte && k == x_.columns;
    // One scale for each row, or a single one.
    const int64_t scales = a.scale ? a.scale->numel() : a.per_token ? x_.rows : 1;
    const int64_t head = (scales + 15) / 16 * 64;
    char* memory =
        Scratch<Area::kInt8Activations>::get(2 * head + (in_place ? 0 : x_.rows * stride_) + 64);
    IPEX_CHECK(memory, op, ": out of memory");
    scale_ = reinterpret_cast<float*>(memory);
    zero_ = reinterpret_cast<int32_t*>(memory + head);
    codes_ = reinterpret_cast<uint8_t*>(memory + 2 * head);
    step_ = scales == x_.rows && (codes || !a.scale) && scales > 1 ? 1 : 0;
    if (a.scale) given(op, a, scales);
    if (codes) {
      if (in_place) {
        data_ = static_cast<const uint8_t*>(x_.data);
        stride_ = x_.stride;
        return;
      }
      copy(kernels.copy.get());
    } else if (!a.scale && a.per_token) {
      quantize(kernels.rows, a.symmetric);
    } else {
      if (!a.scale) {
        const TensorScale found = find_tensor_scale(kernels.range, x_, dtype_, a.symmetric);
        scale_[0] = found.scale;
        zero_[0] = found.zero;
      }
      quantize_with(kernels.fixed, a.symmetric);
      if (a.symmetric) zero_[0] = 128;
    }
    data_ = codes_;
  }

  // Puts them where the kernels look.
  void fill(Int8LinearArgs* args) const {
    args->x = data_;
    args->x_stride = stride_;
    args->x_scale = scale_;
    args->x_zero = zero_;
    args->x_step = step_;
  }

  int64_t rows() const { return x_.rows; }

 private:
  // Whole lines, an odd number of them: rows whose distance is a multiple of 4 KiB would fight for
  // few places in L1.
  static int64_t row_stride(int64_t k) { return ((k + 63) / 64 | 1) * 64; }

  // Takes the caller's scales and zero points over.
  void given(const char* op, const ActivationArguments& a, int64_t scales) {
    const bool is_signed = dtype_ == ScalarType::Char;
    const Tensor scale = as_contiguous(*a.scale);
    const auto* from = static_cast<const float*>(scale.const_data_ptr());
    for (int64_t i = 0; i < scales; ++i) scale_[i] = from[i];
    if (!is_code_dtype(dtype_)) check_given_scale(op, "x_scale", scale_[0]);
    const Tensor zero = a.zero ? as_contiguous(*a.zero) : Tensor();
    const auto* zeros = a.zero ? static_cast<const int32_t*>(zero.const_data_ptr()) : nullptr;
    const int32_t low = is_signed ? -128 : 0;
    for (int64_t i = 0; i < scales; ++i) {
      const int32_t value = zeros ? zeros[i] : 0;
      IPEX_CHECK(value >= low && value <= low + 255, op, ": x_zero must be in [", low, ", ",
                 low + 255, "], got ", value);
      zero_[i] = value - low;
    }
  }

  template <class T>
  void for_rows(const T* from, const auto& call) const {
    parallel_for(
        x_.rows, row_grain<T>(std::max<int64_t>(x_.columns, 1)),
        [&](int64_t begin, int64_t end) { call(from + begin * x_.stride, begin, end - begin); });
  }

  void copy(decltype(ipex_k_int8_linear_copy_rows)* kernel) {
    for_rows(static_cast<const uint8_t*>(x_.data),
             [&](const uint8_t* from, int64_t row, int64_t rows) {
               kernel(from, x_.stride, rows, x_.columns, dtype_ == ScalarType::Char,
                      codes_ + row * stride_, stride_);
             });
  }

  template <class Kernels>
  void quantize(const Kernels& kernels, bool symmetric) {
    kernels.visit(dtype_, [&]<class T>(auto* kernel) {
      for_rows(static_cast<const T*>(x_.data), [&](const T* from, int64_t row, int64_t rows) {
        kernel(from, x_.stride, rows, x_.columns, symmetric, codes_ + row * stride_, stride_,
               scale_ + row, zero_ + row);
      });
    });
  }

  template <class Kernels>
  void quantize_with(const Kernels& kernels, bool symmetric) {
    kernels.visit(dtype_, [&]<class T>(auto* kernel) {
      for_rows(static_cast<const T*>(x_.data), [&](const T* from, int64_t row, int64_t rows) {
        kernel(from, x_.stride, rows, x_.columns, scale_[0], zero_[0], symmetric,
               codes_ + row * stride_, stride_);
      });
    });
  }

  Rows x_;
  ScalarType dtype_;
  int64_t stride_, step_ = 0;
  const uint8_t* data_ = nullptr;
  uint8_t* codes_ = nullptr;
  float* scale_ = nullptr;
  int32_t* zero_ = nullptr;
};

}  // namespace ipex
