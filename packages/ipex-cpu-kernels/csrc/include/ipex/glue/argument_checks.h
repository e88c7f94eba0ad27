// SPDX-License-Identifier: Apache-2.0
// Checks of arguments whose shape does not follow the leading one; the texts equal the
// Python checks. For glue.
#pragma once

#include <initializer_list>
#include <string>

#include "ipex/glue/dispatch.h"

namespace ipex {

inline std::string shape_text(std::initializer_list<int64_t> sizes) { return list_text(sizes); }

inline bool has_shape(const Tensor& x, std::initializer_list<int64_t> sizes) {
  if (x.dim() != static_cast<int64_t>(sizes.size())) return false;
  int64_t i = 0;
  for (const int64_t size : sizes)
    if (x.size(i++) != size) return false;
  return true;
}

// On the CPU, in the dtype of x (which the message calls `of`) or, if allowed, float32.
inline void check_kind(const char* op, const char* name, const Tensor& value, const Tensor& x,
                       const char* of, bool or_float32) {
  IPEX_CHECK(value.is_cpu(), op, ": ", name, " must be on the device of ", of, " = cpu");
  const ScalarType dtype = value.scalar_type();
  IPEX_CHECK(dtype == x.scalar_type() || (or_float32 && dtype == ScalarType::Float), op, ": ", name,
             " must have the dtype of ", of, " = ", dtype_name(x.scalar_type()),
             or_float32 ? " or float32" : "", ", got ", dtype_name(dtype));
}

inline void check_shape(const char* op, const char* name, const Tensor& value,
                        std::initializer_list<int64_t> sizes) {
  IPEX_CHECK(has_shape(value, sizes), op, ": ", name, " must have shape ", shape_text(sizes),
             ", got ", shape_text(value));
}

inline void check_shaped(const char* op, const char* name, const OptionalTensor& value,
                         std::initializer_list<int64_t> sizes, const Tensor& x, const char* of,
                         bool or_float32) {
  if (!value) return;
  check_kind(op, name, *value, x, of, or_float32);
  check_shape(op, name, *value, sizes);
}

inline void check_float32(const char* op, const char* name, const Tensor& value,
                          std::initializer_list<int64_t> sizes, const char* of) {
  IPEX_CHECK(value.is_cpu(), op, ": ", name, " must be on the device of ", of, " = cpu");
  IPEX_CHECK(value.scalar_type() == ScalarType::Float, op, ": ", name,
             " must have dtype float32, got ", dtype_name(value.scalar_type()));
  check_shape(op, name, value, sizes);
}

// An argument that is written to must not be broadcast: its elements would share memory.
inline void check_writable(const char* op, const char* name, const Tensor& value) {
  bool broadcast = false;
  for (int64_t i = 0; i < value.dim(); ++i) broadcast |= value.stride(i) == 0 && value.size(i) > 1;
  if (!broadcast) return;
  std::string strides = "[";
  for (int64_t i = 0; i < value.dim(); ++i)
    strides += (i ? ", " : "") + std::to_string(value.stride(i));
  fail(op, ": ", name, " must have no broadcast dimension, got strides ", strides, "]");
}

// A contiguous float32 tensor of the same values; the tensor itself if it is one.
inline Tensor as_float_contiguous(const Tensor& x) {
  return as_contiguous(
      x.scalar_type() == ScalarType::Float ? x : torch::stable::to(x, ScalarType::Float));
}

}  // namespace ipex
