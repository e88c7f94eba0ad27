// SPDX-License-Identifier: Apache-2.0
// Linear layers of groups of rows, and the experts of a mixture, on the kernels of
// experts.sycl.cpp.
#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>

#include <array>
#include <cstring>
#include <string_view>

#include "core/core.h"
#include "device/core/ipex_ops.h"

namespace ipex::xpu {
namespace {

using at::Tensor;
using std::optional;

// On the CPU device the rate of the kernels for CPUs for many rows of an expert in float32, 0.1 to
// 0.4 of it else.
constexpr KernelSpeed kExpertsSpeed = KernelSpeed::Slower;
// As in experts.sycl.cpp.
constexpr std::int64_t kPanel = 32, kExpertsLanes = 16, kTileRows = 8;

std::int64_t padded(std::int64_t n, std::int64_t to) { return (n + to - 1) / to * to; }

Tensor on_device(const std::vector<int>& numbers, const Tensor& like) {
  return at::tensor(numbers, at::kInt).to(like.device());
}
// float32 and dense, for kernels; undefined for none.
Tensor floats(const optional<Tensor>& tensor) {
  return given(tensor) ? tensor->to(at::kFloat).contiguous() : Tensor();
}
bool is_kind(const Tensor& x, at::ScalarType dtype, at::IntArrayRef sizes) {
  return (x.scalar_type() == dtype || x.scalar_type() == at::kFloat) && x.sizes() == sizes;
}
bool none_or_kind(const optional<Tensor>& x, at::ScalarType dtype, at::IntArrayRef sizes) {
  return !given(x) || is_kind(*x, dtype, sizes);
}

// Packed weights
// -----------------------------------------------------------------------------------------------

// What a packed weight begins with (ipex_core.packing.dense).
struct Header {
  std::uint32_t magic, version, format, panel;
  std::int64_t n, k;
};
constexpr std::int64_t kHeaderBytes = 64;

// Weights [experts, n, k] of one dtype; with `gated`, n is twice a multiple of 32.
struct Weights {
  Tensor bytes;
  std::int64_t n, k;
};

optional<Weights> weights_of(const Tensor& bytes, std::int64_t n, std::int64_t k,
                             at::ScalarType dtype) {
  constexpr std::uint32_t kMagic = 0x57585049;
  const std::uint32_t format = dtype == at::kFloat ? 0 : dtype == at::kBFloat16 ? 1 : 2;
  const std::int64_t steps = dtype == at::kBFloat16 ? padded(k, 2) : k;
  const std::int64_t size =
      kHeaderBytes + padded(n, kPanel) * steps * static_cast<std::int64_t>(at::elementSize(dtype));
  if (bytes.scalar_type() != at::kByte || bytes.dim() != 2 || bytes.size(1) != size ||
      !bytes.is_contiguous())
    return std::nullopt;
  const Tensor heads =
      bytes.narrow(1, 0, static_cast<std::int64_t>(sizeof(Header))).contiguous().cpu();
  for (std::int64_t e = 0; e < heads.size(0); ++e) {
    Header head{};
    std::memcpy(&head, heads.const_data_ptr<std::uint8_t>() + e * heads.size(1), sizeof head);
    if (head.magic != kMagic || head.version != 1 || head.format != format ||
        head.panel != kPanel || head.n != n || head.k != k)
      return std::nullopt;
  }
  return Weights{bytes, n, k};
}

// Products
// -----------------------------------------------------------------------------------------------

// Rows for kernels: the places of expert 0, then of expert 1 and so on.
class Places {
 public:
  explicit Places(const std::vector<std::int64_t>& counts) {
    for (std::size_t e = 0; e < counts.size(); ++e) {
      for (std::int64_t i = 0; i < counts[e]; i += kTileRows) {
        for (const std::int64_t value :
             {static_cast<std::int64_t>(e), size_ + i, std::min(kTileRows, counts[e] - i)})
          tiles_.push_back(static_cast<int>(value));
      }
      experts_.insert(experts_.end(), static_cast<std::size_t>(counts[e]), static_cast<int>(e));
      size_ += counts[e];
    }
  }
  std::int64_t size() const { return size_; }
  std::int64_t tile_count() const { return static_cast<std::int64_t>(tiles_.size() / 3); }
  Tensor tiles(const Tensor& like) const { return on_device(tiles_, like); }
  // The expert of each place.
  Tensor experts(const Tensor& like) const { return on_device(experts_, like); }

