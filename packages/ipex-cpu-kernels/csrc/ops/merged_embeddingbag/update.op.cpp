// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <utility>

#include "ipex/glue/op_loops.h"
#include "merged_embeddingbag/bags_check.h"
#include "merged_embeddingbag/merged_embeddingbag.h"
#include "merged_embeddingbag/sort_lookups.h"
#include "runtime/scratch.h"

namespace ipex {
namespace {

constexpr char kSgd[] = "merged_embeddingbag_sgd";
constexpr char kAdagrad[] = "merged_embeddingbag_adagrad";

const auto sgd_kernels = IPEX_KERNELS(kSgd, merged_embeddingbag_sgd);
const auto adagrad_kernels = IPEX_KERNELS(kAdagrad, merged_embeddingbag_adagrad);

void check_table(const char* op, const std::string& name, const Tensor& value, const Tensor& weight,
                 ScalarType dtype) {
  IPEX_CHECK(value.is_cpu(), op, ": ", name, " must be on the device of weights[0] = cpu");
  IPEX_CHECK(value.scalar_type() == dtype, op, ": ", name, " must have dtype ", dtype_name(dtype),
             ", got ", dtype_name(value.scalar_type()));
  check_shape(op, name.c_str(), value, {weight.size(0), weight.size(1)});
  if (value.is_contiguous()) return;
  fail(op, ": ", name, " must be contiguous, got strides ",
       shape_text({value.stride(0), value.stride(1)}));
}

// The tables and their gradients, checked. There is one of them per call.
class Update {
 public:
  Update(const char* op, const TensorList& grads, const TensorList& weights,
         const TensorList& trails, const Lookups& lookups)
      : op_(op), weights_(weights), lookups_(lookups) {
    const Tensor& first = weights[0];
    check_table_list(op, "grads", grads, weights.size());
    for (size_t i = 0; i < grads.size(); ++i) {
      const std::string name = element("grads", i);
      check_kind(op, name.c_str(), grads[i], first, "weights[0]", false);
      check_shape(op, name.c_str(), grads[i], {lookups.bags(), first.size(1)});
    }
    check_table_list(op, "trails", trails, weights.size());
    for (size_t i = 0; i < weights.size(); ++i) {
      check_table(op, element("weights", i), weights[i], weights[i], first.scalar_type());
      UpdateTable table{};
      table.weight = written(weights[i]);
      if (trails[i].numel() > 0) {
        const std::string name = element("trails", i);
        IPEX_CHECK(first.scalar_type() == ScalarType::BFloat16, op, ": ", name,
                   " must be empty for tables of ", dtype_name(first.scalar_type()), ", got ",
                   shape_text(trails[i]));
        check_table(op, name, trails[i], weights[i], ScalarType::BFloat16);
        table.trail = static_cast<uint16_t*>(written(trails[i]));
      }
      grads_.push_back(as_rows(grads[i]));
      table.grad = grads_[i].data;
      table.grad_stride = grads_[i].stride;
      rows_ = std::max(rows_, static_cast<uint64_t>(weights[i].size(0)));
      tables_.push_back(table);
    }
  }

  void add_hessians(const TensorList& hessians) {
    check_table_list(op_, "hessians", hessians, weights_.size());
    for (size_t i = 0; i < weights_.size(); ++i) {
      check_table(op_, element("hessians", i), hessians[i], weights_[i], ScalarType::Float);
      tables_[i].hessian = static_cast<float*>(written(hessians[i]));
    }
  }

  template <class K>
  void run(const K& kernels, UpdateArgs args) {
    lookups_.check_values(weights_);
    check_memory();
    args.tables = tables_.data();
    args.dim = weights_[0].size(1);
    const int64_t most = find_ends(), count = tables_.back().end;
    if (count == 0 || args.dim == 0) return;
    IPEX_CHECK(lookups_.bags() < int64_t{1} << 32, op_,
               ": offsets must have fewer than 2^32 bags, got ", lookups_.bags());
    const int64_t bytes = count * static_cast<int64_t>(sizeof(Lookup));
    char* room = Scratch<Area::kEmbeddingUpdate>::get(2 * bytes);
    IPEX_CHECK(room, op_, ": not enough memory to sort ", count, " lookups");
    Lookup* unsorted = reinterpret_cast<Lookup*>(room);
    for (size_t t = 0; t < tables_.size() && lookups_.factors(t); ++t)
      factors_.push_back(as_float_contiguous(*lookups_.factors(t)));
    const LookupSort sort(rows_);
    args.lookups = unsorted + (sort.moves() ? count : 0);
    // Each table by one thread, so that what it collects is sorted in its caches, unless one table
    // has most of the lookups.
    const int64_t tables = static_cast<int64_t>(tables_.size());
    parallel_for(tables, 2 * most > count ? tables : 1, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t)
        if (lookups_.wide())
          collect<int64_t>(static_cast<size_t>(t), unsorted, count, sort);
        else
          collect<int32_t>(static_cast<size_t>(t), unsorted, count, sort);
    });
    kernels.visit(weights_[0].scalar_type(), [&]<class T>(auto* kernel) {
      parallel_for(count, row_grain<T>(3 * args.dim),
                   [&](int64_t begin, int64_t end) { kernel(&args, begin, end); });
    });
  }

