// SPDX-License-Identifier: Apache-2.0
// What host_memory.cpp and fallback.cpp share beyond runtime.h.
#pragma once

namespace ipex::xpu {

inline constexpr const char* kStridedOnly =
    "sparse and quantized tensors are not offered on xpu: keep them on the host";

}  // namespace ipex::xpu
