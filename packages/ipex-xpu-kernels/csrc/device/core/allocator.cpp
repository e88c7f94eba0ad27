// SPDX-License-Identifier: Apache-2.0
// Torch's allocator of the device: a cache of blocks for each one.
#include <c10/util/Exception.h>

#include <memory>

#include "core/core.h"
#include "device/core/block_cache.h"
#include "device/core/runtime.h"

namespace ipex::xpu {
namespace {

using c10::DataPtr;
using c10::Device;
using c10::DeviceIndex;
using c10::CachingDeviceAllocator::DeviceStats;

void free_block(void* context);

class Allocator final : public c10::DeviceAllocator {
 public:
  Allocator() {
    for (int i = 0; i < device_count(); ++i)
      caches_.push_back(std::make_unique<BlockCache>(static_cast<DeviceIndex>(i)));
  }

  DataPtr allocate(std::size_t bytes) override {
    const DeviceIndex device = current_device();
    const Device here(c10::kXPU, device);
    if (bytes == 0) return {nullptr, nullptr, &free_block, here};
    Block* block = cache(device).allocate(bytes, current_stream(device).id());
    return {block->pointer, block, &free_block, here};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, std::size_t count) const override {
    submit_copy(current_queue(current_device()), to, from, count).wait();
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {
    for (auto& one : caches_) one->empty();
  }
  void recordStream(const DataPtr& data, c10::Stream stream) override {
    if (data.get_context() == nullptr || data.get_deleter() != &free_block) return;
    auto* block = static_cast<Block*>(data.get_context());
    cache(block->device).use_on(block, stream.id());
  }
  DeviceStats getDeviceStats(DeviceIndex device) override { return cache(device).stats(); }
  void resetAccumulatedStats(DeviceIndex device) override { cache(device).reset(false); }
  void resetPeakStats(DeviceIndex device) override { cache(device).reset(true); }
  std::pair<std::size_t, std::size_t> getMemoryInfo(DeviceIndex device) override {
    return cache(device).memory();
  }

  BlockCache& cache(DeviceIndex device) {
    check_device(device);
    return *caches_[static_cast<std::size_t>(device)];
  }
  std::vector<std::unique_ptr<BlockCache>>& caches() { return caches_; }

 private:
  std::vector<std::unique_ptr<BlockCache>> caches_;
};

Allocator& instance() {
  static Allocator* one = new Allocator;  // tensors may be freed after static objects
  return *one;
}

void free_block(void* context) {
  if (context == nullptr) return;  // a tensor without elements
  auto* block = static_cast<Block*>(context);
  instance().cache(block->device).free(block);
}

}  // namespace

c10::DeviceAllocator& allocator() { return instance(); }

bool is_device_pointer(const void* pointer, DeviceIndex& device) {
  for (int i = 0; i < device_count(); ++i) {
    if (instance().cache(static_cast<DeviceIndex>(i)).owns(pointer)) {
      device = static_cast<DeviceIndex>(i);
      return true;
    }
  }
  return false;
}

void register_allocator() { c10::SetAllocator(c10::kXPU, &instance()); }

void set_memory_fraction(double fraction, DeviceIndex device) {
  TORCH_CHECK_VALUE(fraction >= 0.0 && fraction <= 1.0,
                    "set_per_process_memory_fraction: fraction must be in [0, 1], got ", fraction);
  instance().cache(device).set_fraction(fraction);
}
double memory_fraction(DeviceIndex device) { return instance().cache(device).fraction(); }

std::vector<c10::CachingDeviceAllocator::SegmentInfo> memory_snapshot() {
  std::vector<c10::CachingDeviceAllocator::SegmentInfo> result;
  for (auto& one : instance().caches()) one->snapshot(result);
  return result;
}

void record_memory_history(std::size_t limit) {
  for (auto& one : instance().caches()) one->record_history(limit);
}

std::vector<std::vector<Trace>> memory_history() {
  std::vector<std::vector<Trace>> result;
  for (auto& one : instance().caches()) result.push_back(one->history());
  return result;
}

}  // namespace ipex::xpu
