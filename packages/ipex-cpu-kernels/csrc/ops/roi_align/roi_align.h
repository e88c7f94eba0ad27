// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "ipex/kernel.h"

// Boxes and their grid, shared by both directions.
struct RoiGrid {
  const float* rois;  // [boxes, 5]: image, left, top, right, bottom
  double scale;
  int64_t height, width, channels;  // of the feature map, [images, height, width, channels]
  int64_t bin_rows, bin_columns;
  int64_t sampling_ratio;
  bool aligned;
};

// A pixel of one axis, and how much it counts.
struct RoiTap {
  int32_t pixel;
  float weight;
};

// Taps of all bins of one axis: bin b has taps[b * pixels .. b * pixels + count[b]).
struct RoiAxis {
  RoiTap* taps;
  int32_t* count;
};

struct RoiAlignArgs {
  RoiGrid grid;
  const void* x;  // [images, height, width, channels]
  void* y;        // [boxes, bin_rows, bin_columns, channels] or [boxes, channels, ...]
  bool y_channels_last;
};

struct RoiAlignBackwardArgs {
  RoiGrid grid;
  const void* grad;  // [boxes, bin_rows, bin_columns, channels]
  float* x;          // [images, height, width, channels], is added to
  int64_t boxes;
};

// Channels of a box that are computed together, at most.
inline constexpr int64_t kRoiGroup = 256;

// Working memory of one thread, in bytes.
inline int64_t roi_scratch_bytes(const RoiGrid& grid) {
  const int64_t bins = grid.bin_rows * grid.bin_columns;
  return grid.bin_rows * (grid.height * 8 + 4) + grid.bin_columns * (grid.width * 8 + 4) +
         bins * kRoiGroup * 4 + 256;
}

// The boxes [begin, end).
IPEX_KERNEL_API void ipex_k_roi_align_f32(const RoiAlignArgs* args, int64_t begin, int64_t end,
                                          char* scratch);
IPEX_KERNEL_API void ipex_k_roi_align_bf16(const RoiAlignArgs* args, int64_t begin, int64_t end,
                                           char* scratch);
IPEX_KERNEL_API void ipex_k_roi_align_f16(const RoiAlignArgs* args, int64_t begin, int64_t end,
                                          char* scratch);

// All boxes of one image, channels [begin, end).
IPEX_KERNEL_API void ipex_k_roi_align_backward_f32(const RoiAlignBackwardArgs* args, int64_t image,
                                                   int64_t begin, int64_t end, char* scratch);
IPEX_KERNEL_API void ipex_k_roi_align_backward_bf16(const RoiAlignBackwardArgs* args, int64_t image,
                                                    int64_t begin, int64_t end, char* scratch);
IPEX_KERNEL_API void ipex_k_roi_align_backward_f16(const RoiAlignBackwardArgs* args, int64_t image,
                                                   int64_t begin, int64_t end, char* scratch);
