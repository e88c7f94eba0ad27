// SPDX-License-Identifier: Apache-2.0
// Checks of the arguments that all ops on embedding bags share; the texts equal the Python
// checks. For glue.
#pragma once

#include <atomic>
#include <string>
#include <vector>

#include "ipex/glue/argument_checks.h"
#include "ipex/glue/kv_glue.h"

namespace ipex {

using TensorList = std::vector<Tensor>;

inline std::string element(const char* list, size_t i) {
  return std::string(list) + "[" + std::to_string(i) + "]";
}

inline void check_table_list(const char* op, const char* name, const TensorList& values,
                             size_t tables) {
  IPEX_CHECK(values.size() == tables, op, ": ", name, " must hold ", tables,
             " tensor(s), one per table, got ", values.size());
}

// The arguments that say what is looked up, checked.
class Lookups {
 public:
  Lookups(const char* op, const TensorList& weights, const TensorList& indices,
          const TensorList& offsets, const TensorList& factors, const std::string& mode,
          bool include_last, bool int8 = false)
      : op_(op), include_last_(include_last), mean_(mode == "mean") {
    check_weights(weights, int8);
    IPEX_CHECK(mode == "sum" || mode == "mean", op, ": pooling_mode must be 'sum' or 'mean', got '",
               mode, "'");
    check_table_list(op, "indices", indices, weights.size());
    check_table_list(op, "offsets", offsets, weights.size());
    const ScalarType dtype = indices[0].scalar_type();
    for (size_t i = 0; i < indices.size(); ++i) check_index("indices", i, indices[i], dtype);
    for (size_t i = 0; i < offsets.size(); ++i) {
      check_index("offsets", i, offsets[i], dtype);
      const int64_t least = include_last ? 1 : 0;
      IPEX_CHECK(offsets[i].size(0) >= least, op, ": ", element("offsets", i),
                 " must have at least ", least, " element(s), got 0");
      IPEX_CHECK(offsets[i].size(0) == offsets[0].size(0), op, ": ", element("offsets", i),
                 " must have the shape of offsets[0] = ", shape_text(offsets[0]), ", got ",
                 shape_text(offsets[i]));
    }
    if (!factors.empty()) check_factors(weights, indices, factors);
    for (size_t i = 0; i < weights.size(); ++i) {
      indices_.push_back(as_contiguous(indices[i]));
      offsets_.push_back(as_contiguous(offsets[i]));
      if (!factors.empty()) factors_.push_back(as_contiguous(factors[i]));
    }
    wide_ = dtype == ScalarType::Long;
    bags_ = offsets[0].size(0) - (include_last ? 1 : 0);
  }

  // Reads all offsets and indices: nothing else may be read before.
  void check_values(const TensorList& weights) const {
    if (wide_)
      check_values_of<int64_t>(weights);
    else
      check_values_of<int32_t>(weights);
  }

  int64_t bags() const { return bags_; }
  bool wide() const { return wide_; }
  bool mean() const { return mean_; }
  bool include_last() const { return include_last_; }
  const Tensor& indices(size_t table) const { return indices_[table]; }
  const Tensor& offsets(size_t table) const { return offsets_[table]; }
  const Tensor* factors(size_t table) const {
    return factors_.empty() ? nullptr : &factors_[table];
  }

 private:
  void check_weights(const TensorList& weights, bool int8) const {
    IPEX_CHECK(!weights.empty(), op_, ": weights must hold at least 1 tensor, got 0");
    const Tensor& first = weights[0];
    if (int8)
      IPEX_CHECK(first.scalar_type() == ScalarType::Char, op_,
                 ": weights[0] must have dtype int8, got ", dtype_name(first.scalar_type()));
    else
      check_tensor(op_, "weights[0]", first);
    IPEX_CHECK(first.dim() == 2, op_, ": weights[0] must be 2-D [rows, D], got ", first.dim(),
               "-D");
    for (size_t i = 0; i < weights.size(); ++i) {
      const std::string name = element("weights", i);
      check_kind(op_, name.c_str(), weights[i], first, "weights[0]", false);
      IPEX_CHECK(weights[i].dim() == 2 && weights[i].size(1) == first.size(1), op_, ": ", name,
                 " must have shape [rows, ", first.size(1), "], got ", shape_text(weights[i]));
    }
  }

