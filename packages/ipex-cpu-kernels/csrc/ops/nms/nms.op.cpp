// SPDX-License-Identifier: Apache-2.0
#include "nms/nms.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>

#include "ipex/glue/argument_checks.h"
#include "runtime/scratch.h"

namespace ipex {
namespace {

const auto kernels = IPEX_KERNELS("nms_mask", nms);

// A number whose order as an unsigned integer is the reverse of the order of floats. Both zeros are
// one.
uint32_t descending_key(float score) {
  const float value = score == 0.0f ? 0.0f : score;
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits & 0x80000000u ? bits : ~bits & 0x7fffffffu;
}

struct Limits {
  bool is_sorted;
  std::optional<double> min_score;
  int64_t max_candidates;
};

// Writes the boxes to visit, in their order, and returns how many. `keys` has room for all scores.
int64_t order_boxes(const float* scores, int64_t count, const Limits& limits, uint64_t* keys,
                    uint32_t* order) {
  const double least = limits.min_score.value_or(-std::numeric_limits<double>::infinity());
  int64_t found = 0;
  for (int64_t i = 0; i < count; ++i) {
    const float score = scores[i];
    if (std::isnan(score) || (limits.min_score && !(score > static_cast<float>(least)))) continue;
    const uint64_t key = limits.is_sorted ? 0 : descending_key(score);
    keys[found++] = key << 32 | static_cast<uint64_t>(i);
  }
  const int64_t wanted = limits.max_candidates > 0 ? std::min(found, limits.max_candidates) : found;
  if (!limits.is_sorted) {
    if (wanted < found) std::nth_element(keys, keys + wanted, keys + found);
    std::sort(keys, keys + wanted);
  }
  for (int64_t i = 0; i < wanted; ++i) order[i] = static_cast<uint32_t>(keys[i]);
  return wanted;
}

// The element where a group of boxes begins. The dimensions of groups may have any strides.
int64_t group_offset(const Tensor& boxes, int64_t group) {
  int64_t offset = 0;
  for (int64_t i = boxes.dim() - 3; i >= 0; --i) {
    offset += group % boxes.size(i) * boxes.stride(i);
    group /= boxes.size(i);
  }
  return offset;
}

Tensor nms_mask(const Tensor& boxes, const Tensor& scores, double threshold, bool is_sorted,
                double offset, std::optional<double> min_score, int64_t max_candidates,
                int64_t max_output) {
  const char* op = "nms_mask";
  check_tensor(op, "boxes", boxes, 2);
  const int64_t dims = boxes.dim();
  IPEX_CHECK(boxes.size(dims - 1) == 4, op, ": boxes must have shape [..., N, 4], got ",
             shape_text(boxes));
  check_kind(op, "scores", scores, boxes, "boxes", true);
  std::string wanted = "[";
  bool same = scores.dim() == dims - 1;
  for (int64_t i = 0; i < dims - 1; ++i) {
    wanted += (i ? ", " : "") + std::to_string(boxes.size(i));
    same = same && scores.size(i) == boxes.size(i);
  }
  IPEX_CHECK(same, op, ": scores must have shape ", wanted, "], got ", shape_text(scores));
  IPEX_CHECK(std::isfinite(threshold), op, ": threshold must be finite, got ", threshold);
  IPEX_CHECK(std::isfinite(offset), op, ": offset must be finite, got ", offset);

  Tensor mask = new_contiguous(scores.sizes().data(), scores.dim(), ScalarType::Bool);
  if (mask.numel() == 0) return mask;
  const int64_t count = scores.size(dims - 2), groups = scores.numel() / count;
  IPEX_CHECK(count <= std::numeric_limits<uint32_t>::max(), op, ": boxes must be fewer, got ",
             count);
  bool* keep = static_cast<bool*>(mask.mutable_data_ptr());
  std::memset(keep, 0, static_cast<size_t>(mask.numel()));
  const Tensor values = as_float_contiguous(scores);
  const auto* score = static_cast<const float*>(values.const_data_ptr());
  const Tensor corners = boxes.stride(dims - 1) == 1 ? boxes : as_contiguous(boxes);
  const Limits limits{is_sorted, min_score, max_candidates};
  const int64_t key_bytes = (count * 12 + 63) / 64 * 64;
  const int64_t most = max_output > 0 ? std::min(count, max_output) : count;
  std::atomic<bool> no_memory{false};
  kernels.visit(boxes.scalar_type(), [&]<class T>(auto* kernel) {
    parallel_for(groups, std::max<int64_t>(1, 512 / count), [&](int64_t begin, int64_t end) {
      char* scratch = Scratch<Area::kNms>::get(key_bytes + nms_scratch(count) * 4);
      if (!scratch) {
        no_memory = true;
        return;
      }
      for (int64_t g = begin; g < end; ++g) {
        auto* keys = reinterpret_cast<uint64_t*>(scratch);
        auto* order = reinterpret_cast<uint32_t*>(keys + count);
        const int64_t visited = order_boxes(score + g * count, count, limits, keys, order);
        const NmsArgs args{
            .boxes = static_cast<const T*>(corners.const_data_ptr()) + group_offset(corners, g),
            .stride = corners.stride(dims - 2),
            .order = order,
            .count = visited,
            .threshold = static_cast<float>(threshold),
            .offset = static_cast<float>(offset),
            .max_output = most,
        };
        kernel(&args, keep + g * count, reinterpret_cast<float*>(scratch + key_bytes));
      }
    });
  });
  IPEX_CHECK(!no_memory, op, ": out of memory");
  return mask;
}

}  // namespace
}  // namespace ipex

STABLE_TORCH_LIBRARY_IMPL(ipex, CPU, m) { IPEX_IMPL(m, "nms_mask", ipex::nms_mask); }
