// SPDX-License-Identifier: Apache-2.0
#include "locations_to_boxes/locations_to_boxes.h"

#include "ipex/glue/argument_checks.h"
#include "ipex/glue/op_loops.h"

namespace ipex {
namespace {

const auto kernels = IPEX_KERNELS("locations_to_boxes", locations_to_boxes);

// The priors with the last dimensions of the locations, so that they repeat as a whole.
Tensor repeating(const Tensor& priors, const Tensor& locations) {
  const int64_t behind = locations.dim() - priors.dim();
  bool stretched = false, leading = true;
  for (int64_t i = 0; i < priors.dim(); ++i) {
    leading = leading && priors.size(i) == 1;
    stretched = stretched || (!leading && priors.size(i) != locations.size(i + behind));
  }
  if (!stretched) return as_contiguous(priors);
  Tensor full = new_contiguous(locations.sizes().data(), locations.dim(), priors.scalar_type());
  torch::stable::copy_(full, priors);
  return full;
}

Tensor locations_to_boxes(const Tensor& locations, const Tensor& priors, double center_variance,
                          double size_variance) {
  const char* op = "locations_to_boxes";
  check_tensor(op, "locations", locations);
  const int64_t dims = locations.dim();
  IPEX_CHECK(locations.size(dims - 1) == 4, op, ": locations must have shape [..., 4], got ",
             shape_text(locations));
  check_kind(op, "priors", priors, locations, "locations", true);
  IPEX_CHECK(priors.dim() > 0 && priors.size(priors.dim() - 1) == 4, op,
             ": priors must have shape [..., 4], got ", shape_text(priors));
  bool fits = priors.dim() <= dims;
  for (int64_t i = 1; fits && i <= priors.dim(); ++i) {
    const int64_t size = priors.size(priors.dim() - i);
    fits = size == 1 || size == locations.size(dims - i);
  }
  IPEX_CHECK(fits, op, ": priors must be broadcastable to locations of shape ",
             shape_text(locations), ", got ", shape_text(priors));

  Tensor boxes = new_contiguous_like(locations);
  if (boxes.numel() == 0) return boxes;
  const Tensor from = as_contiguous(locations);
  const Tensor prior = repeating(priors, locations);
  const LocationsArgs args{
      .locations = from.const_data_ptr(),
      .prior = prior.const_data_ptr(),
      .boxes = boxes.mutable_data_ptr(),
      .priors = prior.numel() / 4,
      .center_variance = static_cast<float>(center_variance),
      .size_variance = static_cast<float>(size_variance),
      .prior_is_f32 = prior.scalar_type() == ScalarType::Float,
  };
  kernels.visit(locations.scalar_type(), [&]<class T>(auto* kernel) {
    // An exponential of each half of the numbers: several times the work of moving them.
    parallel_for(from.numel() / 4, row_grain<T>(4) / 4,
                 [&](int64_t begin, int64_t end) { kernel(&args, begin, end); });
  });
  return boxes;
}

}  // namespace
}  // namespace ipex

STABLE_TORCH_LIBRARY_IMPL(ipex, CPU, m) {
  IPEX_IMPL(m, "locations_to_boxes", ipex::locations_to_boxes);
}