  void check_index(const char* list, size_t i, const Tensor& value, ScalarType dtype) const {
    const auto name = [&] { return element(list, i); };
    IPEX_CHECK(value.is_cpu(), op_, ": ", name(), " must be on the device of weights[0] = cpu");
    IPEX_CHECK(is_index_dtype(value.scalar_type()), op_, ": ", name(),
               " must have dtype int32, int64, got ", dtype_name(value.scalar_type()));
    IPEX_CHECK(value.dim() >= 1, op_, ": ", name(), " must have at least 1 dimension(s), got 0-D");
    IPEX_CHECK(value.dim() == 1, op_, ": ", name(), " must be 1-D, got ", value.dim(), "-D");
    IPEX_CHECK(value.scalar_type() == dtype, op_, ": ", name(),
               " must have the dtype of indices[0] = ", dtype_name(dtype), ", got ",
               dtype_name(value.scalar_type()));
  }

  void check_factors(const TensorList& weights, const TensorList& indices,
                     const TensorList& factors) const {
    check_table_list(op_, "per_sample_weights", factors, weights.size());
    IPEX_CHECK(!mean_, op_, ": pooling_mode must be 'sum' with per_sample_weights, got 'mean'");
    for (size_t i = 0; i < factors.size(); ++i) {
      const std::string name = element("per_sample_weights", i);
      check_kind(op_, name.c_str(), factors[i], weights[0], "weights[0]", false);
      check_shape(op_, name.c_str(), factors[i], {indices[i].size(0)});
    }
  }

  template <class I>
  void check_values_of(const TensorList& weights) const {
    // In parallel a table is only found to be wrong; the first such table is then looked at again.
    std::atomic<bool> wrong{false};
    parallel_for(static_cast<int64_t>(weights.size()), 4, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t)
        if (!is_right<I>(static_cast<size_t>(t), weights[static_cast<size_t>(t)].size(0)))
          wrong = true;
    });
    if (!wrong) return;
    for (size_t t = 0; t < weights.size(); ++t)
      if (!is_right<I>(t, weights[t].size(0))) explain<I>(t, weights[t].size(0));
  }

  template <class I>
  bool is_right(size_t t, int64_t rows) const {
    const I* offsets = static_cast<const I*>(offsets_[t].const_data_ptr());
    const int64_t starts = offsets_[t].size(0), count = indices_[t].size(0);
    bool wrong = starts > 0 && (offsets[0] != 0 || offsets[starts - 1] > count);
    for (int64_t b = 1; b < starts; ++b) wrong |= offsets[b] < offsets[b - 1];
    const I* indices = static_cast<const I*>(indices_[t].const_data_ptr());
    for (int64_t i = 0; i < count; ++i)
      wrong |=
          static_cast<uint64_t>(static_cast<int64_t>(indices[i])) >= static_cast<uint64_t>(rows);
    return !wrong;
  }

  template <class I>
  void explain(size_t t, int64_t rows) const {
    const I* offsets = static_cast<const I*>(offsets_[t].const_data_ptr());
    const int64_t starts = offsets_[t].size(0), count = indices_[t].size(0);
    const std::string name = element("offsets", t);
    if (starts > 0)
      IPEX_CHECK(offsets[0] == 0, op_, ": ", name, " must begin with 0, got ", offsets[0]);
    for (int64_t b = 1; b < starts; ++b)
      IPEX_CHECK(offsets[b] >= offsets[b - 1], op_, ": ", name, " must not decrease, got ",
                 offsets[b], " after ", offsets[b - 1]);
    if (starts > 0)
      IPEX_CHECK(offsets[starts - 1] <= count, op_, ": ", name,
                 " must not exceed the number of indices = ", count, ", got ", offsets[starts - 1]);
    const I* indices = static_cast<const I*>(indices_[t].const_data_ptr());
    for (int64_t i = 0; i < count; ++i)
      IPEX_CHECK(indices[i] >= 0 && indices[i] < rows, op_, ": ", element("indices", t),
                 " must hold rows in [0, ", rows, "), got ", indices[i]);
  }

  const char* op_;
  bool include_last_, mean_, wide_ = false;
  int64_t bags_ = 0;
  TensorList indices_, offsets_, factors_;
};

}  // namespace ipex
