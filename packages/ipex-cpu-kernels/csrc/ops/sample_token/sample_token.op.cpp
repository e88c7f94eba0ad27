// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <atomic>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <vector>

#include "ipex/glue/deferred.h"
#include "ipex/glue/op_loops.h"
#include "runtime/scratch.h"
#include "sample.h"

namespace ipex {
namespace {

constexpr const char* kOp = "sample_token";
const auto block_kernels = IPEX_KERNELS(kOp, sample_blocks);
const auto collect_kernels = IPEX_KERNELS(kOp, sample_collect);
const Kernel<decltype(ipex_k_sample_weights)> weights_kernel(kOp, "ipex_k_sample_weights");
const Kernel<decltype(ipex_k_sample_sums)> sums_kernel(kOp, "ipex_k_sample_sums");
const Kernel<decltype(ipex_k_sample_above)> above_kernel(kOp, "ipex_k_sample_above");
const Kernel<decltype(ipex_k_sample_between)> between_kernel(kOp, "ipex_k_sample_between");

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kLowest = std::numeric_limits<float>::lowest();
constexpr float kWeightless = 104.0f;  // exp(-104) is 0 in float

struct Options {
  float temperature;
  int64_t top_k;  // 0: all
  double top_p;
  double min_p;
};

// The smallest value that is kept if the largest values are kept until their weight reaches
// `wanted` > 0; equal values are kept together. -infinity if the weight of all is less. Quickselect
// with weights: expected time n.
float weight_threshold(float* values, float* weights, int64_t n, double wanted) {
  const auto swap = [&](int64_t i, int64_t j) {
    std::swap(values[i], values[j]);
    std::swap(weights[i], weights[j]);
  };
  while (n > 0) {
    const float a = values[0], b = values[n / 2], d = values[n - 1];
    const float pivot = std::max(std::min(a, b), std::min(std::max(a, b), d));
    double above = 0.0, equal = 0.0;
    int64_t larger = 0, end = n;  // [0, larger) > pivot, [end, n) < pivot
    for (int64_t i = 0; i < end;) {
      if (values[i] > pivot) {
        above += weights[i];
        swap(i++, larger++);
      } else if (values[i] < pivot) {
        swap(i, --end);
      } else {
        equal += weights[i++];
      }
    }
    if (above >= wanted) {
      n = larger;
      continue;
    }
    if (above + equal >= wanted) return pivot;
    wanted -= above + equal;
    values += end;
    weights += end;
    n -= end;
  }
  return -kInfinity;
}

// Draws from one row. Memory for candidates belongs to the thread.
template <class T, class Collect>
class Row {
 public:
  Row(const T* x, int64_t n, const float* largest, const float* sums, const Options& options,
      Collect* collect, decltype(ipex_k_sample_weights)* weigh, char* scratch)
      : x_(x),
        n_(n),
        blocks_((n + kSampleBlock - 1) / kSampleBlock),
        largest_(largest),
        sums_(sums),
        options_(options),
        inverse_(1.0f / options.temperature),
        collect_(collect),
        weigh_(weigh) {
    most_ = *std::max_element(largest, largest + blocks_);
    values_ = reinterpret_cast<float*>(scratch);
    weights_ = values_ + room(n);
    some_values_ = weights_ + room(n);
    some_weights_ = some_values_ + room(n);
    indices_ = reinterpret_cast<int32_t*>(some_weights_ + room(n));
  }

  // As many places as kernels want; a multiple of a cache line.
  static int64_t room(int64_t n) { return (n + kSampleRoom + 15) / 16 * 16; }
  static int64_t scratch_bytes(int64_t n) {
    return room(n) * static_cast<int64_t>(5 * sizeof(float));
  }

  int64_t draw(double noise) {
    const bool top_k = options_.top_k > 0 && options_.top_k < n_;
    const bool top_p = options_.top_p < 1.0;
    float least = -kInfinity;
    if (options_.min_p > 0.0)
      least = static_cast<float>(most_ + options_.temperature * std::log(options_.min_p));
    if (!top_k && !top_p && options_.min_p <= 0.0) return draw_from_all(noise);
    float bound = least;  // no candidate is less
    if (top_k) {
      bound = keep_top_k();
    } else if (top_p) {
      bound = gather_for_top_p();
    } else {
      gather(least);
    }
    if (top_p) {
      const double total = top_k ? weight() : total_weight();
      const double wanted = std::max(options_.top_p * total, 1e-300);
      least = std::max(least, top_p_threshold(wanted, bound));
    }
    return draw_from_candidates(noise, std::min(least, most_));
  }

 private:
  void gather(float least) {
    found_ = collect_(x_, n_, least, largest_, values_, indices_);
    weigh_(values_, found_, most_, inverse_, weights_);
  }