 private:
  std::int64_t size_ = 0;
  std::vector<int> tiles_;
  std::vector<int> experts_;
};

// [places, n] in float32; `rows` (or undefined) has the row of x for each place.
Tensor product(const Tensor& x, const Tensor& rows, const Weights& weights, const Places& places) {
  const Tensor y = at::empty({places.size(), weights.n}, x.options().dtype(at::kFloat));
  if (y.numel() == 0) return y;
  const Tensor tiles = places.tiles(x);
  const auto device = static_cast<c10::DeviceIndex>(x.get_device());
  launch<2>(current_queue(device), device,
            kernel_name("expert_product", *kernel_dtype(x.scalar_type())),
            {static_cast<std::size_t>(places.tile_count()),
             static_cast<std::size_t>(padded(weights.n, kExpertsLanes))},
            {1, static_cast<std::size_t>(kExpertsLanes)}, out_data(y), data(x), ulong(x.stride(0)),
            data(rows),
            static_cast<const void*>(weights.bytes.const_data_ptr<std::uint8_t>() + kHeaderBytes),
            ulong(weights.bytes.size(1)), data(tiles), ulong(weights.n), ulong(weights.k));
  return y;
}

// Groups of rows
// -----------------------------------------------------------------------------------------------

optional<Tensor> activated(const Tensor& y, std::string_view activation) {
  if (activation == "none") return y;
  if (activation == "relu") return at::relu(y);
  if (activation == "gelu") return at::gelu(y);
  if (activation == "gelu_tanh") return at::gelu(y, "tanh");
  if (activation == "silu") return at::silu(y);
  return std::nullopt;
}

// How many rows each group has; nothing if the offsets do not cut `rows` rows into groups.
optional<std::vector<std::int64_t>> counts_of(const Tensor& offsets, std::int64_t rows) {
  if ((offsets.scalar_type() != at::kLong && offsets.scalar_type() != at::kInt) ||
      offsets.dim() != 1 || offsets.size(0) == 0)
    return std::nullopt;
  const Tensor ends = offsets.cpu().to(at::kLong);
  const auto* end = ends.const_data_ptr<std::int64_t>();
  if (end[0] != 0 || end[ends.size(0) - 1] != rows) return std::nullopt;
  std::vector<std::int64_t> counts;
  for (std::int64_t g = 1; g < ends.size(0); ++g) {
    counts.push_back(end[g] - end[g - 1]);
    if (counts.back() < 0) return std::nullopt;
  }
  return counts;
}

optional<Tensor> grouped_linear(const Tensor& x, const Tensor& offsets, const Tensor& packed,
                                std::int64_t out_features, const optional<Tensor>& bias,
                                const optional<Tensor>& residual, std::string_view activation,
                                const optional<Tensor>& mul, const optional<Tensor>& residual2,
                                std::string_view gate) {
  const bool gated = gate != "none";
  if (x.dim() != 2 || !kernel_dtype(x.scalar_type()) || out_features <= 0 ||
      x.size(0) > std::numeric_limits<int>::max() || (gated && activation != "none"))
    return std::nullopt;
  const std::int64_t n = gated ? 2 * padded(out_features, kPanel) : out_features;
  const auto counts = counts_of(offsets, x.size(0));
  const auto weights = weights_of(packed, n, x.size(1), x.scalar_type());
  for (const auto& value : {residual, mul, residual2}) {
    if (given(value) && (value->scalar_type() != x.scalar_type() ||
                         value->sizes() != at::IntArrayRef({x.size(0), out_features})))
      return std::nullopt;
  }
  if (!counts || !weights || packed.size(0) != static_cast<std::int64_t>(counts->size()) ||
      !none_or_kind(bias, x.scalar_type(), {packed.size(0), n}))
    return std::nullopt;
  const Places places(*counts);
  Tensor y = product(with_dense_rows(x), {}, *weights, places);
  if (given(bias) && y.numel() != 0) y.add_(floats(bias).index_select(0, places.experts(x)));
  optional<Tensor> part = y;
  if (gated) {
    const Tensor blocks = y.view({x.size(0), n / kPanel / 2, 2, kPanel});
    const auto half = [&](std::int64_t i) {
      return blocks.select(2, i).reshape({x.size(0), n / 2}).narrow(1, 0, out_features);
    };
    part = activated(half(0), gate);
    if (part) part->mul_(half(1));
  } else {
    part = activated(y, activation);
  }
  if (!part) return std::nullopt;
  if (given(mul)) part->mul_(floats(mul));
  if (given(residual)) part->add_(floats(residual));
  if (given(residual2)) part->add_(floats(residual2));
  return part->to(x.scalar_type()).contiguous();
}

// Mixture of experts
// -----------------------------------------------------------------------------------------------

// Which tokens go where. Nothing if an id is invalid.
struct Routes {
  std::vector<std::int64_t> counts;  // of each expert
  std::vector<int> tokens;           // of each place
  std::vector<int> slots;            // of each place, in the flat ids
  std::vector<int> starts;           // of each token, and an end
  std::vector<int> places;           // of each token, by expert

