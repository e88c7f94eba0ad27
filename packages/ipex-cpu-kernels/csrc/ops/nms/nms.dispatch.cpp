// SPDX-License-Identifier: Apache-2.0
#include "nms.h"

#include "ipex/kernel/vec.h"

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

struct Box {
  float left, top, right, bottom, area;

  template <typename T>
  Box(const T* box, float offset)
      : left(one(box)), top(one(box + 1)), right(one(box + 2)), bottom(one(box + 3)) {
    area = rounded((set1(right) - set1(left) + set1(offset)) *
                   (set1(bottom) - set1(top) + set1(offset)))[0];
  }
};

// The boxes that stay, each coordinate in an array of its own, so that kLanes are compared at once.
struct Kept {
  float *left, *top, *right, *bottom, *area;

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

  void put(int64_t place, const Box& box) const {
    left[place] = box.left;
    top[place] = box.top;
    right[place] = box.right;
    bottom[place] = box.bottom;
    area[place] = box.area;
  }

  // Whether one of `count` boxes overlaps this one too much.
  IPEX_INLINE bool meets(int64_t begin, int64_t count, const Box& b, const NmsArgs& args) const {
    const f32v offset = set1(args.offset), threshold = set1(args.threshold);
    bool found = false;
    for (int64_t j = begin; j < begin + count && !found; j += kLanes) {
      // Numbers that are NaN come last in max and min: a NaN side gives a NaN ratio, which is below
      // no threshold and above none.
      f32v width = min(loadu(right + j), set1(b.right)) - max(loadu(left + j), set1(b.left));
      f32v height = min(loadu(bottom + j), set1(b.bottom)) - max(loadu(top + j), set1(b.top));
      width = max(zero(), width + offset);
      height = max(zero(), height + offset);
      const f32v overlap = rounded(width * height);
      const f32v both = loadu(area + j) + set1(b.area);
      const f32v ratio = overlap / (both - overlap);
      // threshold <= ratio: not (ratio < threshold), and not NaN.
      const f32v below = select(lt(ratio, threshold), set1(1.0f), zero());
      const f32v unknown = select(is_nan(ratio), set1(1.0f), below);
      found = any(lt(unknown, set1(0.5f)));
    }
    return found;
  }
};

// One direction of a grid over all boxes. A box lies in the cells from its first side to its second
// one, offset included. Two boxes whose overlap is positive share the cell in which the greater of
// their first sides lies: rounding keeps the order of numbers, and so do cells.
struct Axis {
  float least = __builtin_inff(), most = -__builtin_inff(), sum = 0.0f;
  float per_unit = 0.0f;
  int64_t cells = 1;

  void add(float first, float second) {
    if (first < least) least = first;
    if (second > most) most = second;
    sum += second - first;
  }
  // Cells of the mean size of the boxes.
  void divide(int64_t boxes) {
    const float wanted = (most - least) * static_cast<float>(boxes) / sum;
    set(wanted >= 2.0f ? static_cast<int64_t>(wanted < 4096.0f ? wanted : 4096.0f) : 1);
  }
  void set(int64_t count) {
    per_unit = static_cast<float>(count) / (most - least);
    const bool usable = count > 1 && per_unit > 0.0f && per_unit < 1e30f;
    cells = usable ? count : 1;
  }
  int64_t cell(float x) const {
    if (cells == 1) return 0;
    const float place = (x - least) * per_unit, last = static_cast<float>(cells - 1);
    return static_cast<int64_t>(place > 0.0f ? (place < last ? place : last) : 0.0f);
  }
};

struct Cells {
  int64_t left, right, top, bottom;
  int64_t count() const { return (right - left + 1) * (bottom - top + 1); }
};

template <typename T>
struct Grid {
  const NmsArgs& args;
  Axis x, y;

  Box box(int64_t i) const {
    return Box(static_cast<const T*>(args.boxes) + args.order[i] * args.stride, args.offset);
  }
  // Others overlap none: sides that are not finite, or in the wrong order.
  bool overlaps_any(const Box& b) const {
    return b.area - b.area == 0.0f && b.left <= b.right + args.offset &&
           b.top <= b.bottom + args.offset;
  }
  Cells cells_of(const Box& b) const {
    return {x.cell(b.left), x.cell(b.right + args.offset), y.cell(b.top),
            y.cell(b.bottom + args.offset)};
  }
  template <typename F>
  void each(const Cells& c, F f) const {
    for (int64_t row = c.top; row <= c.bottom; ++row) {
      for (int64_t column = c.left; column <= c.right; ++column) f(row * x.cells + column);
    }
  }

  explicit Grid(const NmsArgs& args_) : args(args_) {
    // Without a threshold boxes that do not touch go as well.
    if (args.count < kNmsGrid || args.count >> 28 != 0 || !(args.threshold > 0.0f)) return;
    int64_t boxes = 0;
    for (int64_t i = 0; i < args.count; ++i) {
      const Box b = box(i);
      if (!overlaps_any(b)) continue;
      x.add(b.left, b.right + args.offset);
      y.add(b.top, b.bottom + args.offset);
      ++boxes;
    }
    x.divide(boxes);
    y.divide(boxes);
    while (x.cells * y.cells > 1 && !fits()) {
      x.set(x.cells / 2);
      y.set(y.cells / 2);
    }
  }
  bool fits() const {
    if (x.cells * y.cells > args.count / kNmsPerCell) return false;
    int64_t copies = 0;
    for (int64_t i = 0; i < args.count && copies <= kNmsCopies * args.count; ++i) {
      const Box b = box(i);
      if (overlaps_any(b)) copies += cells_of(b).count();
    }
    return copies <= kNmsCopies * args.count;
  }

  void run(bool* keep, float* scratch) const {
    auto* begins = reinterpret_cast<uint32_t*>(scratch);
    const int64_t cells = x.cells * y.cells;
    uint32_t* counts = begins + cells;
    for (int64_t c = 0; c < cells; ++c) counts[c] = 0;
    for (int64_t i = 0; i < args.count; ++i) {
      const Box b = box(i);
      if (overlaps_any(b)) each(cells_of(b), [&](int64_t c) { ++counts[c]; });
    }
    uint32_t places = 0;
    for (int64_t c = 0; c < cells; ++c) {
      begins[c] = places;
      places += (counts[c] + 15) / 16 * 16;
      counts[c] = 0;
    }
    const Kept kept(scratch + 2 * cells, places);
    int64_t stay = 0;
    for (int64_t i = 0; i < args.count && stay < args.max_output; ++i) {
      const Box b = box(i);
      if (overlaps_any(b)) {
        const Cells own = cells_of(b);
        bool goes = false;
        each(own, [&](int64_t c) { goes = goes || kept.meets(begins[c], counts[c], b, args); });
        if (goes) continue;
        each(own, [&](int64_t c) { kept.put(begins[c] + counts[c]++, b); });
      }
      keep[args.order[i]] = true;
      ++stay;
    }
  }
};

template <typename T>
IPEX_INLINE void run(const NmsArgs& args, bool* keep, float* scratch) {
  const Grid<T> grid(args);
  if (grid.x.cells * grid.y.cells > 1) {
    grid.run(keep, scratch);
    return;
  }
  const Kept kept(scratch, (args.count + 15) / 16 * 16);
  int64_t stay = 0;
  for (int64_t i = 0; i < args.count && stay < args.max_output; ++i) {
    const Box b = grid.box(i);
    if (kept.meets(0, stay, b, args)) continue;
    keep[args.order[i]] = true;
    kept.put(stay++, b);
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