  // The sums of blocks of candidates that are >= least, in the memory of some_values_.
  const float* sums_of_candidates(float least) const {
    sums_kernel.get()(values_, weights_, found_, least, some_values_);
    return some_values_;
  }
  double weight() const {
    const float* sums = sums_of_candidates(-kInfinity);
    return std::accumulate(sums, sums + (found_ + kSampleBlock - 1) / kSampleBlock, 0.0);
  }

  double block_weight(int64_t b) const {
    return sums_[b] > 0.0f ? sums_[b] * std::exp((double{largest_[b]} - most_) * inverse_) : 0.0;
  }
  double total_weight() const {
    double sum = 0.0;
    for (int64_t b = 0; b < blocks_; ++b) sum += block_weight(b);
    return sum;
  }

  // The k-th largest of the blocks' largest logits is a lower bound of the k-th largest logit: it
  // leaves few candidates. Returns the least that is kept, or a bound of it.
  float keep_top_k() {
    const int64_t k = options_.top_k;
    float bound = kLowest;  // logits of -infinity are excluded, most of them by a mask
    if (k <= blocks_) {
      std::copy(largest_, largest_ + blocks_, weights_);
      std::nth_element(weights_, weights_ + (k - 1), weights_ + blocks_, std::greater<float>());
      bound = std::max(bound, weights_[k - 1]);
    }
    found_ = collect_(x_, n_, bound, largest_, values_, indices_);
    if (found_ > k) {
      std::copy(values_, values_ + found_, weights_);
      std::nth_element(weights_, weights_ + (k - 1), weights_ + found_, std::greater<float>());
      const float least = weights_[k - 1];
      int64_t kept = 0;
      for (int64_t i = 0; i < found_; ++i) {
        values_[kept] = values_[i];
        indices_[kept] = indices_[i];
        kept += values_[i] >= least ? 1 : 0;
      }
      found_ = kept;
      bound = least;
    }
    weigh_(values_, found_, most_, inverse_, weights_);
    return bound;
  }

  // The weight that is wanted usually lies in a small part of the vocabulary, not far from the top.
  // Returns a bound that no candidate of any weight is below.
  float gather_for_top_p() {
    const double wanted = options_.top_p * total_weight() * (1.0 + 1e-5);
    for (const float distance : {6.0f, 12.0f, 24.0f}) {
      const float bound = most_ - distance * options_.temperature;
      gather(bound);
      if (weight() >= wanted) return bound;
    }
    gather(kLowest);
    return most_ - kWeightless * options_.temperature;
  }

  // weight_threshold() of the candidates >= low. The interval where it lies is cut into equal parts
  // until few candidates are in it, which takes a fraction of the time that a selection takes.
  float top_p_threshold(double wanted, float low) {
    constexpr int64_t kFew = 48;
    float high = std::nextafter(most_, kInfinity);
    const float *values = values_, *weights = weights_;
    int64_t n = found_;
    for (int64_t before = 2 * n; n > kFew && n < before - before / 4 && low > -kInfinity;) {
      float bounds[kSampleBounds];
      double above[kSampleBounds];
      const float step = (high - low) / (kSampleBounds + 1);
      for (int k = 0; k < kSampleBounds; ++k) bounds[k] = high - static_cast<float>(k + 1) * step;
      above_kernel.get()(values, weights, n, bounds, above);
      double taken = 0.0;
      for (int k = 0; k < kSampleBounds; ++k) {
        if (above[k] >= wanted) {
          low = std::max(low, bounds[k]);
          break;
        }
        high = std::min(high, bounds[k]);
        taken = above[k];
      }
      wanted -= taken;
      before = n;
      n = between_kernel.get()(values, weights, n, low, high, some_values_, some_weights_);
      values = some_values_;
      weights = some_weights_;
    }
    if (values != some_values_) {
      std::copy(values, values + n, some_values_);
      std::copy(weights, weights + n, some_weights_);
    }
    return std::max(low, weight_threshold(some_values_, some_weights_, n, wanted));
  }

  int64_t draw_from_candidates(double noise, float least) {
    int64_t first = 0, end = found_;
    double target = 0.0;
    if (found_ <= kSampleBlock) {
      double total = 0.0;
      for (int64_t i = 0; i < found_; ++i)
        if (values_[i] >= least) total += weights_[i];
      target = noise * total;
    } else {
      const int64_t blocks = (found_ + kSampleBlock - 1) / kSampleBlock;
      const float* sums = sums_of_candidates(least);
      target = noise * std::accumulate(sums, sums + blocks, 0.0);
      first = choose_block(target, blocks, [&](int64_t b) { return sums[b]; }) * kSampleBlock;
      end = std::min(found_, first + kSampleBlock);
    }
    return pick(target, least, first, end);
  }