  static optional<Routes> of(const Tensor& topk_ids, std::int64_t experts, std::int64_t first,
                             std::int64_t total) {
    const Tensor ids = topk_ids.cpu().to(at::kLong).contiguous();
    const auto* id = ids.const_data_ptr<std::int64_t>();
    const std::int64_t tokens = ids.size(0), width = ids.size(1);
    Routes routes;
    routes.counts.resize(static_cast<std::size_t>(experts));
    std::vector<std::vector<int>> slots(static_cast<std::size_t>(experts));
    for (std::int64_t i = 0; i < tokens * width; ++i) {
      if (id[i] < -1 || id[i] >= total) return std::nullopt;
      const std::int64_t expert = id[i] - first;
      if (id[i] >= 0 && expert >= 0 && expert < experts)
        slots[static_cast<std::size_t>(expert)].push_back(static_cast<int>(i));
    }
    std::vector<std::vector<int>> of_token(static_cast<std::size_t>(tokens));
    for (std::size_t e = 0; e < slots.size(); ++e) {
      routes.counts[e] = static_cast<std::int64_t>(slots[e].size());
      for (const int slot : slots[e]) {
        const auto token = static_cast<int>(slot / width);
        of_token[static_cast<std::size_t>(token)].push_back(static_cast<int>(routes.slots.size()));
        routes.slots.push_back(slot);
        routes.tokens.push_back(token);
      }
    }
    routes.starts.push_back(0);
    for (const auto& list : of_token) {
      routes.places.insert(routes.places.end(), list.begin(), list.end());
      routes.starts.push_back(static_cast<int>(routes.places.size()));
    }
    return routes;
  }
};

// Two products with a gate (or relu2) in between, for all experts.
struct Mlp {
  Weights first, second;
  std::int64_t inner;
  int activation;
  float alpha, limit;

