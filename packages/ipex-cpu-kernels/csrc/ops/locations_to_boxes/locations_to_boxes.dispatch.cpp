// SPDX-License-Identifier: Apache-2.0
#include "locations_to_boxes.h"

#include "ipex/kernel/vec_math.h"

namespace ipex {
namespace {

// kLanes boxes, one vector for each of their four numbers.
struct Boxes {
  f32v a, b, c, d;
};

template <typename T>
IPEX_INLINE Boxes load_boxes(const T* p) {
  const f32v2 low = load_pairs(p);
  const f32v2 high = load_pairs(p + 2 * kLanes);
  const f32v2 first = deinterleave({low.a, high.a});
  const f32v2 second = deinterleave({low.b, high.b});
  return {first.a, second.a, first.b, second.b};
}

template <typename T>
IPEX_INLINE void store_boxes(T* p, const Boxes& v) {
  const f32v2 first = interleave({v.a, v.c});
  const f32v2 second = interleave({v.b, v.d});
  store_pairs(p, {first.a, second.a});
  store_pairs(p + 2 * kLanes, {first.b, second.b});
}

template <typename T, typename P>
IPEX_INLINE void decode(const T* where, const P* prior, T* boxes, const LocationsArgs& args) {
  const f32v center = set1(args.center_variance);
  const f32v scale = set1(args.size_variance);
  const f32v half = set1(0.5f);
  const Boxes v = load_boxes(where);
  const Boxes p = load_boxes(prior);
  const f32v x = fma(v.a * center, p.c, p.a);
  const f32v y = fma(v.b * center, p.d, p.b);
  const f32v w = exp(v.c * scale) * p.c * half;
  const f32v h = exp(v.d * scale) * p.d * half;
  store_boxes(boxes, Boxes{x - w, y - h, x + w, y + h});
}

template <typename T, typename P>
IPEX_INLINE void run(const LocationsArgs& args, int64_t begin, int64_t end) {
  const T* where = static_cast<const T*>(args.locations);
  const P* prior = static_cast<const P*>(args.prior);
  T* boxes = static_cast<T*>(args.boxes);
  int64_t i = begin;
  while (i < end) {
    const int64_t at = i % args.priors;
    int64_t n = args.priors - at < end - i ? args.priors - at : end - i;
    if (n >= kLanes) {
      decode(where + 4 * i, prior + 4 * at, boxes + 4 * i, args);
      i += kLanes;
      continue;
    }
    // The last boxes before the priors start again, through copies.
    T locations[4 * kLanes] = {}, result[4 * kLanes];
    P priors[4 * kLanes] = {};
    for (int64_t k = 0; k < 4 * n; ++k) {
      locations[k] = where[4 * i + k];
      priors[k] = prior[4 * at + k];
    }
    decode(locations, priors, result, args);
    for (int64_t k = 0; k < 4 * n; ++k) boxes[4 * i + k] = result[k];
    i += n;
  }
}

template <typename T>
IPEX_INLINE void dispatch(const LocationsArgs& args, int64_t begin, int64_t end) {
  if (args.prior_is_f32)
    run<T, float>(args, begin, end);
  else
    run<T, T>(args, begin, end);
}

}  // namespace
}  // namespace ipex

void ipex_k_locations_to_boxes_f32(const LocationsArgs* args, int64_t begin, int64_t end) {
  ipex::dispatch<float>(*args, begin, end);
}

void ipex_k_locations_to_boxes_bf16(const LocationsArgs* args, int64_t begin, int64_t end) {
  ipex::dispatch<ipex::BFloat16>(*args, begin, end);
}

void ipex_k_locations_to_boxes_f16(const LocationsArgs* args, int64_t begin, int64_t end) {
  ipex::dispatch<ipex::Half>(*args, begin, end);
}