  // The first block at which the sum of the weights exceeds `target`, which becomes what is left.
  template <class Weight>
  static int64_t choose_block(double& target, int64_t blocks, const Weight& weight_of) {
    int64_t chosen = 0;
    double left = target;
    for (int64_t b = 0; b < blocks; ++b) {
      const double weight = weight_of(b);
      if (weight == 0.0) continue;
      chosen = b;
      target = left;
      if (weight > left) break;
      left -= weight;
    }
    return chosen;
  }

  // The first of the candidates [first, end) at which the sum of the weights exceeds `target`.
  int64_t pick(double target, float least, int64_t first, int64_t end) const {
    double sum = 0.0;
    int64_t last = 0;
    for (int64_t i = first; i < end; ++i) {
      if (!(values_[i] >= least) || weights_[i] == 0.0f) continue;
      last = indices_[i];
      sum += weights_[i];
      if (sum > target) break;
    }
    return last;
  }

  // Without limits: the block first, then the element in it.
  int64_t draw_from_all(double noise) {
    double target = noise * total_weight();
    const int64_t chosen =
        choose_block(target, blocks_, [&](int64_t b) { return block_weight(b); });
    const int64_t first = chosen * kSampleBlock;
    found_ = collect_(x_ + first, std::min(kSampleBlock, n_ - first), -kInfinity, largest_ + chosen,
                      values_, indices_);
    weigh_(values_, found_, most_, inverse_, weights_);
    return first + pick(target, -kInfinity, 0, found_);
  }