  // What the places find, in float32 and without the last bias.
  Tensor run(const Tensor& x, const Tensor& rows, const Places& places, const Tensor& experts,
             const Tensor& bias) const {
    const Tensor both = product(x, rows, first, places);
    const Tensor middle = at::empty({places.size(), inner}, x.options());
    launch_columns(x, kernel_name("expert_gate", *kernel_dtype(x.scalar_type())), places.size(),
                   inner, out_data(middle), data(both), ulong(first.n), data(bias), data(experts),
                   ulong(inner), activation, alpha, limit);
    return product(middle, {}, second, places);
  }
};

optional<int> activation_of(std::string_view name) {
  constexpr std::array<std::string_view, 5> kNames{"silu", "gelu", "gelu_tanh", "swigluoai",
                                                   "relu2"};
  for (std::size_t i = 0; i < kNames.size(); ++i) {
    if (kNames[i] == name) return static_cast<int>(i);
  }
  return std::nullopt;
}

optional<Tensor> fused_experts(const Tensor& hidden_states, const Tensor& w13, const Tensor& w2,
                               const Tensor& topk_weights, const Tensor& topk_ids,
                               std::int64_t intermediate_size, std::string_view activation,
                               const optional<Tensor>& w13_bias, const optional<Tensor>& w2_bias,
                               const optional<Tensor>& shared_w13,
                               const optional<Tensor>& shared_w2,
                               const optional<Tensor>& shared_weights,
                               std::int64_t shared_intermediate_size, std::int64_t experts_start_id,
                               std::int64_t num_experts, double swiglu_alpha, double swiglu_limit,
                               std::string_view lowp_mode) {
  const auto kind = activation_of(activation);
  const at::ScalarType dtype = hidden_states.scalar_type();
  if (hidden_states.dim() != 2 || hidden_states.size(1) == 0 || !kernel_dtype(dtype) || !kind ||
      intermediate_size <= 0 || lowp_mode != "none" || w13.dim() != 2 || w2.dim() != 2 ||
      topk_ids.dim() != 2 || given(shared_w13) != given(shared_w2))
    return std::nullopt;
  const std::int64_t tokens = hidden_states.size(0), hidden = hidden_states.size(1);
  const std::int64_t experts = w13.size(0);
  const std::int64_t total = num_experts == 0 ? experts : num_experts;
  const bool pair = activation != "relu2";
  const auto mlp = [&](const Tensor& a, const Tensor& b, std::int64_t inner) -> optional<Mlp> {
    const auto first = weights_of(a, pair ? 2 * padded(inner, kPanel) : inner, hidden, dtype);
    const auto second = weights_of(b, hidden, inner, dtype);
    if (!first || !second || inner <= 0 || a.size(0) == 0 || a.size(0) != b.size(0))
      return std::nullopt;
    return Mlp{*first,
               *second,
               inner,
               *kind,
               static_cast<float>(swiglu_alpha),
               static_cast<float>(swiglu_limit)};
  };
  const auto own = mlp(w13, w2, intermediate_size);
  if (!own || topk_ids.size(0) != tokens ||
      (topk_ids.scalar_type() != at::kLong && topk_ids.scalar_type() != at::kInt) ||
      topk_ids.numel() > std::numeric_limits<int>::max() ||
      !is_kind(topk_weights, dtype, topk_ids.sizes()) ||
      !none_or_kind(w13_bias, dtype, {experts, (pair ? 2 : 1) * intermediate_size}) ||
      !none_or_kind(w2_bias, dtype, {experts, hidden}) || num_experts < 0 || experts_start_id < 0 ||
      experts_start_id > total - experts)
    return std::nullopt;
  const auto shared =
      given(shared_w13) ? mlp(*shared_w13, *shared_w2, shared_intermediate_size) : std::nullopt;
  if (given(shared_w13)
          ? !shared || shared_w13->size(0) != 1 || !none_or_kind(shared_weights, dtype, {tokens})
          : given(shared_weights))
    return std::nullopt;
  const auto routes = Routes::of(topk_ids, experts, experts_start_id, total);
  if (!routes) return std::nullopt;

  const Tensor x = with_dense_rows(hidden_states);
  const Tensor y = at::empty({tokens, hidden}, x.options());
  if (tokens == 0) return y;
  const Places places(routes->counts);
  const Tensor expert = places.experts(x);
  const Tensor found = own->run(x, on_device(routes->tokens, x), places, expert, floats(w13_bias));
  const Tensor factors =
      floats(topk_weights).view({-1}).index_select(0, on_device(routes->slots, x));
  const Tensor in_common = shared ? shared->run(x, {}, Places({tokens}), {}, {}) : Tensor();
  const Tensor bias = floats(w2_bias), common_factors = floats(shared_weights);
  const Tensor place = on_device(routes->places, x), starts = on_device(routes->starts, x);
  launch_columns(x, kernel_name("expert_sum", *kernel_dtype(dtype)), tokens, hidden, out_data(y),
                 data(found), data(bias), data(expert), data(factors), data(place), data(starts),
                 data(in_common), data(common_factors), ulong(hidden));
  return y;
}

}  // namespace

void register_experts() {
  static torch::Library ours(torch::Library::IMPL, "ipex", c10::DispatchKey::XPU, __FILE__,
                             __LINE__);
  add_kernel<&grouped_linear, kExpertsSpeed>(ours, "grouped_linear");
  add_kernel<&fused_experts, kExpertsSpeed>(ours, "fused_experts");
}

}  // namespace ipex::xpu
