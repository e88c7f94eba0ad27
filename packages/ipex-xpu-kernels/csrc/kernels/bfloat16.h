// SPDX-License-Identifier: Apache-2.0
// For kernels of users, before their source and after prelude.h: what sycl::ext::oneapi::bfloat16
// leaves to a library of the device. The compiler of the run-time breaks down, and the process with
// it, where that library is needed.
#pragma once

extern "C" SYCL_EXTERNAL float __devicelib_ConvertBF16ToFINTEL(const uint16_t& bits) noexcept {
  ipex::bf16 value;
  value.bits = bits;
  return static_cast<float>(value);
}
extern "C" SYCL_EXTERNAL uint16_t __devicelib_ConvertFToBF16INTEL(const float& value) noexcept {
  return ipex::bf16(value).bits;
}

#define IPEX_VECTORS_OF(n)                                                                     \
  extern "C" SYCL_EXTERNAL void __devicelib_ConvertBF16ToFINTELVec##n(const uint16_t* from,    \
                                                                      float* to) noexcept {    \
    for (int i = 0; i < n; ++i) to[i] = __devicelib_ConvertBF16ToFINTEL(from[i]);              \
  }                                                                                            \
  extern "C" SYCL_EXTERNAL void __devicelib_ConvertFToBF16INTELVec##n(const float* from,       \
                                                                      uint16_t* to) noexcept { \
    for (int i = 0; i < n; ++i) to[i] = __devicelib_ConvertFToBF16INTEL(from[i]);              \
  }
IPEX_VECTORS_OF(1)
IPEX_VECTORS_OF(2)
IPEX_VECTORS_OF(3)
IPEX_VECTORS_OF(4)
IPEX_VECTORS_OF(8)
IPEX_VECTORS_OF(16)
#undef IPEX_VECTORS_OF
