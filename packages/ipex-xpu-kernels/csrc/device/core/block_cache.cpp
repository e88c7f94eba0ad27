// SPDX-License-Identifier: Apache-2.0
#include "device/core/block_cache.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <chrono>
#include <cstdio>

namespace ipex::xpu {
namespace {

using c10::CachingAllocator::Stat;
using c10::CachingAllocator::StatArray;
using c10::CachingDeviceAllocator::DeviceStats;

constexpr std::size_t kRound = 512;  // bytes; also the alignment of what is handed out
constexpr std::size_t kSmallBlock = std::size_t{1} << 20;  // blocks up to here share segments
constexpr std::size_t kSmallSegment = std::size_t{2} << 20;
constexpr std::size_t kLargeSegment = std::size_t{20} << 20;
constexpr std::size_t kMinLargeAlloc = std::size_t{10}
                                       << 20;  // larger ones get a segment of their own size
constexpr std::size_t kSegmentRound = std::size_t{2} << 20;

void add(StatArray& stats, bool small, std::size_t amount) {
  stats[0].increase(amount);
  stats[small ? 1 : 2].increase(amount);
}
void subtract(StatArray& stats, bool small, std::size_t amount) {
  stats[0].decrease(amount);
  stats[small ? 1 : 2].decrease(amount);
}

}  // namespace

std::string human(std::uint64_t bytes) {
  char text[32];
  if (bytes >= (std::uint64_t{1} << 30)) {
    std::snprintf(text, sizeof text, "%.2f GiB", static_cast<double>(bytes) / (1 << 30));
  } else {
    std::snprintf(text, sizeof text, "%.2f MiB", static_cast<double>(bytes) / (1 << 20));
  }
  return text;
}

Block* BlockCache::allocate(std::size_t requested, c10::StreamId stream) {
  const std::lock_guard lock(mutex_);
  process_pending();
  const std::size_t size = std::max(kRound, (requested + kRound - 1) / kRound * kRound);
  const bool small = size <= kSmallBlock;
  Block* block = take_cached(size, small, stream);
  if (block == nullptr) block = grow(size, small, stream, requested);
  split(block, size);
  block->allocated = true;
  block->requested = requested;
  add(stats_.allocation, small, 1);
  add(stats_.active, small, 1);
  add(stats_.allocated_bytes, small, block->size);
  add(stats_.active_bytes, small, block->size);
  add(stats_.requested_bytes, small, requested);
  note("alloc", block->pointer, block->size, stream);
  return block;
}

void BlockCache::free(Block* block) {
  const std::lock_guard lock(mutex_);
  subtract(stats_.allocation, block->small(), 1);
  subtract(stats_.allocated_bytes, block->small(), block->size);
  subtract(stats_.requested_bytes, block->small(), block->requested);
  block->allocated = false;
  note("free_requested", block->pointer, block->size, block->stream);
  for (const c10::StreamId other : block->other_streams) {
    try {
      block->pending.push_back(queue(device_, static_cast<int>(other)).ext_oneapi_submit_barrier());
    } catch (const std::exception&) {
      // The device is being shut down: there is nothing left to wait for.
    }
  }
  block->other_streams.clear();
  if (block->pending.empty()) {
    give_back(block);
  } else {
    waiting_.push_back(block);
  }
}

void BlockCache::use_on(Block* block, c10::StreamId stream) {
  const std::lock_guard lock(mutex_);
  if (stream != block->stream) block->other_streams.insert(stream);
}

void BlockCache::empty() {
  const std::lock_guard lock(mutex_);
  release_cached();
}

DeviceStats BlockCache::stats() {
  const std::lock_guard lock(mutex_);
  return stats_;
}

void BlockCache::reset(bool peak) {
  const std::lock_guard lock(mutex_);
  auto each = [&](StatArray& array) {
    for (Stat& stat : array) peak ? stat.reset_peak() : stat.reset_accumulated();
  };
  for (StatArray* array :
       {&stats_.allocation, &stats_.segment, &stats_.active, &stats_.inactive_split,
        &stats_.allocated_bytes, &stats_.reserved_bytes, &stats_.active_bytes,
        &stats_.inactive_split_bytes, &stats_.requested_bytes}) {
    each(*array);
  }
  if (!peak) {
    stats_.num_alloc_retries = stats_.num_ooms = stats_.num_sync_all_streams = 0;
    stats_.num_device_alloc = stats_.num_device_free = 0;
  }
}

std::pair<std::size_t, std::size_t> BlockCache::memory() {
  const std::lock_guard lock(mutex_);
  const std::size_t total = device_info(device_).total_memory;
  auto& device = sycl_device(device_);
  if (device.has(sycl::aspect::ext_intel_free_memory)) {
    return {device.get_info<sycl::ext::intel::info::device::free_memory>(), total};
  }
  const auto reserved = static_cast<std::size_t>(stats_.reserved_bytes[0].current);
  return {total - std::min(reserved, total), total};
}

void BlockCache::set_fraction(double fraction) {
  const std::lock_guard lock(mutex_);
  fraction_ = fraction;
}

double BlockCache::fraction() {
  const std::lock_guard lock(mutex_);
  return fraction_;
}

bool BlockCache::owns(const void* pointer) {
  const std::lock_guard lock(mutex_);
  auto found = segments_.upper_bound(const_cast<void*>(pointer));
  if (found == segments_.begin()) return false;
  --found;
  return static_cast<const char*>(pointer) < static_cast<char*>(found->first) + found->second->size;
}

void BlockCache::snapshot(std::vector<c10::CachingDeviceAllocator::SegmentInfo>& out) {
  const std::lock_guard lock(mutex_);
  for (const auto& [base, segment] : segments_) {
    c10::CachingDeviceAllocator::SegmentInfo info;
    info.device = device_;
    info.address = reinterpret_cast<std::size_t>(base);
    info.total_size = segment->size;
    info.is_large = !segment->small;
    for (const Block* block = first_.at(base); block != nullptr; block = block->after) {
      c10::CachingDeviceAllocator::BlockInfo one;
      one.size = block->size;
      one.allocated = block->allocated;
      one.active = block->allocated || !block->pending.empty();
      one.requested_size = one.allocated ? block->requested : 0;
      info.allocated_size += one.allocated ? one.size : 0;
      info.active_size += one.active ? one.size : 0;
      info.requested_size += one.requested_size;
      info.stream = reinterpret_cast<void*>(block->stream);
      info.blocks.push_back(std::move(one));
    }
    out.push_back(std::move(info));
  }
}

Block* BlockCache::take_cached(std::size_t size, bool small, c10::StreamId stream) {
  Block probe;
  probe.stream = stream;
  probe.size = size;
  auto found = pool(small).lower_bound(&probe);
  if (found == pool(small).end() || (*found)->stream != stream) return nullptr;
  Block* block = *found;
  pool(small).erase(found);
  block->cached = false;
  if (!block->whole()) {
    subtract(stats_.inactive_split, small, 1);
    subtract(stats_.inactive_split_bytes, small, block->size);
  }
  return block;
}

Block* BlockCache::grow(std::size_t size, bool small, c10::StreamId stream, std::size_t requested) {
  std::size_t bytes = small ? kSmallSegment
                      : size < kMinLargeAlloc
                          ? kLargeSegment
                          : (size + kSegmentRound - 1) / kSegmentRound * kSegmentRound;
  void* base = device_malloc(bytes);
  if (base == nullptr) {
    ++stats_.num_alloc_retries;
    release_cached();
    base = device_malloc(bytes);
  }
  if (base == nullptr) {
    ++stats_.num_ooms;
    note("oom", nullptr, bytes, stream);
    out_of_memory(requested);
  }
  auto* segment = new Segment{base, bytes, small};
  segments_.emplace(base, segment);
  add(stats_.segment, small, 1);
  add(stats_.reserved_bytes, small, bytes);
  note("segment_alloc", base, bytes, stream);
  auto* block = new Block;
  block->segment = segment;
  block->device = device_;
  block->stream = stream;
  block->pointer = static_cast<char*>(base);
  block->size = bytes;
  first_[base] = block;
  return block;
}

void* BlockCache::device_malloc(std::size_t bytes) {
  const DeviceInfo& info = device_info(device_);
  const auto limit = static_cast<std::uint64_t>(fraction_ * static_cast<double>(info.total_memory));
  if (static_cast<std::uint64_t>(stats_.reserved_bytes[0].current) + bytes > limit) return nullptr;
  if (info.max_allocation != 0 && bytes > info.max_allocation) return nullptr;
  ++stats_.num_device_alloc;
  try {
    // Both a null pointer and an exception mean that there is no memory, depending on the driver.
    return sycl::aligned_alloc_device(kRound, bytes, sycl_device(device_), sycl_context(device_));
  } catch (const sycl::exception&) {
    return nullptr;
  }
}

void BlockCache::out_of_memory(std::size_t requested) {
  const std::uint64_t total = device_info(device_).total_memory;
  const auto reserved = static_cast<std::uint64_t>(stats_.reserved_bytes[0].current);
  const auto allocated = static_cast<std::uint64_t>(stats_.allocated_bytes[0].current);
  const std::string limit =
      fraction_ < 1.0
          ? "; the limit of set_per_process_memory_fraction is " +
                human(static_cast<std::uint64_t>(fraction_ * static_cast<double>(total)))
          : "";
  TORCH_CHECK_WITH(OutOfMemoryError, false, "XPU out of memory. Tried to allocate ",
                   human(requested), ". XPU ", static_cast<int>(device_),
                   " has a total capacity of ", human(total), ", of which ",
                   human(total - std::min(total, reserved)), " is free. ", human(allocated),
                   " is allocated by PyTorch, and ", human(reserved - allocated),
                   " is reserved by PyTorch but unallocated", limit, ".");
}

void BlockCache::split(Block* block, std::size_t size) {
  const std::size_t rest = block->size - size;
  if (rest < (block->small() ? kRound : kSmallBlock + 1)) return;
  auto* other = new Block;
  other->segment = block->segment;
  other->device = device_;
  other->stream = block->stream;
  other->pointer = block->pointer + size;
  other->size = rest;
  other->before = block;
  other->after = block->after;
  if (other->after != nullptr) other->after->before = other;
  block->after = other;
  block->size = size;
  insert(other);
  add(stats_.inactive_split, block->small(), 1);
  add(stats_.inactive_split_bytes, block->small(), rest);
}

void BlockCache::give_back(Block* block) {
  const bool small = block->small();
  subtract(stats_.active, small, 1);
  subtract(stats_.active_bytes, small, block->size);
  note("free_completed", block->pointer, block->size, block->stream);
  block = join(block, block->before);
  block = join(block, block->after);
  insert(block);
  if (!block->whole()) {
    add(stats_.inactive_split, small, 1);
    add(stats_.inactive_split_bytes, small, block->size);
  }
}

Block* BlockCache::join(Block* block, Block* neighbor) {
  // Not a block that waits for other streams, nor one that has waited and is given back next.
  if (neighbor == nullptr || !neighbor->cached) return block;
  pool(block->small()).erase(neighbor);
  subtract(stats_.inactive_split, block->small(), 1);
  subtract(stats_.inactive_split_bytes, block->small(), neighbor->size);
  Block* first = neighbor->pointer < block->pointer ? neighbor : block;
  Block* second = first == block ? neighbor : block;
  first->cached = false;
  first->size += second->size;
  first->after = second->after;
  if (first->after != nullptr) first->after->before = first;
  delete second;
  return first;
}

void BlockCache::insert(Block* block) {
  pool(block->small()).insert(block);
  block->cached = true;
}

void BlockCache::record_history(std::size_t limit) {
  const std::lock_guard lock(mutex_);
  history_limit_ = limit;
  history_.clear();
}

std::vector<Trace> BlockCache::history() {
  const std::lock_guard lock(mutex_);
  return {history_.begin(), history_.end()};
}

void BlockCache::note(const char* action, const void* address, std::size_t size,
                      c10::StreamId stream) {
  if (history_limit_ == 0) return;
  if (history_.size() >= history_limit_) history_.pop_front();
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  history_.push_back({action, reinterpret_cast<std::size_t>(address), size, stream,
                      std::chrono::duration_cast<std::chrono::microseconds>(now).count()});
}

void BlockCache::process_pending() {
  auto done = [](const sycl::event& event) {
    return event.get_info<sycl::info::event::command_execution_status>() ==
           sycl::info::event_command_status::complete;
  };
  auto ready = [&](Block* block) {
    std::erase_if(block->pending, done);
    return block->pending.empty();
  };
  // In two steps: giving back may join blocks, which must not be in the list any more.
  std::vector<Block*> free;
  std::erase_if(waiting_, [&](Block* block) {
    const bool is_ready = ready(block);
    if (is_ready) free.push_back(block);
    return is_ready;
  });
  for (Block* block : free) give_back(block);
}

void BlockCache::release_cached() {
  for (Block* block : waiting_) {
    for (sycl::event& event : block->pending) event.wait();
  }
  process_pending();
  bool waited = false;
  for (Pool* one : {&small_, &large_}) {
    for (auto it = one->begin(); it != one->end();) {
      Block* block = *it;
      if (!block->whole()) {
        ++it;
        continue;
      }
      if (!waited) {
        synchronize(device_);  // kernels that still use the memory
        ++stats_.num_sync_all_streams;
        waited = true;
      }
      it = one->erase(it);
      Segment* segment = block->segment;
      sycl::free(segment->base, sycl_context(device_));
      ++stats_.num_device_free;
      note("segment_free", segment->base, segment->size, block->stream);
      subtract(stats_.segment, segment->small, 1);
      subtract(stats_.reserved_bytes, segment->small, segment->size);
      segments_.erase(segment->base);
      first_.erase(segment->base);
      delete segment;
      delete block;
    }
  }
}

}  // namespace ipex::xpu
