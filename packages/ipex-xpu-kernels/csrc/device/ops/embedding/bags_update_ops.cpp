// SPDX-License-Identifier: Apache-2.0
// Steps of SGD and Adagrad on embedding tables on the kernel of bags_update.sycl.cpp. The host
// reads and sorts the lookups, which it has to check anyway before anything is written.
#include <ATen/Functions.h>

#include <algorithm>
#include <numeric>
#include <string_view>

#include "device/core/ipex_ops.h"

namespace ipex::xpu {
namespace {

using at::Tensor;
using at::TensorList;
using std::optional;

// The arguments that say what was looked up.
struct Lookups {
  TensorList indices, offsets, factors;
  bool mean, include_last_offset;
};

// The lookups of all tables by row (see bags_update.sycl.cpp).
struct Rows {
  std::vector<std::int64_t> places, begins;
  std::vector<int> bags;
  std::vector<float> scales;
};

template <typename T>
std::vector<T> on_host(const Tensor& tensor, at::ScalarType dtype) {
  const Tensor host = tensor.cpu().to(dtype).contiguous();
  const T* first = host.const_data_ptr<T>();
  return {first, first + host.numel()};
}

// Adds the lookups of a table; false if one of them is wrong.
bool add_table(Rows& rows, std::int64_t table, std::int64_t row_count, const Lookups& lookups) {
  const auto t = static_cast<std::size_t>(table);
  const auto indices = on_host<std::int64_t>(lookups.indices[t], at::kLong);
  auto ends = on_host<std::int64_t>(lookups.offsets[t], at::kLong);
  const auto count = static_cast<std::int64_t>(indices.size());
  if (!ends.empty() && ends.front() != 0) return false;
  if (!lookups.include_last_offset) ends.push_back(ends.empty() ? 0 : count);
  if (!std::is_sorted(ends.begin(), ends.end()) || ends.back() > count) return false;
  for (const std::int64_t index : indices) {
    if (index < 0 || index >= row_count) return false;
  }
  std::vector<int> bags(static_cast<std::size_t>(ends.back()));
  std::vector<float> scales(bags.size(), 1.f);
  for (std::size_t bag = 0; bag + 1 < ends.size(); ++bag) {
    for (auto k = ends[bag]; k < ends[bag + 1]; ++k) {
      bags[static_cast<std::size_t>(k)] = static_cast<int>(bag);
      if (lookups.mean)
        scales[static_cast<std::size_t>(k)] = 1.f / static_cast<float>(ends[bag + 1] - ends[bag]);
    }
  }
  if (!lookups.factors.empty()) scales = on_host<float>(lookups.factors[t], at::kFloat);
  std::vector<std::size_t> order(bags.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return indices[a] < indices[b]; });
  for (std::size_t i = 0; i < order.size(); ++i) {
    const std::int64_t row = indices[order[i]];
    if (i == 0 || row != indices[order[i - 1]]) {
      rows.places.insert(rows.places.end(), {table, row});
      rows.begins.push_back(static_cast<std::int64_t>(rows.bags.size()));
    }
    rows.bags.push_back(bags[order[i]]);
    rows.scales.push_back(scales[order[i]]);
  }
  return true;
}

// Whether no two tensors that are written to share memory.
bool apart(std::initializer_list<TensorList> lists) {
  std::vector<std::pair<std::uintptr_t, std::uintptr_t>> spans;
  for (const TensorList list : lists) {
    for (const Tensor& tensor : list) {
      if (tensor.numel() == 0) continue;
      const auto begin = reinterpret_cast<std::uintptr_t>(tensor.const_data_ptr());
      spans.emplace_back(begin, begin + tensor.nbytes());
    }
  }
  std::sort(spans.begin(), spans.end());
  for (std::size_t i = 1; i < spans.size(); ++i) {
    if (spans[i].first < spans[i - 1].second) return false;
  }
  return true;
}

bool fits(TensorList grads, TensorList weights, TensorList trails, TensorList squares,
          const Lookups& lookups) {
  const std::size_t tables = weights.size();
  for (const std::size_t count :
       {grads.size(), trails.size(), lookups.indices.size(), lookups.offsets.size()}) {
    if (count != tables || tables == 0) return false;
  }
  if ((!squares.empty() && squares.size() != tables) ||
      (!lookups.factors.empty() && (lookups.factors.size() != tables || lookups.mean)))
    return false;
  const auto same = [](const Tensor& x, at::ScalarType dtype, at::IntArrayRef sizes) {
    return x.scalar_type() == dtype && x.sizes() == sizes;
  };
  const at::ScalarType dtype = weights[0].scalar_type();
  const at::ScalarType index_dtype = lookups.indices[0].scalar_type();
  if (!kernel_dtype(dtype) || (index_dtype != at::kLong && index_dtype != at::kInt) ||
      weights[0].dim() != 2 || lookups.offsets[0].dim() != 1 ||
      lookups.offsets[0].size(0) < (lookups.include_last_offset ? 1 : 0))
    return false;
  const at::IntArrayRef offsets = lookups.offsets[0].sizes();
  const std::int64_t bags = offsets[0] - (lookups.include_last_offset ? 1 : 0);
  for (std::size_t t = 0; t < tables; ++t) {
    const Tensor& w = weights[t];
    const bool split = trails[t].numel() != 0;
    if (w.scalar_type() != dtype || w.dim() != 2 || w.size(1) != weights[0].size(1) ||
        !w.is_contiguous() || !same(grads[t], dtype, {bags, w.size(1)}) ||
        (split && (dtype != at::kBFloat16 || !same(trails[t], dtype, w.sizes()) ||
                   !trails[t].is_contiguous())) ||
        (!squares.empty() &&
         (!same(squares[t], at::kFloat, w.sizes()) || !squares[t].is_contiguous())) ||
        lookups.indices[t].dim() != 1 || lookups.indices[t].scalar_type() != index_dtype ||
        !same(lookups.offsets[t], index_dtype, offsets) ||
        (!lookups.factors.empty() && !same(lookups.factors[t], dtype, lookups.indices[t].sizes())))
      return false;
  }
  return apart({weights, trails, squares});
}

bool update(TensorList grads, TensorList weights, TensorList trails, TensorList squares,
            const Lookups& lookups, double rate, double extra) {
  if (!fits(grads, weights, trails, squares, lookups)) return false;
  Rows rows;
  for (std::size_t t = 0; t < weights.size(); ++t) {
    if (!add_table(rows, static_cast<std::int64_t>(t), weights[t].size(0), lookups)) return false;
  }
  if (rows.bags.empty() || weights[0].size(1) == 0) return true;
  const auto row_count = static_cast<std::int64_t>(rows.begins.size());
  rows.begins.push_back(static_cast<std::int64_t>(rows.bags.size()));
  std::vector<Tensor> dense;
  for (const Tensor& grad : grads) dense.push_back(with_dense_rows(grad));
  Table table;
  table.add_addresses(weights.vec());
  table.add_addresses(trails.vec());
  table.add_addresses(dense);
  for (const Tensor& grad : dense) table.add(grad.stride(0));
  table.add_addresses(squares.vec());
  const c10::Device device = weights[0].device();
  table.upload(device);
  const std::size_t tables = weights.size();
  const Tensor places = at::tensor(rows.places, at::kLong).to(device);
  const Tensor begins = at::tensor(rows.begins, at::kLong).to(device);
  const Tensor bags = at::tensor(rows.bags, at::kInt).to(device);
  const Tensor scales = at::tensor(rows.scales, at::kFloat).to(device);
  launch_columns(weights[0], kernel_name("update_rows", *kernel_dtype(weights[0].scalar_type())),
                 row_count, weights[0].size(1), table.column(0, tables), table.column(1, tables),
                 squares.empty() ? nullptr : table.column(4, tables), table.column(2, tables),
                 table.column(3, tables), data(places), data(begins), data(bags), data(scales),
                 ulong(weights[0].size(1)), static_cast<float>(rate), static_cast<float>(extra));
  return true;
}

bool sgd(TensorList grads, TensorList weights, TensorList trails, TensorList indices,
         TensorList offsets, TensorList factors, std::string_view mode, bool include_last_offset,
         double lr, double weight_decay) {
  const Lookups lookups{indices, offsets, factors, mode == "mean", include_last_offset};
  return pools(mode) && update(grads, weights, trails, {}, lookups, lr, weight_decay);
}
bool adagrad(TensorList grads, TensorList weights, TensorList trails, TensorList squares,
             TensorList indices, TensorList offsets, TensorList factors, std::string_view mode,
             bool include_last_offset, double lr, double eps) {
  const Lookups lookups{indices, offsets, factors, mode == "mean", include_last_offset};
  return pools(mode) && squares.size() == weights.size() &&
         update(grads, weights, trails, squares, lookups, lr, eps);
}

// On the CPU device 0.1 to 0.4 of the rate of the kernels for CPUs.
constexpr KernelSpeed kUpdateSpeed = KernelSpeed::Slower;

}  // namespace

void register_bags_update() {
  static torch::Library ours(torch::Library::IMPL, "ipex", c10::DispatchKey::XPU, __FILE__,
                             __LINE__);
  add_kernel<&sgd, kUpdateSpeed>(ours, "merged_embeddingbag_sgd");
  add_kernel<&adagrad, kUpdateSpeed>(ours, "merged_embeddingbag_adagrad");
}

}  // namespace ipex::xpu
