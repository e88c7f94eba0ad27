// SPDX-License-Identifier: Apache-2.0
// Pinned memory.
#include <c10/core/Allocator.h>
#include <c10/util/Exception.h>

#include "core/core.h"
#include "device/core/block_cache.h"
#include "device/core/runtime.h"

namespace ipex::xpu {
namespace {

using c10::DataPtr;

// Host memory that the device can read: for copies that do not wait.
class PinnedAllocator final : public c10::Allocator {
 public:
  DataPtr allocate(std::size_t bytes) override {
    void* pointer = bytes == 0 ? nullptr : sycl::malloc_host(bytes, sycl_context(current_device()));
    TORCH_CHECK_WITH(OutOfMemoryError, bytes == 0 || pointer != nullptr,
                     "xpu: no pinned host memory of ", human(bytes));
    return {pointer, pointer, &release, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t count) const override {
    default_copy_data(to, from, count);
  }

 private:
  static void release(void* pointer) {
    if (pointer == nullptr) return;
    for (int i = 0; i < device_count(); ++i) synchronize(i);  // copies that have not waited
    sycl::free(pointer, sycl_context(0));
  }
};

}  // namespace

c10::Allocator* pinned_allocator() {
  static auto* one = new PinnedAllocator;
  return one;
}

bool is_pinned(const void* pointer) {
  return pointer != nullptr && device_count() > 0 &&
         sycl::get_pointer_type(pointer, sycl_context(0)) == sycl::usm::alloc::host;
}

}  // namespace ipex::xpu
