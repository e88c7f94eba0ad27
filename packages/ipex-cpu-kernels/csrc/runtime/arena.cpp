// SPDX-License-Identifier: Apache-2.0
#include "runtime/arena.h"

#include <sys/mman.h>

#include <atomic>
#include <mutex>

namespace ipex::arena {
namespace {

constexpr int64_t kHugePage = int64_t{2} << 20;
constexpr int64_t kSmallPage = 4096;
constexpr int64_t kSharedChunk = 8 * kHugePage;
constexpr int64_t kAlignment = 64;

// A mapping that is returned to the system when the last tensor in it is gone.
struct Chunk {
  char* base;
  int64_t size;
  std::atomic<int64_t> users{0};
};

std::mutex mutex;
Chunk* shared = nullptr;  // chunk that small requests are cut from; holds one reference itself
int64_t shared_used = 0;
std::atomic<bool> huge_pages{true};
std::atomic<int64_t> mapped{0};

int64_t round_up(int64_t value, int64_t to) { return (value + to - 1) / to * to; }

Chunk* map_chunk(int64_t bytes) {
  // The end of a chunk gets a huge page of its own only if little of that stays unused: weights of
  // a few megabytes, of which a model has hundreds, would take 10 % more memory otherwise.
  const int64_t whole = round_up(bytes, kHugePage);
  const bool fits = (whole - bytes) * 32 <= bytes;
  const int64_t size = fits ? whole : round_up(bytes, kSmallPage);
  const int64_t huge = fits ? whole : whole - kHugePage;
  // Mapped one huge page too large and trimmed, because mmap aligns to small pages only.
  const int64_t room = size + kHugePage;
  void* raw = mmap(nullptr, static_cast<size_t>(room), PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  IPEX_CHECK(raw != MAP_FAILED, "cannot allocate ", size, " bytes for packed weights");
  char* start = static_cast<char*>(raw);
  char* base = reinterpret_cast<char*>(
      round_up(static_cast<int64_t>(reinterpret_cast<intptr_t>(start)), kHugePage));
  if (base > start) munmap(start, static_cast<size_t>(base - start));
  char* end = base + size;
  if (start + room > end) munmap(end, static_cast<size_t>(start + room - end));
  // A refusal only costs speed, so its result is not looked at.
  madvise(base, static_cast<size_t>(huge), MADV_HUGEPAGE);
  mapped += size;
  return new Chunk{base, size};
}

void release(Chunk* chunk) {
  if (chunk->users.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  mapped -= chunk->size;
  munmap(chunk->base, static_cast<size_t>(chunk->size));
  delete chunk;
}

// Returns the place of `bytes` and the chunk it lies in, whose users already count it.
char* cut(int64_t bytes, Chunk** chunk) {
  std::lock_guard lock(mutex);
  if (bytes >= kHugePage) {
    *chunk = map_chunk(bytes);
    (*chunk)->users = 1;
    return (*chunk)->base;
  }
  if (!shared || shared_used + bytes > shared->size) {
    Chunk* fresh = map_chunk(kSharedChunk);
    fresh->users = 1;
    if (shared) release(shared);
    shared = fresh;
    shared_used = 0;
  }
  char* place = shared->base + shared_used;
  shared_used += round_up(bytes, kAlignment);
  shared->users.fetch_add(1, std::memory_order_relaxed);
  *chunk = shared;
  return place;
}

}  // namespace

void enable_huge_pages(bool enabled) { huge_pages = enabled; }

int64_t mapped_bytes() { return mapped; }

Tensor allocate(int64_t bytes) {
  const int64_t sizes[1] = {bytes}, strides[1] = {1};
  if (!huge_pages) return new_tensor(sizes, strides, 1, ScalarType::Byte);
  Chunk* chunk = nullptr;
  char* place = cut(bytes, &chunk);
  return torch::stable::from_blob(place, {sizes, 1}, {strides, 1},
                                  torch::stable::Device(torch::headeronly::DeviceType::CPU),
                                  ScalarType::Byte, [chunk](void*) { release(chunk); });
}

}  // namespace ipex::arena
