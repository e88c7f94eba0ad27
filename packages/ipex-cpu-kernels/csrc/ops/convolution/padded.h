// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstring>

#include "convolution/convolution.h"

namespace ipex {
namespace {

// Copies a line of an image with zeros beside it.
template <class T>
void copy_padded_line(const ConvolutionArgs& args, int64_t image, int64_t line, T* to) {
  const int64_t size = args.width * args.channels, side = args.padding_x * args.channels;
  const auto bytes = [](int64_t n) { return static_cast<size_t>(n) * sizeof(T); };
  std::memset(to, 0, bytes(side));
  std::memcpy(to + side, static_cast<const T*>(args.x) + (image * args.height + line) * size,
              bytes(size));
  std::memset(to + side + size, 0, bytes(side));
}

}  // namespace
}  // namespace ipex
