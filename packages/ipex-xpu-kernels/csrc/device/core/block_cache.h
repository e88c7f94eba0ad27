// SPDX-License-Identifier: Apache-2.0
// The caching allocator of one device: the smallest fitting cached block of the same stream, else
// new memory; after a failure once more with an empty cache.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>

#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "core/core.h"
#include "device/core/runtime.h"

namespace ipex::xpu {

struct Segment {
  void* base = nullptr;
  std::size_t size = 0;
  bool small = false;
};

struct Block {
  Segment* segment = nullptr;
  c10::DeviceIndex device = 0;
  c10::StreamId stream = 0;
  char* pointer = nullptr;
  std::size_t size = 0;
  std::size_t requested = 0;
  bool allocated = false;
  bool cached = false;      // in a pool: free to be taken or joined
  Block* before = nullptr;  // neighbors in the segment
  Block* after = nullptr;
  std::set<c10::StreamId> other_streams;
  std::vector<sycl::event> pending;  // of other streams, after the tensor was freed

  bool small() const { return segment->small; }
  bool whole() const { return before == nullptr && after == nullptr; }
};

struct BySize {
  bool operator()(const Block* a, const Block* b) const {
    if (a->stream != b->stream) return a->stream < b->stream;
    if (a->size != b->size) return a->size < b->size;
    return a->pointer < b->pointer;
  }
};
using Pool = std::set<Block*, BySize>;

// One step of the history of allocations, which torch.xpu.memory._record_memory_history asks for.
struct Trace {
  const char* action = "";
  std::size_t address = 0;
  std::size_t size = 0;
  c10::StreamId stream = 0;
  std::int64_t time = 0;  // microseconds since 1970
};

// Bytes for people: 1.50 GiB.
std::string human(std::uint64_t bytes);

// One per device.
class BlockCache {
 public:
  explicit BlockCache(c10::DeviceIndex device) : device_(device) {}

  Block* allocate(std::size_t requested, c10::StreamId stream);

  void free(Block* block);

  void use_on(Block* block, c10::StreamId stream);

  void empty();

  c10::CachingDeviceAllocator::DeviceStats stats();

  void reset(bool peak);

  std::pair<std::size_t, std::size_t> memory();

  void set_fraction(double fraction);
  double fraction();

  bool owns(const void* pointer);

  // Keeps the last `limit` steps from now on; 0 keeps none. What was kept before is forgotten.
  void record_history(std::size_t limit);
  std::vector<Trace> history();

  void snapshot(std::vector<c10::CachingDeviceAllocator::SegmentInfo>& out);

 private:
  Pool& pool(bool small) { return small ? small_ : large_; }

  Block* take_cached(std::size_t size, bool small, c10::StreamId stream);

  Block* grow(std::size_t size, bool small, c10::StreamId stream, std::size_t requested);

  void* device_malloc(std::size_t bytes);

  [[noreturn]] void out_of_memory(std::size_t requested);

  void split(Block* block, std::size_t size);

  void give_back(Block* block);

  // Both blocks as one, if the neighbor is free; the later one goes.
  Block* join(Block* block, Block* neighbor);

  void process_pending();

  void insert(Block* block);

  void note(const char* action, const void* address, std::size_t size, c10::StreamId stream);

  void release_cached();

  c10::DeviceIndex device_;
  std::mutex mutex_;
  Pool small_;
  Pool large_;
  std::vector<Block*> waiting_;
  std::map<void*, Segment*> segments_;
  std::unordered_map<void*, Block*> first_;
  c10::CachingDeviceAllocator::DeviceStats stats_;
  double fraction_ = 1.0;
  std::deque<Trace> history_;
  std::size_t history_limit_ = 0;
};

}  // namespace ipex::xpu
