// SPDX-License-Identifier: Apache-2.0
// A torch that was built for CUDA counts that as its accelerator, with or without a GPU, and takes
// no xpu beside it. In a torch without CUDA the hooks are an object of the base class, which has no
// members; here they are made one.
#include <ATen/detail/CUDAHooksInterface.h>

#include <cstring>

extern "C" __attribute__((visibility("default"))) bool hide_cuda() {
  static const at::CUDAHooksInterface* none = new at::CUDAHooksInterface;
  const at::CUDAHooksInterface& hooks = at::detail::getCUDAHooks();
  std::memcpy(const_cast<void*>(static_cast<const void*>(&hooks)), static_cast<const void*>(none),
              sizeof(void*));
  return !hooks.hasCUDA();
}
