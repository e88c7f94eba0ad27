// SPDX-License-Identifier: Apache-2.0
#include "runtime/block_cache.h"

#include <sys/mman.h>

#include <cstdint>
#include <cstdlib>
#include <mutex>
#include <new>
#include <vector>

namespace ipex::blocks {
namespace {

// In front of the data.
struct alignas(64) Header {
  size_t capacity;  // bytes of the data
};

constexpr size_t kHugePage = size_t{2} << 20;

struct Cache {
  std::mutex mutex;
  std::vector<Header*> free;  // oldest first
  size_t bytes = 0;
};

// Never destroyed: tensors may outlive what is static.
Cache& cache() {
  static Cache* const made = new Cache;
  return *made;
}

// The block that fits best and wastes less than it gives, or nullptr.
Header* kept_block(size_t bytes) {
  Cache& kept = cache();
  const std::lock_guard<std::mutex> lock(kept.mutex);
  size_t best = kept.free.size();
  for (size_t i = 0; i < kept.free.size(); ++i) {
    const size_t capacity = kept.free[i]->capacity;
    if (capacity < bytes || capacity > 2 * bytes) continue;
    if (best == kept.free.size() || capacity <= kept.free[best]->capacity) best = i;
  }
  if (best == kept.free.size()) return nullptr;
  Header* const found = kept.free[best];
  kept.free.erase(kept.free.begin() + static_cast<std::ptrdiff_t>(best));
  kept.bytes -= found->capacity;
  return found;
}

}  // namespace

void* take(size_t bytes) noexcept {
  if (Header* const found = kept_block(bytes)) return found + 1;
  if (bytes > SIZE_MAX / 2) return nullptr;
  const size_t whole = (bytes + sizeof(Header) + kHugePage - 1) / kHugePage * kHugePage;
  void* const base = std::aligned_alloc(kHugePage, whole);
  if (!base) return nullptr;
  madvise(base, whole, MADV_HUGEPAGE);  // where the system has them: one fault for 512 pages
  Header* const header = new (base) Header{whole - sizeof(Header)};
  return header + 1;
}

void give(void* data) noexcept {
  Header* header = static_cast<Header*>(data) - 1;
  std::vector<Header*> dropped;
  {
    Cache& kept = cache();
    const std::lock_guard<std::mutex> lock(kept.mutex);
    try {
      kept.free.push_back(header);
      kept.bytes += header->capacity;
      while (kept.bytes > kMostKept) {
        dropped.push_back(kept.free.front());
        kept.bytes -= kept.free.front()->capacity;
        kept.free.erase(kept.free.begin());
      }
    } catch (const std::bad_alloc&) {  // of the lists: what is in them stays right
    }
  }
  for (Header* const old : dropped) std::free(old);
}

size_t kept() noexcept {
  Cache& all = cache();
  const std::lock_guard<std::mutex> lock(all.mutex);
  return all.bytes;
}

}  // namespace ipex::blocks
