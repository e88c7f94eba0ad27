// SPDX-License-Identifier: Apache-2.0
// Embedding bags, one table or many, on the kernels of bags.sycl.cpp.
#include <ATen/Functions.h>

#include <algorithm>
#include <string_view>
#include <tuple>

#include "device/core/ipex_ops.h"

namespace ipex::xpu {
namespace {

using at::Tensor;
using at::TensorList;
using std::optional;

// On the CPU device 0.1 to 0.3 of the rate of the kernels for CPUs.
constexpr KernelSpeed kBagsSpeed = KernelSpeed::Slower;

// The bags of all tables, as kernels read them.
class Bags {
 public:
  // Nothing for what is not for kernels.
  static optional<Bags> of(TensorList weights, TensorList indices, TensorList offsets,
                           TensorList factors, bool include_last_offset) {
    const std::size_t tables = weights.size();
    if (tables == 0 || indices.size() != tables || offsets.size() != tables ||
        (!factors.empty() && factors.size() != tables))
      return std::nullopt;
    for (std::size_t t = 0; t < tables; ++t) {
      if (!fit(weights[t], weights[0], indices[t], offsets[t], indices[0].scalar_type(),
               offsets[0].sizes()) ||
          (!factors.empty() && (factors[t].scalar_type() != weights[0].scalar_type() ||
                                factors[t].sizes() != indices[t].sizes())))
        return std::nullopt;
    }
    const std::int64_t bags = offsets[0].size(0) - (include_last_offset ? 1 : 0);
    if (bags < 0) return std::nullopt;
    return Bags(weights, indices, offsets, factors, bags);
  }

  std::int64_t bags() const { return bags_; }
  std::int64_t dim() const { return first_.size(1); }

  // Whether all indices and offsets lie where they may.
  bool valid(const char* op) const {
    DeviceCheck check;
    check.check = [&](void* flag) {
      launch_columns(first_, kernel_name("check_bags", index_dtype_),
                     static_cast<std::int64_t>(tables_), std::max(most_, offset_count_),
                     column(kIndices), column(kLookups), column(kRows), column(kOffsets),
                     ulong(offset_count_), flag);
    };
    check.message = [op](std::size_t, std::int64_t) {
      return c10::str(op,
                      ": indices must be rows of their table, and offsets begin with 0, not "
                      "decrease and not exceed the number of indices");
    };
    check.is_index = false;
    return in_bounds(first_, std::move(check));
  }
  // The results of a table begin `table_step` elements after the results of the one before, a
  // bag's likewise.
  void pool(const Tensor& out, void* to, std::int64_t table_step, std::int64_t bag_step,
            bool mean) const {
    launch_columns(out, kernel_name("pool_bags", *kernel_dtype(out.scalar_type()), index_dtype_),
                   static_cast<std::int64_t>(tables_) * bags_, dim(), to, ulong(table_step),
                   ulong(bag_step), column(kWeights), column(kStrides), column(kRows),
                   column(kIndices), column(kLookups), column(kOffsets), ulong(offset_count_),
                   with_factors_ ? column(kFactors) : nullptr, ulong(bags_), ulong(dim()),
                   mean ? 1 : 0);
  }

 private:
  enum Column { kWeights, kIndices, kOffsets, kStrides, kRows, kLookups, kFactors };

  static bool fit(const Tensor& weight, const Tensor& first, const Tensor& index,
                  const Tensor& offset, at::ScalarType index_dtype, at::IntArrayRef offset_sizes) {
    return weight.dim() == 2 && kernel_dtype(weight.scalar_type()) &&
           weight.scalar_type() == first.scalar_type() && weight.size(1) == first.size(1) &&
           (index_dtype == at::kLong || index_dtype == at::kInt) && index.dim() == 1 &&
           index.scalar_type() == index_dtype && offset.dim() == 1 &&
           offset.scalar_type() == index_dtype && offset.sizes() == offset_sizes;
  }

  Bags(TensorList weights, TensorList indices, TensorList offsets, TensorList factors,
       std::int64_t bags)
      : first_(weights[0]),
        tables_(weights.size()),
        bags_(bags),
        offset_count_(offsets[0].size(0)),
        with_factors_(!factors.empty()),
        index_dtype_(indices[0].scalar_type() == at::kInt ? "int" : "long") {
    std::vector<Tensor> dense;
    for (const Tensor& weight : weights) dense.push_back(with_dense_rows(weight));
    table_.add_addresses(dense);
    table_.add_addresses(contiguous(indices));
    table_.add_addresses(contiguous(offsets));
    for (const Tensor& weight : dense) table_.add(weight.stride(0));
    for (const Tensor& weight : weights) table_.add(weight.size(0));
    for (const Tensor& index : indices) {
      table_.add(index.size(0));
      most_ = std::max(most_, index.size(0));
    }
    table_.add_addresses(contiguous(factors));
    table_.upload(first_.device());
  }
  static std::vector<Tensor> contiguous(TensorList tensors) {
    std::vector<Tensor> result;
    for (const Tensor& tensor : tensors) result.push_back(tensor.contiguous());
    return result;
  }
  const void* column(Column which) const { return table_.column(which, tables_); }

