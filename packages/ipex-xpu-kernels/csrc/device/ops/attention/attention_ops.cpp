// SPDX-License-Identifier: Apache-2.0
// Scaled dot-product attention: the kernel, or ops of the device where gradients or dropout are
// wanted.
#include "device/ops/attention/attention_ops.h"

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <c10/core/GradMode.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>

#include "core/core.h"
#include "device/core/kernel_ops.h"
#include "device/core/runtime.h"

namespace ipex::xpu {
namespace {

using at::Tensor;
using std::optional;

// Queries and items of a work-group: of the kernel for CPUs, and of the one for GPUs.
constexpr std::int64_t kLanes = 16;
constexpr std::int64_t kTileRows = 64;
constexpr std::int64_t kTileItems = 256;
// With fewer queries for each head of keys (decoding), most of a tile would be empty.
constexpr std::int64_t kFewestRows = 17;
constexpr std::int64_t kMaxSize = 256;

template <typename T>
const T* data_of(const optional<Tensor>& tensor) {
  return tensor && tensor->defined() ? tensor->const_data_ptr<T>() : nullptr;
}

// The composite of torch asks a table of the device which kernel to take, in which this torch has
// no place for xpu.
Tensor composed(const Tensor& query, const Tensor& key, const Tensor& value,
                const optional<Tensor>& mask, double dropout_p, bool is_causal,
                optional<double> scale, bool enable_gqa) {
  optional<Tensor> bias = mask;
  if (mask && mask->defined() && mask->scalar_type() == at::kBool) {
    bias = at::zeros_like(*mask, query.options())
               .masked_fill_(mask->logical_not(), -std::numeric_limits<double>::infinity());
  }
  return std::get<0>(at::_scaled_dot_product_attention_math(
      query, key, value, bias, dropout_p, is_causal, std::nullopt, scale, enable_gqa));
}

Tensor dense_heads(const Tensor& x) { return x.stride(-1) == 1 ? x : x.contiguous(); }

// Batches of matrices on one device, whose heads share keys evenly.
bool for_kernel(const Tensor& query, const Tensor& key, const Tensor& value,
                const optional<Tensor>& mask, bool enable_gqa) {
  for (const Tensor* x : {&query, &key, &value}) {
    if (!x->is_xpu() || x->get_device() != query.get_device() || x->dim() != 4 ||
        x->size(0) != query.size(0) || x->numel() == 0)
      return false;
  }
  if (mask && mask->defined() && (!mask->is_xpu() || mask->dim() > 4)) return false;
  const std::int64_t heads = query.size(1);
  const std::int64_t shared = key.size(1);
  return value.size(1) == shared && (enable_gqa ? heads % shared == 0 : heads == shared) &&
         key.size(3) == query.size(3) && key.size(2) == value.size(2) &&
         attention_supported(query, key, value);
}

Tensor attention(const Tensor& query, const Tensor& key, const Tensor& value,
                 const optional<Tensor>& mask, double dropout_p, bool is_causal,
                 optional<double> scale, bool enable_gqa) {
  TORCH_CHECK(query.dim() >= 2 && key.dim() >= 2 && value.dim() >= 2,
              "scaled_dot_product_attention: query, key and value must have 2 dimensions or more");
  TORCH_CHECK(
      query.scalar_type() == key.scalar_type() && query.scalar_type() == value.scalar_type(),
      "scaled_dot_product_attention: query, key and value must have one dtype, got ",
      query.scalar_type(), ", ", key.scalar_type(), " and ", value.scalar_type());
  const bool masked = mask && mask->defined();
  TORCH_CHECK(
      !(masked && is_causal),
      "_scaled_dot_product_attention: Explicit attn_mask should not be set when is_causal=True");
  const bool recorded =
      c10::GradMode::is_enabled() && (query.requires_grad() || key.requires_grad() ||
                                      value.requires_grad() || (masked && mask->requires_grad()));
  // Tensors without values, of which graphs are made, come here, too.
  const auto traced = [](const Tensor& x) { return x.key_set().has(c10::DispatchKey::Python); };
  if (recorded || dropout_p > 0 || traced(query) || traced(key) || traced(value) ||
      (masked && traced(*mask)) || !for_kernel(query, key, value, mask, enable_gqa)) {
    return composed(query, key, value, mask, dropout_p, is_causal, scale, enable_gqa);
  }
  const c10::DeviceGuard guard(query.device());
  const auto device = static_cast<c10::DeviceIndex>(query.get_device());
  // Half the rate of the host's in float32, about the same in 16 bits (CPU device).
  const bool wide = query.scalar_type() == at::kFloat;
  if (!use_kernel(device, wide ? KernelSpeed::Slower : KernelSpeed::NotSlower)) {
    count_fallback("aten::scaled_dot_product_attention");
    const optional<Tensor> host_mask = masked ? optional(to_host(*mask)) : std::nullopt;
    return to_device(
        at::scaled_dot_product_attention(to_host(query), to_host(key), to_host(value), host_mask,
                                         dropout_p, is_causal, scale, enable_gqa),
        device);
  }
  const std::int64_t batch = query.size(0);
  const std::int64_t heads = query.size(1);
  const std::int64_t rows = query.size(2);
  Attention call;
  call.query = dense_heads(query);
  call.key = dense_heads(key);
  call.value = dense_heads(value);
  call.out = at::empty({batch, heads, rows, value.size(3)}, query.options());
  if (masked) {
    const Tensor bias =
        mask->scalar_type() == at::kBool
            ? at::zeros_like(*mask, query.options().dtype(at::kFloat))
                  .masked_fill_(mask->logical_not(), -std::numeric_limits<double>::infinity())
            : mask->to(at::kFloat);
    call.mask = bias.expand({batch, heads, rows, key.size(2)});
  }
  call.sequences = batch;
  call.longest = rows;
  call.ahead = is_causal ? 0 : -1;
  call.scale = scale.value_or(1.0 / std::sqrt(static_cast<double>(query.size(3))));
  attention_kernel(call);
  return call.out;
}

bool joint_heads(const Tensor& x) {
  for (std::int64_t d = 0; d + 1 < x.dim(); ++d) {
    if (x.size(d) > 1 && x.stride(d) % 8 != 0) return false;
  }
  return x.size(-1) % 8 == 0 && x.size(-1) <= 128 &&
         reinterpret_cast<std::uintptr_t>(x.const_data_ptr()) % 16 == 0;
}

// Whether joint/attention_pairs.sycl.cpp or attention_joint.sycl.cpp takes the call, where the
// device has joint_matrix: its items bring eight numbers of 16 bits at a time.
bool takes_joint(const Attention& call) {
  return call.query.scalar_type() != at::kFloat && joint_heads(call.query) &&
         joint_heads(call.key) && joint_heads(call.value);
}

}  // namespace

bool attention_supported(const Tensor& query, const Tensor& key, const Tensor& value) {
  return kernel_dtype(query.scalar_type()) && key.scalar_type() == query.scalar_type() &&
         value.scalar_type() == query.scalar_type() && query.size(-1) <= kMaxSize &&
         value.size(-1) <= kMaxSize;
}

void attention_kernel(const Attention& call) {
  const auto dtype = kernel_dtype(call.query.scalar_type());
  const std::int64_t kv_heads = call.key.size(1);
  if (call.out.numel() == 0 || call.sequences == 0 || kv_heads == 0) return;
  const std::int64_t group = call.query.size(1) / kv_heads;
  const auto device = static_cast<c10::DeviceIndex>(call.query.get_device());
  const c10::DeviceGuard guard(call.query.device());
  const auto stride = [](const optional<Tensor>& x, std::int64_t d) -> std::int64_t {
    return x && x->defined() ? x->stride(d) : 0;
  };
  const bool per_sequence = call.slopes && call.slopes->defined() && call.slopes->dim() == 2;
  const std::int64_t queries = group * call.longest;
  const bool tiled = !device_info(device).is_cpu && queries >= kFewestRows;
  const std::int64_t joint = tiled && takes_joint(call) ? device_info(device).joint_sub_group : 0;
  const bool wide = std::max(call.value.size(3), call.query.size(3)) > 64;
  const bool pairs = joint != 0 && joint_pairs(device);
  const std::int64_t rows = pairs && !wide ? 2 * kTileRows : tiled ? kTileRows : kLanes;
  const std::int64_t items = joint != 0 ? 4 * joint : tiled ? kTileItems : kLanes;
  const std::int64_t tiles = (queries + rows - 1) / rows;
  if (tiles == 0) return;
  const std::int64_t values = call.value.size(3);
  const std::string parts = values <= 64 ? ",1>" : values <= 128 ? ",2>" : ",4>";
  const bool plain = !(call.mask && call.mask->defined()) &&
                     !(call.slopes && call.slopes->defined()) &&
                     !(call.table && call.table->defined()) && call.softcap <= 0 && call.scale > 0;
  std::string name = tiled ? "attention_tiles<" + *dtype + parts : "attention<" + *dtype + ">";
  if (joint != 0) {
    const std::string size = wide ? ",128" : ",64";
    name = pairs ? "attention_pairs<" + *dtype + size + (plain ? ",true>" : ",false>")
                 : "attention_joint<" + *dtype + size + ">";
  }
  launch<3>(current_queue(device), device, name,
            {static_cast<std::size_t>(call.sequences), static_cast<std::size_t>(kv_heads),
             static_cast<std::size_t>(tiles * items)},
            {1, 1, static_cast<std::size_t>(items)}, call.query.const_data_ptr(),
            call.key.const_data_ptr(), call.value.const_data_ptr(), call.out.mutable_data_ptr(),
            data_of<float>(call.mask), data_of<float>(call.slopes), data_of<float>(call.sinks),
            data_of<int>(call.q_starts), data_of<int>(call.k_starts), data_of<int>(call.k_lengths),
            data_of<int>(call.table), group, call.query.size(2), call.key.size(2),
            call.query.size(3), call.value.size(3), call.query.stride(0), call.query.stride(1),
            call.query.stride(2), call.key.stride(0), call.key.stride(1), call.key.stride(2),
            call.value.stride(0), call.value.stride(1), call.value.stride(2), call.out.stride(0),
            call.out.stride(1), call.out.stride(2), stride(call.mask, 0), stride(call.mask, 1),
            stride(call.mask, 2), stride(call.mask, 3),
            per_sequence ? call.slopes->stride(0) : std::int64_t{0}, stride(call.table, 0),
            call.key.size(2), call.behind, call.ahead, static_cast<float>(call.scale),
            static_cast<float>(call.softcap), call.bottom_right ? 1 : 0);
}

void register_attention() {
  static torch::Library library(torch::Library::IMPL, "aten", c10::DispatchKey::XPU, __FILE__,
                                __LINE__);
  library.impl("scaled_dot_product_attention", TORCH_FN(attention));
  // For the key of autograd, too: with a kernel for xpu alone, gradients would be lost.
  static torch::Library autograd(torch::Library::IMPL, "aten", c10::DispatchKey::AutogradXPU,
                                 __FILE__, __LINE__);
  autograd.impl("scaled_dot_product_attention", TORCH_FN(attention));
}

}  // namespace ipex::xpu
