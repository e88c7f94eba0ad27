// SPDX-License-Identifier: Apache-2.0
#include "moe_routing.h"

#include <cstring>

#include "ipex/kernel/vec_loops.h"
#include "ipex/kernel/vec_math.h"

namespace ipex {
namespace {

// Numbers are compared by keys, integers that order like them: -0 equals 0 and NaN is above
// everything. The loops over keys have no branches and become vector instructions.
constexpr int32_t kNanKey = INT32_MAX;
constexpr int32_t kTaken = INT32_MIN;  // below the key of -infinity

IPEX_INLINE int32_t key_of_bits(int32_t bits) {
  const bool nan = (bits & INT32_MAX) > 0x7f800000;
  const int32_t key = bits ^ ((bits >> 31) & INT32_MAX);
  return nan ? kNanKey : bits == INT32_MIN ? 0 : key;
}

IPEX_INLINE int32_t key_of(float value) {
  int32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return key_of_bits(bits);
}

IPEX_INLINE float value_of(int32_t key) {
  const int32_t bits = key ^ ((key >> 31) & INT32_MAX);
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

// scores = softmax(logits), or sigmoid of each.
template <bool kSigmoid, class T>
void score_row(const T* x, float* scores, int64_t n) {
  f32v top = set1(-__builtin_inff());
  for (int64_t i = 0; i < n; i += kLanes) {
    const int64_t count = n - i < kLanes ? n - i : kLanes;
    const f32v v = load_n(x + i, count);
    if constexpr (kSigmoid) {
      store_n(scores + i, sigmoid(v), count);
    } else {
      store_n(scores + i, v, count);
      // A NaN may get lost here, but not in the sum.
      top = max(top, keep_n(v, count, set1(-__builtin_inff())));
    }
  }
  if constexpr (kSigmoid) return;
  const f32v m = set1(reduce_max(top));
  f32v sum = zero();
  for (int64_t i = 0; i < n; i += kLanes) {
    const int64_t count = n - i < kLanes ? n - i : kLanes;
    const f32v e = keep_n(exp_nonpositive(load_n(scores + i, count) - m), count, zero());
    store_n(scores + i, e, count);
    sum = sum + e;
  }
  const f32v divisor = set1(reduce_add(sum));
  for (int64_t i = 0; i < n; i += kLanes) {
    const int64_t count = n - i < kLanes ? n - i : kLanes;
    store_n(scores + i, load_n(scores + i, count) / divisor, count);
  }
}

constexpr int64_t kBlock = 16;  // keys that have a largest one of their own

IPEX_INLINE int32_t largest(const int32_t* keys, int64_t n) {
  int32_t best = kTaken;
  for (int64_t e = 0; e < n; ++e) best = keys[e] > best ? keys[e] : best;
  return best;
}

// The index of the largest of n keys, of equal ones the lowest.
IPEX_INLINE int32_t place_of_largest(const int32_t* keys, int64_t n) {
  const int32_t best = largest(keys, n);
  int32_t place = INT32_MAX;
  for (int32_t e = 0; e < static_cast<int32_t>(n); ++e) {
    const int32_t here = keys[e] == best ? e : INT32_MAX;
    place = here < place ? here : place;
  }
  return place;
}

// Moves the indices of the `count` largest of n keys to ids, largest first, of equal ones the
// lowest index first. n is a multiple of 16; `tops` has room for the largest of each 16, so that
// a key is found without looking through all.
IPEX_INLINE void take_largest(int32_t* keys, int64_t n, int64_t count, int32_t* ids,
                              int32_t* tops) {
  const int64_t blocks = n / kBlock;
  if (blocks > 1)
    for (int64_t b = 0; b < blocks; ++b) tops[b] = largest(keys + b * kBlock, kBlock);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t block = blocks > 1 ? place_of_largest(tops, blocks) : 0;
    int32_t* own = keys + block * kBlock;
    const int32_t place = place_of_largest(own, kBlock);
    own[place] = kTaken;
    if (blocks > 1) tops[block] = largest(own, kBlock);
    ids[i] = static_cast<int32_t>(block * kBlock) + place;
  }
}

// Takes the experts out that are not in one of the best groups. The score of a group is its largest
// value, or the sum of its two largest.
IPEX_INLINE void keep_groups(const RoutingArgs& args, int32_t* keys, int32_t* group_keys) {
  const int64_t size = args.experts / args.groups;
  for (int64_t g = 0; g < args.groups; ++g) {
    int32_t first = kTaken, second = kTaken;
    for (int64_t e = g * size; e < (g + 1) * size; ++e) {
      const int32_t key = keys[e], lower = key < first ? key : first;
      second = lower > second ? lower : second;
      first = key > first ? key : first;
    }
    const bool two = args.bias && size > 1;
    group_keys[g] = two ? key_of(value_of(first) + value_of(second)) : first;
  }
  // A group is among the best if fewer than top_groups are ahead of it.
  for (int64_t g = 0; g < args.groups; ++g) {
    int64_t ahead = 0;
    for (int64_t h = 0; h < args.groups; ++h)
      ahead += group_keys[h] > group_keys[g] || (group_keys[h] == group_keys[g] && h < g);
    if (ahead < args.top_groups) continue;
    for (int64_t e = g * size; e < (g + 1) * size; ++e) keys[e] = kTaken;
  }
}

IPEX_INLINE void scale(const RoutingArgs& args, float* weights) {
  float sum = 0.0f;
  for (int64_t i = 0; i < args.top_k; ++i) sum += weights[i];
  if (args.renormalize)
    for (int64_t i = 0; i < args.top_k; ++i) weights[i] /= sum + 1e-20f;
  for (int64_t i = 0; i < args.top_k; ++i) weights[i] *= args.factor;
}

// Takes experts one after another. The weight of one is its softmax among those that are left and
// not far below it.
template <class T>
IPEX_INLINE void mix(const RoutingArgs& args, const T* x, float* logits, int32_t* keys, float* left,
                     int32_t* ids, float* weights) {
  const int64_t experts = args.experts, padded = routing_padded(experts);
  for (int64_t i = 0; i < experts; i += kLanes) {
    const int64_t count = experts - i < kLanes ? experts - i : kLanes;
    store_n(logits + i, load_n(x + i, count), count);
  }
  for (int64_t e = 0; e < experts; ++e) keys[e] = key_of(logits[e]);
  for (int64_t e = experts; e < padded; ++e) keys[e] = kTaken;
  for (int64_t i = 0; i < args.top_k; ++i) {
    const int32_t chosen = ids[i] = place_of_largest(keys, padded);
    keys[chosen] = kTaken;
    const float top = logits[chosen];
    for (int64_t e = 0; e < experts; ++e) {
      const float size = logits[e] < 0 ? -logits[e] : logits[e];
      const float below = top - logits[e];
      const bool low = below / (size > top ? size : top) > 2.0f * args.jitter;
      const bool taken = keys[e] == kTaken && e != chosen;
      left[e] = low || taken ? -__builtin_inff() : -below;
    }
    f32v sum = zero();
    for (int64_t e = 0; e < experts; e += kLanes) {
      const int64_t count = experts - e < kLanes ? experts - e : kLanes;
      sum = sum + keep_n(exp_nonpositive(load_n(left + e, count)), count, zero());
    }
    weights[i] = 1.0f / reduce_add(sum);
  }
}

template <class T>
IPEX_INLINE void run(const RoutingArgs& args, int64_t begin, int64_t end, float* scratch) {
  const int64_t padded = routing_padded(args.experts);
  float* scores = scratch;
  auto* keys = reinterpret_cast<int32_t*>(scratch + padded);
  auto* left = reinterpret_cast<float*>(keys + padded);
  int32_t* group_keys = keys + 2 * padded;
  for (int64_t t = begin; t < end; ++t) {
    const T* x = static_cast<const T*>(args.logits) + t * args.stride;
    int32_t* ids = args.ids + t * args.top_k;
    float* weights = args.weights + t * args.top_k;
    if (args.sparsemixer) {
      mix(args, x, scores, keys, left, ids, weights);
      scale(args, weights);
      continue;
    }
    if (args.sigmoid)
      score_row<true>(x, scores, args.experts);
    else
      score_row<false>(x, scores, args.experts);
    for (int64_t e = 0; e < args.experts; ++e)
      keys[e] = key_of(args.bias ? scores[e] + args.bias[e] : scores[e]);
    for (int64_t e = args.experts; e < padded; ++e) keys[e] = kTaken;
    if (args.groups > 1) keep_groups(args, keys, group_keys);
    take_largest(keys, padded, args.top_k, ids, reinterpret_cast<int32_t*>(left));
    for (int64_t i = 0; i < args.top_k; ++i) weights[i] = scores[ids[i]];
    scale(args, weights);
  }
}

}  // namespace
}  // namespace ipex

void ipex_k_moe_routing_f32(const ipex::RoutingArgs* args, int64_t begin, int64_t end,
                            float* scratch) {
  ipex::run<float>(*args, begin, end, scratch);
}

void ipex_k_moe_routing_bf16(const ipex::RoutingArgs* args, int64_t begin, int64_t end,
                             float* scratch) {
  ipex::run<ipex::BFloat16>(*args, begin, end, scratch);
}

void ipex_k_moe_routing_f16(const ipex::RoutingArgs* args, int64_t begin, int64_t end,
                            float* scratch) {
  ipex::run<ipex::Half>(*args, begin, end, scratch);
}