 private:
  void* written(const Tensor& value) {
    void* data = value.mutable_data_ptr();
    if (value.numel() > 0) {
      const auto begin = reinterpret_cast<uintptr_t>(data);
      const int64_t size = value.scalar_type() == ScalarType::Float ? 4 : 2;
      places_.emplace_back(begin, begin + static_cast<uintptr_t>(value.numel() * size));
    }
    return data;
  }

  void check_memory() {
    std::sort(places_.begin(), places_.end());
    for (size_t i = 1; i < places_.size(); ++i)
      IPEX_CHECK(places_[i - 1].second <= places_[i].first, op_,
                 ": weights must not share memory, got overlapping tensors");
  }

  // The number of lookups of a table that are in a bag.
  int64_t count_of(size_t t) const {
    if (!lookups_.include_last()) return lookups_.bags() > 0 ? lookups_.indices(t).size(0) : 0;
    const Indices offsets(lookups_.offsets(t));
    return offsets[lookups_.bags()];
  }

  // Counts lookups; returns the number in the table that has most.
  int64_t find_ends() {
    int64_t total = 0, most = 0;
    for (size_t t = 0; t < tables_.size(); ++t) {
      const int64_t count = count_of(t);
      most = std::max(most, count);
      tables_[t].end = total += count;
    }
    return most;
  }

  // The lookups of a table, sorted.
  template <class I>
  void collect(size_t t, Lookup* unsorted, int64_t count, const LookupSort& sort) const {
    const int64_t bags = lookups_.bags(), first = t > 0 ? tables_[t - 1].end : 0;
    const I* offsets = static_cast<const I*>(lookups_.offsets(t).const_data_ptr());
    const I* indices = static_cast<const I*>(lookups_.indices(t).const_data_ptr());
    Lookup* out = unsorted + first;
    const int64_t last = tables_[t].end - first;
    for (int64_t b = 0; b < bags; ++b) {
      const int64_t stop = b + 1 < bags ? static_cast<int64_t>(offsets[b + 1]) : last;
      const int64_t size = stop - offsets[b];
      const float scale = lookups_.mean() && size > 0 ? 1.0f / static_cast<float>(size) : 1.0f;
      for (int64_t k = offsets[b]; k < stop; ++k)
        out[k] = {static_cast<uint64_t>(indices[k]), static_cast<uint32_t>(b), scale};
    }
    if (!factors_.empty()) {
      const float* scale = static_cast<const float*>(factors_[t].const_data_ptr());
      for (int64_t k = 0; k < last; ++k) out[k].scale = scale[k];
    }
    sort.sort(out, out + count, last);
  }

  const char* op_;
  const TensorList& weights_;
  const Lookups& lookups_;
  std::vector<Rows> grads_;
  std::vector<UpdateTable> tables_;
  std::vector<std::pair<uintptr_t, uintptr_t>> places_;
  TensorList factors_;
  uint64_t rows_ = 1;  // of the largest table, at least 1
};

void sgd(const TensorList& grads, const TensorList& weights, const TensorList& trails,
         const TensorList& indices, const TensorList& offsets, const TensorList& factors,
         const std::string& mode, bool include_last, double lr, double weight_decay) {
  const Lookups lookups(kSgd, weights, indices, offsets, factors, mode, include_last);
  Update update(kSgd, grads, weights, trails, lookups);
  UpdateArgs args{};
  args.lr = static_cast<float>(lr);
  args.weight_decay = static_cast<float>(weight_decay);
  update.run(sgd_kernels, args);
}

void adagrad(const TensorList& grads, const TensorList& weights, const TensorList& trails,
             const TensorList& hessians, const TensorList& indices, const TensorList& offsets,
             const TensorList& factors, const std::string& mode, bool include_last, double lr,
             double eps) {
  const Lookups lookups(kAdagrad, weights, indices, offsets, factors, mode, include_last);
  Update update(kAdagrad, grads, weights, trails, lookups);
  update.add_hessians(hessians);
  UpdateArgs args{};
  args.lr = static_cast<float>(lr);
  args.eps = static_cast<float>(eps);
  update.run(adagrad_kernels, args);
}

}  // namespace
}  // namespace ipex

STABLE_TORCH_LIBRARY_IMPL(ipex, CPU, m) {
  IPEX_IMPL(m, "merged_embeddingbag_sgd", ipex::sgd);
  IPEX_IMPL(m, "merged_embeddingbag_adagrad", ipex::adagrad);
}
