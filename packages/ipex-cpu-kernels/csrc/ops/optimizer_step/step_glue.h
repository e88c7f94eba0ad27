// SPDX-License-Identifier: Apache-2.0
// What the glue of all optimizer steps shares: checks, layouts, threads. The texts are the same as
// in ipex_core.ops.optim.
#pragma once

#include <algorithm>
#include <vector>

#include "ipex/glue/dispatch.h"
#include "ipex/glue/in_place.h"
#include "optimizer_step/optimizer_step.h"

namespace ipex {

// Elements that one call of a kernel gets where it returns sums: the same for any number of
// threads.
inline constexpr int64_t kSumBlock = 16 * 1024;
inline constexpr int64_t kStepGrain = 16 * 1024;

class Step {
 public:
  Step(const char* op, const Tensor& param, const Tensor& grad, const OptionalTensor& param2)
      : op_(op), grad_(grad) {
    const ScalarType dtype = param.scalar_type();
    IPEX_CHECK(dtype == ScalarType::Float || dtype == ScalarType::BFloat16, op,
               ": param must have dtype float32 or bfloat16, got ", dtype_name(dtype));
    check_not_expanded(op, "param", param);
    arrays_.split = dtype == ScalarType::BFloat16;
    add("param", param, true);
    IPEX_CHECK(is_kernel_dtype(grad.scalar_type()), op,
               ": grad must have dtype float32, bfloat16, float16, got ",
               dtype_name(grad.scalar_type()));
    if (arrays_.split) {
      IPEX_CHECK(param2.has_value(), op,
                 ": param2 must have the lower bits of a bfloat16 param, got None");
      check_dtype("param2", *param2, ScalarType::BFloat16);
      check_dtype("grad", grad, ScalarType::BFloat16);
    } else if (param2) {
      check_dtype("param2", *param2, grad.scalar_type());
    } else {
      check_dtype("grad", grad, ScalarType::Float);
    }
    same_shape("grad", grad);
    add("grad", grad, false);
    if (param2) {
      same_shape("param2", *param2);
      check_not_expanded(op, "param2", *param2);
      add("param2", *param2, true);
    }
    has_param2_ = param2.has_value();
  }

  // A float32 tensor of the shape of the parameter that is written to.
  void add_state(const char* name, const Tensor& state) {
    check_dtype(name, state, ScalarType::Float);
    same_shape(name, state);
    check_not_expanded(op_, name, state);
    add(name, state, true);
  }

  // Call once, after all states are there.
  const StepArrays& arrays() {
    const bool together = same_dense_layout();
    for (Item& item : items_) {
      const Tensor usable = together ? item.tensor : as_contiguous(item.tensor);
      if (item.written && !together) places_.emplace_back(item.tensor, usable);
      item.tensor = usable;
    }
    size_t next = 0;
    arrays_.param = items_[next++].tensor.mutable_data_ptr();
    arrays_.grad = items_[next++].tensor.const_data_ptr();
    if (has_param2_) arrays_.param2 = items_[next++].tensor.mutable_data_ptr();
    for (int i = 0; next < items_.size(); ++next)
      arrays_.state[i++] = static_cast<float*>(items_[next].tensor.mutable_data_ptr());
    return arrays_;
  }

  int64_t size() const { return grad_.numel(); }
  int64_t grad_bytes() const { return grad_.scalar_type() == ScalarType::Float ? 4 : 2; }
  ScalarType dtype() const { return grad_.scalar_type(); }

  // kernel(arrays, n) for parts of the elements, on all threads.
  template <class Call>
  void for_parts(const Call& call) const {
    const StepArrays& all = arrays_;
    const int64_t bytes = grad_bytes();
    parallel_for(size(), kStepGrain,
                 [&](int64_t begin, int64_t end) { call(all.from(begin, bytes), end - begin); });
  }

  // call(arrays, n, sums) for blocks; returns the two sums, which do not depend on the threads.
  template <class Call>
  void sums(const Call& call, double* result) const {
    const int64_t n = size(), blocks = (n + kSumBlock - 1) / kSumBlock, bytes = grad_bytes();
    std::vector<double> parts(static_cast<size_t>(2 * blocks), 0.0);
    double* out = parts.data();
    const StepArrays& all = arrays_;
    parallel_for(blocks, 1, [&](int64_t begin, int64_t end) {
      for (int64_t b = begin; b < end; ++b) {
        const int64_t first = b * kSumBlock;
        call(all.from(first, bytes), std::min(kSumBlock, n - first), out + 2 * b);
      }
    });
    result[0] = result[1] = 0.0;
    for (int64_t b = 0; b < blocks; ++b) {
      result[0] += out[2 * b];
      result[1] += out[2 * b + 1];
    }
  }

  void finish() {
    for (InPlace& place : places_) place.finish();
  }

 private:
  struct Item {
    Tensor tensor;
    bool written;
  };

  void add(const char* name, const Tensor& tensor, bool written) {
    IPEX_CHECK(tensor.is_cpu(), op_, ": ", name, " must be on the device of param = cpu");
    items_.push_back({tensor, written});
  }

  void check_dtype(const char* name, const Tensor& value, ScalarType dtype) const {
    IPEX_CHECK(value.scalar_type() == dtype, op_, ": ", name, " must have dtype ",
               dtype_name(dtype), ", got ", dtype_name(value.scalar_type()));
  }

  void same_shape(const char* name, const Tensor& value) const {
    const Tensor& param = items_[0].tensor;
    bool same = value.dim() == param.dim();
    for (int64_t i = 0; same && i < param.dim(); ++i) same = value.size(i) == param.size(i);
    IPEX_CHECK(same, op_, ": ", name, " must have the shape of param = ", shape_text(param),
               ", got ", shape_text(value));
  }

  // Whether all tensors have their elements in the same order, without gaps.
  bool same_dense_layout() const {
    const Tensor& first = items_[0].tensor;
    const int64_t dim = first.dim();
    for (const Item& item : items_)
      for (int64_t i = 0; i < dim; ++i)
        if (first.size(i) > 1 && item.tensor.stride(i) != first.stride(i)) return false;
    int64_t expected = 1;
    std::vector<std::pair<int64_t, int64_t>> steps;
    for (int64_t i = 0; i < dim; ++i)
      if (first.size(i) > 1) steps.emplace_back(first.stride(i), first.size(i));
    std::sort(steps.begin(), steps.end());
    for (const auto& [stride, size] : steps) {
      if (stride != expected) return false;
      expected *= size;
    }
    return true;
  }

  const char* op_;
  Tensor grad_;
  bool has_param2_ = false;
  std::vector<Item> items_;
  std::vector<InPlace> places_;
  StepArrays arrays_;
};

}  // namespace ipex
