// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "ipex/kernel.h"

// y = x * scale + shift for the rows [begin, end) of a row-major matrix [rows, columns].
//   rows_are_channels   row r belongs to channel r % channels; otherwise each column is one channel
//   scale, shift        [channels]
struct ChannelAffineArgs {
  const void* x;
  const float* scale;
  const float* shift;
  void* y;
  int64_t columns, channels;
  bool rows_are_channels;
};

IPEX_KERNEL_API void ipex_k_channel_affine_f32(const ChannelAffineArgs* args, int64_t begin,
                                               int64_t end);
IPEX_KERNEL_API void ipex_k_channel_affine_bf16(const ChannelAffineArgs* args, int64_t begin,
                                                int64_t end);
IPEX_KERNEL_API void ipex_k_channel_affine_f16(const ChannelAffineArgs* args, int64_t begin,
                                               int64_t end);
