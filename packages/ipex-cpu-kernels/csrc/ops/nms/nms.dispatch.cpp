// SPDX-License-Identifier: Apache-2.0
#include "nms.h"

#include "ipex/vec.h"

namespace ipex {
namespace {

// Keeps the compiler from merging a product with the addition that follows: a box whose overlap is
// exactly the threshold must go at every level.
IPEX_INLINE f32v rounded(f32v a) {
#if IPEX_HAVE_AVX512
  asm("" : "+v"(a));
#else
  asm("" : "+x"(a));
#endif
  return a;
}

IPEX_INLINE float one(const float* p) { return *p; }
template <typename T>
IPEX_INLINE float one(const T* p) {
  return load_n(p, 1)[0];
}

// The boxes that stay, each coordinate in an array of its own, so that kLanes are compared at once.
struct Kept {
  float *left, *top, *right, *bottom, *area;
  int64_t count = 0;

  Kept(float* memory, int64_t capacity)
      : left(memory),
        top(memory + capacity),
        right(memory + 2 * capacity),
        bottom(memory + 3 * capacity),
        area(memory + 4 * capacity) {
    // The area of places not in use yet is NaN: no comparison with it is true.
    for (int64_t i = 0; i < capacity; ++i) area[i] = __builtin_nanf("");
    for (int64_t i = 0; i < 4 * capacity; ++i) memory[i] = 0.0f;
  }
};

template <typename T>
IPEX_INLINE void run(const NmsArgs& args, bool* keep, float* scratch) {
  const T* boxes = static_cast<const T*>(args.boxes);
  Kept kept(scratch, nms_scratch(args.count) / 5);
  const f32v offset = set1(args.offset);
  const f32v threshold = set1(args.threshold);
  for (int64_t i = 0; i < args.count && kept.count < args.max_output; ++i) {
    const T* box = boxes + args.order[i] * args.stride;
    const f32v left = set1(one(box)), top = set1(one(box + 1));
    const f32v right = set1(one(box + 2)), bottom = set1(one(box + 3));
    const f32v area = rounded((right - left + offset) * (bottom - top + offset));
    bool goes = false;
    for (int64_t j = 0; j < kept.count && !goes; j += kLanes) {
      // Numbers that are NaN come last in max and min: a NaN side gives a NaN ratio, which is below
      // no threshold and above none.
      f32v width = min(loadu(kept.right + j), right) - max(loadu(kept.left + j), left) + offset;
      f32v height = min(loadu(kept.bottom + j), bottom) - max(loadu(kept.top + j), top) + offset;
      width = max(zero(), width);
      height = max(zero(), height);
      const f32v overlap = rounded(width * height);
      const f32v both = loadu(kept.area + j) + area;
      const f32v ratio = overlap / (both - overlap);
      // threshold <= ratio: not (ratio < threshold), and not NaN.
      const f32v below = select(lt(ratio, threshold), set1(1.0f), zero());
      const f32v unknown = select(is_nan(ratio), set1(1.0f), below);
      goes = any(lt(unknown, set1(0.5f)));
    }
    if (goes) continue;
    keep[args.order[i]] = true;
    kept.left[kept.count] = left[0];
    kept.top[kept.count] = top[0];
    kept.right[kept.count] = right[0];
    kept.bottom[kept.count] = bottom[0];
    kept.area[kept.count] = area[0];
    ++kept.count;
  }
}

}  // namespace
}  // namespace ipex

void ipex_k_nms_f32(const NmsArgs* args, bool* keep, float* scratch) {
  ipex::run<float>(*args, keep, scratch);
}

void ipex_k_nms_bf16(const NmsArgs* args, bool* keep, float* scratch) {
  ipex::run<ipex::BFloat16>(*args, keep, scratch);
}

void ipex_k_nms_f16(const NmsArgs* args, bool* keep, float* scratch) {
  ipex::run<ipex::Half>(*args, keep, scratch);
}