  const T* x_;
  int64_t n_, blocks_;
  const float *largest_, *sums_;
  const Options& options_;
  float inverse_;
  float most_ = 0.0f;
  Collect* collect_;
  decltype(ipex_k_sample_weights)* weigh_;
  int64_t found_ = 0;
  float *values_, *weights_, *some_values_, *some_weights_;
  int32_t* indices_;
};

void check_arguments(const char* op, const Tensor& logits, const Tensor& noise, double temperature,
                     const Options& options) {
  check_tensor(op, "logits", logits);
  const int64_t lead = logits.dim() - 1;
  IPEX_CHECK(logits.size(lead) > 0 && logits.size(lead) < (int64_t{1} << 31), op,
             ": logits must have between 1 and 2^31 - 1 columns, got ", shape_text(logits));
  IPEX_CHECK(noise.is_cpu(), op, ": noise must be on the device of logits = cpu");
  IPEX_CHECK(noise.scalar_type() == ScalarType::Float, op, ": noise must have dtype float32, got ",
             dtype_name(noise.scalar_type()));
  bool same = noise.dim() == lead;
  for (int64_t i = 0; same && i < lead; ++i) same = noise.size(i) == logits.size(i);
  IPEX_CHECK(same, op, ": noise must have the shape of logits without its last dimension, got ",
             shape_text(noise));
  // Wide enough for any use, narrow enough that float holds it and its reciprocal.
  IPEX_CHECK(options.temperature >= 1e-6f && options.temperature <= 1e6f, op,
             ": temperature must be in [1e-06, 1e+06], got ", temperature);
  IPEX_CHECK(options.top_k >= 0, op, ": top_k must be at least 0, got ", options.top_k);
  IPEX_CHECK(options.top_p >= 0 && options.top_p <= 1, op, ": top_p must be in [0, 1], got ",
             options.top_p);
  IPEX_CHECK(options.min_p >= 0 && options.min_p <= 1, op, ": min_p must be in [0, 1], got ",
             options.min_p);
}

// For the op of this name.
Tensor draw_tokens(const char* op, const Tensor& logits, const Tensor& noise, double temperature,
                   int64_t top_k, double top_p, double min_p) {
  const Options options{static_cast<float>(temperature), top_k, top_p, min_p};
  check_arguments(op, logits, noise, temperature, options);
  const int64_t columns = logits.size(logits.dim() - 1);
  Tensor tokens = new_contiguous(logits.sizes().data(), logits.dim() - 1, ScalarType::Long);
  if (logits.numel() == 0) return tokens;
  const Tensor plain_noise = as_contiguous(noise);
  const float* u = static_cast<const float*>(plain_noise.const_data_ptr());
  auto* to = static_cast<int64_t*>(tokens.mutable_data_ptr());
  const Rows in = as_rows(logits);
  for (int64_t r = 0; r < in.rows; ++r)
    IPEX_CHECK(u[r] >= 0.0f && u[r] < 1.0f, op, ": noise must be in [0, 1), got ", u[r]);

  const int64_t blocks = (columns + kSampleBlock - 1) / kSampleBlock;
  std::vector<float> found(static_cast<size_t>(2 * in.rows * blocks));
  float* largest = found.data();
  float* sums = largest + in.rows * blocks;
  block_kernels.visit(logits.scalar_type(), [&]<class T>(auto* kernel) {
    const T* x = static_cast<const T*>(in.data);
    parallel_for(in.rows * blocks, row_grain<T>(kSampleBlock), [&](int64_t begin, int64_t end) {
      while (begin < end) {
        const int64_t r = begin / blocks, b = begin % blocks;
        const int64_t count = std::min(end - begin, blocks - b);
        kernel(x + r * in.stride, columns, 1.0f / options.temperature, largest + r * blocks,
               sums + r * blocks, b, b + count);
        begin += count;
      }
    });
  });
  for (int64_t r = 0; r < in.rows; ++r) {
    float most = -kInfinity, sum = 0.0f;
    for (int64_t b = r * blocks; b < (r + 1) * blocks; ++b) {
      most = std::max(most, largest[b]);
      sum += sums[b];
    }
    IPEX_CHECK(
        sum == sum && most > -kInfinity && most < kInfinity, op,
        ": logits must have a finite maximum and no NaN in each row, got NaN or infinity in row ",
        r);
  }

  std::atomic<bool> no_memory{false};
  decltype(ipex_k_sample_weights)* weigh = weights_kernel.get();
  collect_kernels.visit(logits.scalar_type(), [&]<class T>(auto* collect) {
    const T* x = static_cast<const T*>(in.data);
    using RowOf = Row<T, std::remove_pointer_t<decltype(collect)>>;
    parallel_for(in.rows, 1, [&](int64_t begin, int64_t end) {
      char* scratch = Scratch<Area::kSampleToken>::get(RowOf::scratch_bytes(columns));
      if (scratch == nullptr) {
        no_memory = true;
        return;
      }
      for (int64_t r = begin; r < end; ++r)
        to[r] = RowOf(x + r * in.stride, columns, largest + r * blocks, sums + r * blocks, options,
                      collect, weigh, scratch)
                    .draw(u[r]);
    });
  });
  IPEX_CHECK(!no_memory, op, ": not enough memory for ", columns, " logits");
  return tokens;
}

Tensor sample_token(const Tensor& logits, const Tensor& noise, double temperature, int64_t top_k,
                    double top_p, double min_p) {
  return draw_tokens(kOp, logits, noise, temperature, top_k, top_p, min_p);
}

// A number in [0, 1) of each seed. 24 bits are exact in float, so that it stays below 1.
float uniform(int64_t seed) {
  uint64_t x = static_cast<uint64_t>(seed) + 0x9E3779B97F4A7C15;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
  x ^= x >> 31;
  return static_cast<float>(x >> 40) * 0x1p-24f;
}

Tensor sample_token_seeded(const Tensor& logits, const Tensor& seeds) {
  constexpr const char* kSeeded = "sample_token_seeded";
  check_tensor(kSeeded, "logits", logits);
  const int64_t lead = logits.dim() - 1;
  IPEX_CHECK(seeds.is_cpu(), kSeeded, ": seeds must be on the device of logits = cpu");
  IPEX_CHECK(seeds.scalar_type() == ScalarType::Long, kSeeded,
             ": seeds must have dtype int64, got ", dtype_name(seeds.scalar_type()));
  bool same = seeds.dim() == lead;
  for (int64_t i = 0; same && i < lead; ++i) same = seeds.size(i) == logits.size(i);
  IPEX_CHECK(same, kSeeded,
             ": seeds must have the shape of logits without its last dimension, got ",
             shape_text(seeds));
  const Tensor plain = as_contiguous(seeds);
  const auto* from = static_cast<const int64_t*>(plain.const_data_ptr());
  const Tensor noise = new_contiguous(logits.sizes().data(), lead, ScalarType::Float);
  auto* to = static_cast<float*>(noise.mutable_data_ptr());
  std::transform(from, from + seeds.numel(), to, uniform);
  return draw_tokens(kSeeded, logits, noise, 1.0, 0, 1.0, 0.0);
}

const KernelBase seeded_op("sample_token_seeded");
const Deferred seeded_in_vllm("_C", "fused_gumbel_argmax(Tensor logits, Tensor seeds) -> Tensor",
                              TORCH_BOX(&sample_token_seeded));

}  // namespace
}  // namespace ipex

STABLE_TORCH_LIBRARY_IMPL(ipex, CPU, m) {
  IPEX_IMPL(m, "sample_token", ipex::sample_token);
  IPEX_IMPL(m, "sample_token_seeded", ipex::sample_token_seeded);
}