  Tensor first_;
  std::size_t tables_;
  std::int64_t bags_;
  std::int64_t offset_count_;
  std::int64_t most_ = 0;  // indices of a table
  bool with_factors_;
  std::string index_dtype_;
  Table table_;
};

optional<Tensor> merged_forward(TensorList weights, TensorList indices, TensorList offsets,
                                TensorList factors, std::string_view mode,
                                bool include_last_offset) {
  if (!pools(mode) || (mode == "mean" && !factors.empty())) return std::nullopt;
  const auto bags = Bags::of(weights, indices, offsets, factors, include_last_offset);
  if (!bags || !bags->valid("merged_embeddingbag_forward")) return std::nullopt;
  const auto tables = static_cast<std::int64_t>(weights.size());
  const Tensor out = at::empty({tables, bags->bags(), bags->dim()}, weights[0].options());
  bags->pool(out, out_data(out), bags->bags() * bags->dim(), bags->dim(), mode == "mean");
  return out;
}

optional<Tensor> merged_cat_forward(TensorList weights, TensorList indices, TensorList offsets,
                                    const Tensor& dense, std::string_view mode,
                                    bool include_last_offset) {
  const auto bags = Bags::of(weights, indices, offsets, {}, include_last_offset);
  if (!pools(mode) || !bags || dense.scalar_type() != weights[0].scalar_type() ||
      dense.sizes() != at::IntArrayRef({bags->bags(), bags->dim()}) ||
      !bags->valid("merged_embeddingbag_cat_forward"))
    return std::nullopt;
  const std::int64_t dim = bags->dim();
  const std::int64_t width = (static_cast<std::int64_t>(weights.size()) + 1) * dim;
  const Tensor out = at::empty({bags->bags(), width}, weights[0].options());
  out.narrow(1, 0, dim).copy_(dense);
  const Tensor rest = out.narrow(1, dim, width - dim);
  bags->pool(out, out_data(rest), dim, width, mode == "mean");
  return out;
}

using FourTensors = std::tuple<Tensor, Tensor, Tensor, Tensor>;

// torch's own op. What its derivative needs beyond the sizes of the bags it makes itself.
optional<FourTensors> embedding_bag(const Tensor& weight, const Tensor& indices,
                                    const Tensor& offsets, bool, std::int64_t mode, bool,
                                    const optional<Tensor>& factors, bool include_last_offset,
                                    std::int64_t padding) {
  constexpr std::int64_t kSum = 0, kMean = 1;
  const bool weighted = factors && factors->defined();
  if ((mode != kSum && mode != kMean) || padding >= 0 || (weighted && mode != kSum))
    return std::nullopt;
  const auto bags = Bags::of(weight, indices, offsets,
                             weighted ? TensorList(*factors) : TensorList(), include_last_offset);
  if (!bags || !bags->valid("embedding_bag")) return std::nullopt;
  const Tensor out = at::empty({bags->bags(), bags->dim()}, weight.options());
  bags->pool(out, out_data(out), 0, bags->dim(), mode == kMean);
  const Tensor ends =
      include_last_offset
          ? offsets.slice(0, 1)
          : at::cat({offsets.slice(0, 1), at::full({1}, indices.size(0), offsets.options())});
  const Tensor sizes = ends.sub(offsets.slice(0, 0, bags->bags()));
  return FourTensors(out, at::empty({0}, offsets.options()), sizes, at::zeros_like(sizes));
}

}  // namespace

void register_bags() {
  static torch::Library ours(torch::Library::IMPL, "ipex", c10::DispatchKey::XPU, __FILE__,
                             __LINE__);
  add_kernel<&merged_forward, kBagsSpeed>(ours, "merged_embeddingbag_forward");
  add_kernel<&merged_cat_forward, kBagsSpeed>(ours, "merged_embeddingbag_cat_forward");
}

void register_embedding_bag() {
  static torch::Library aten(torch::Library::IMPL, "aten", c10::DispatchKey::XPU, __FILE__,
                             __LINE__);
  add_kernel<&embedding_bag, kBagsSpeed>(aten, "_embedding_bag");
  add_kernel<&embedding_bag, kBagsSpeed>(aten, "_embedding_bag_forward_only");
}

}  // namespace ipex::xpu
