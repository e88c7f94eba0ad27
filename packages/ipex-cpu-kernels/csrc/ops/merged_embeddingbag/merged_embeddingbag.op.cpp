// SPDX-License-Identifier: Apache-2.0
#include "merged_embeddingbag/merged_embeddingbag.h"

#include <algorithm>

#include "ipex/glue/op_loops.h"
#include "merged_embeddingbag/bags_check.h"

namespace ipex {
namespace {

constexpr char kForward[] = "merged_embeddingbag_forward";
constexpr char kCat[] = "merged_embeddingbag_cat_forward";
constexpr char kInt8[] = "merged_embeddingbag_int8_cat_forward";

const auto kernels = IPEX_KERNELS(kForward, merged_embeddingbag);
const auto cat_kernels = IPEX_KERNELS(kCat, merged_embeddingbag);
const auto int8_kernels = IPEX_KERNELS(kInt8, merged_embeddingbag_int8);

// The kernels write numbers of type `dtype`; `scales` belong to int8 tables, or are empty.
template <class K>
void run(const K& table_kernels, ScalarType dtype, const TensorList& weights,
         const TensorList& scales, const Lookups& lookups, BagArgs& args) {
  std::vector<Rows> rows;
  std::vector<BagTable> tables;
  int64_t total = 0;
  for (size_t t = 0; t < weights.size(); ++t) {
    rows.push_back(as_rows(weights[t]));
    const Tensor* factors = lookups.factors(t);
    tables.push_back(
        {rows[t].data, rows[t].stride, lookups.indices(t).const_data_ptr(),
         lookups.offsets(t).const_data_ptr(), factors ? factors->const_data_ptr() : nullptr,
         lookups.indices(t).size(0),
         scales.empty() ? nullptr : static_cast<const float*>(scales[t].const_data_ptr())});
    total += tables.back().lookups;
  }
  args.tables = tables.data();
  args.dim = weights[0].size(1);
  args.bags = lookups.bags();
  args.wide = lookups.wide();
  args.mean = lookups.mean();
  args.include_last = lookups.include_last();
  const int64_t count = static_cast<int64_t>(weights.size());
  if (count * args.bags * args.dim == 0) return;
  table_kernels.visit(dtype, [&]<class T>(auto* kernel) {
    // A task is a part of the bags of one table.
    const int64_t per_bag = (total / (count * args.bags) + 1) * args.dim;
    const int64_t part = std::clamp<int64_t>(row_grain<T>(per_bag), 1, args.bags);
    const int64_t parts = (args.bags + part - 1) / part;
    parallel_for(count * parts, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t first = i % parts * part;
        kernel(&args, i / parts, first, std::min(first + part, args.bags));
      }
    });
  });
}

Tensor forward(const TensorList& weights, const TensorList& indices, const TensorList& offsets,
               const TensorList& factors, const std::string& mode, bool include_last) {
  const Lookups lookups(kForward, weights, indices, offsets, factors, mode, include_last);
  lookups.check_values(weights);
  const int64_t dim = weights[0].size(1);
  const int64_t sizes[] = {static_cast<int64_t>(weights.size()), lookups.bags(), dim};
  Tensor out = new_contiguous(sizes, 3, weights[0].scalar_type());
  BagArgs args{};
  args.out = out.mutable_data_ptr();
  args.table_stride = lookups.bags() * dim;
  args.bag_stride = dim;
  run(kernels, weights[0].scalar_type(), weights, {}, lookups, args);
  return out;
}

// The dense features and the bags of each sample, side by side.
template <class K>
Tensor side_by_side(const char* op, const K& table_kernels, const Tensor& dense,
                    const TensorList& weights, const TensorList& scales, const Lookups& lookups) {
  const int64_t dim = weights[0].size(1), bags = lookups.bags();
  check_shape(op, "dense", dense, {bags, dim});
  lookups.check_values(weights);
  const ScalarType dtype = dense.scalar_type();
  const int64_t width = (static_cast<int64_t>(weights.size()) + 1) * dim;
  const int64_t sizes[] = {bags, width};
  Tensor out = new_contiguous(sizes, 2, dtype);
  const int64_t size = dtype == ScalarType::Float ? 4 : 2;
  char* to = static_cast<char*>(out.mutable_data_ptr());
  const Rows rows = as_rows(dense);
  const char* from = static_cast<const char*>(rows.data);
  if (dim > 0)
    parallel_for(bags, std::max<int64_t>(1, kPieceBytes / (dim * size)),
                 [&](int64_t begin, int64_t end) {
                   for (int64_t b = begin; b < end; ++b)
                     std::copy_n(from + b * rows.stride * size, dim * size, to + b * width * size);
                 });
  BagArgs args{};
  args.out = to + dim * size;
  args.table_stride = dim;
  args.bag_stride = width;
  run(table_kernels, dtype, weights, scales, lookups, args);
  return out;
}

Tensor cat_forward(const TensorList& weights, const TensorList& indices, const TensorList& offsets,
                   const Tensor& dense, const std::string& mode, bool include_last) {
  const Lookups lookups(kCat, weights, indices, offsets, {}, mode, include_last);
  check_kind(kCat, "dense", dense, weights[0], "weights[0]", false);
  return side_by_side(kCat, cat_kernels, dense, weights, {}, lookups);
}

Tensor int8_cat_forward(const Tensor& dense, const TensorList& weights, const TensorList& scales,
                        const TensorList& indices, const TensorList& offsets,
                        const std::string& mode, bool include_last) {
  check_tensor(kInt8, "dense", dense);
  const Lookups lookups(kInt8, weights, indices, offsets, {}, mode, include_last, true);
  check_table_list(kInt8, "scales", scales, weights.size());
  TensorList contiguous;
  for (size_t i = 0; i < scales.size(); ++i) {
    check_float32(kInt8, element("scales", i).c_str(), scales[i], {weights[i].size(0)},
                  "weights[0]");
    contiguous.push_back(as_contiguous(scales[i]));
  }
  return side_by_side(kInt8, int8_kernels, dense, weights, contiguous, lookups);
}

}  // namespace
}  // namespace ipex

STABLE_TORCH_LIBRARY_IMPL(ipex, CPU, m) {
  IPEX_IMPL(m, "merged_embeddingbag_forward", ipex::forward);
  IPEX_IMPL(m, "merged_embeddingbag_cat_forward", ipex::cat_forward);
  IPEX_IMPL(m, "merged_embeddingbag_int8_cat_forward", ipex::int8_cat_forward);
}
