// SPDX-License-Identifier: Apache-2.0
#include "frozen_batch_norm.h"

#include "ipex/kernel/vec_loops.h"

namespace ipex {
namespace {

template <typename T>
IPEX_INLINE void one_channel_per_row(const ChannelAffineArgs& args, int64_t begin, int64_t end) {
  const T* x = static_cast<const T*>(args.x);
  T* y = static_cast<T*>(args.y);
  for (int64_t r = begin; r < end; ++r) {
    const f32v scale = set1(args.scale[r % args.channels]);
    const f32v shift = set1(args.shift[r % args.channels]);
    map(x + r * args.columns, y + r * args.columns, args.columns,
        [&](f32v v) IPEX_LAMBDA { return fma(v, scale, shift); });
  }
}

template <typename T>
IPEX_INLINE void all_channels_per_row(const ChannelAffineArgs& args, int64_t begin, int64_t end) {
  const T* x = static_cast<const T*>(args.x) + begin * args.columns;
  T* y = static_cast<T*>(args.y) + begin * args.columns;
  for (int64_t r = begin; r < end; ++r, x += args.columns, y += args.columns)
    for_pairs(
        args.columns,
        [&](int64_t i, int) IPEX_LAMBDA {
          const f32v2 v = load2(x + i);
          const f32v2 scale = load2_as<T>(args.scale + i);
          const f32v2 shift = load2_as<T>(args.shift + i);
          store2(y + i, {fma(v.a, scale.a, shift.a), fma(v.b, scale.b, shift.b)});
        },
        [&](int64_t i, int64_t n) IPEX_LAMBDA {
          const f32v v = load_n(x + i, n);
          store_n(y + i, fma(v, load_n(args.scale + i, n), load_n(args.shift + i, n)), n);
        });
}

template <typename T>
IPEX_INLINE void run(const ChannelAffineArgs& args, int64_t begin, int64_t end) {
  if (args.rows_are_channels)
    one_channel_per_row<T>(args, begin, end);
  else
    all_channels_per_row<T>(args, begin, end);
}

}  // namespace
}  // namespace ipex

void ipex_k_channel_affine_f32(const ChannelAffineArgs* args, int64_t begin, int64_t end) {
  ipex::run<float>(*args, begin, end);
}

void ipex_k_channel_affine_bf16(const ChannelAffineArgs* args, int64_t begin, int64_t end) {
  ipex::run<ipex::BFloat16>(*args, begin, end);
}

void ipex_k_channel_affine_f16(const ChannelAffineArgs* args, int64_t begin, int64_t end) {
  ipex::run<ipex::Half>(*args, begin, end);
}
