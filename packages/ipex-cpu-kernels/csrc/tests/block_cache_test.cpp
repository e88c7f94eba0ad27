// SPDX-License-Identifier: Apache-2.0
// Checks runtime/block_cache.h alone, without torch: tests/test_team.py compiles it with and
// without the thread sanitizer. It prints what failed and returns the number of failures.
#include "runtime/block_cache.h"

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <thread>
#include <vector>

namespace {

namespace blocks = ipex::blocks;

constexpr size_t kMiB = size_t{1} << 20;

std::atomic<int> failures{0};

void expect(bool ok, const char* what) {
  if (ok) return;
  failures.fetch_add(1);
  std::printf("FAIL %s\n", what);
}

void* filled(size_t bytes, int value) {
  void* const data = blocks::take(bytes);
  expect(data != nullptr, "there is memory");
  expect(reinterpret_cast<uintptr_t>(data) % 64 == 0, "blocks are aligned");
  std::memset(data, value, bytes);
  return data;
}

void blocks_come_again() {
  void* const first = filled(5 * kMiB, 1);
  expect(blocks::kept() == 0, "what is used is not kept");
  blocks::give(first);
  expect(blocks::kept() >= 5 * kMiB, "what is given back is kept");
  void* const second = filled(5 * kMiB, 2);
  expect(second == first, "a block of the size comes again");
  void* const third = filled(5 * kMiB, 3);
  expect(third != second, "a block in use is not given twice");
  blocks::give(second);
  blocks::give(third);
}

void the_best_block_is_taken() {
  void* const small = filled(9 * kMiB, 1);
  void* const large = filled(15 * kMiB, 1);
  blocks::give(small);
  blocks::give(large);
  void* const found = filled(9 * kMiB, 2);
  expect(found == small, "the smallest block that fits is taken");
  blocks::give(found);
  void* const tiny = filled(kMiB, 2);
  expect(tiny != small && tiny != large, "a block is not given for half of its size or less");
  blocks::give(tiny);
}

void no_more_is_kept_than_allowed() {
  std::vector<void*> all;
  for (int i = 0; i < 12; ++i) all.push_back(filled(40 * kMiB, i));
  for (void* const data : all) blocks::give(data);
  expect(blocks::kept() <= blocks::kMostKept, "the memory that is kept has a limit");
  void* const huge = filled(blocks::kMostKept + kMiB, 1);
  blocks::give(huge);
  expect(blocks::kept() <= blocks::kMostKept, "a block beyond the limit is not kept");
}

void what_does_not_exist_is_refused() {
  expect(blocks::take(SIZE_MAX) == nullptr, "the largest size has no block");
  expect(blocks::take(SIZE_MAX / 4) == nullptr, "more than there is has no block");
}

void threads_share_the_blocks() {
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([t] {
      for (int i = 0; i < 200; ++i) {
        const size_t bytes = (1 + static_cast<size_t>(i + t) % 3) * kMiB;
        auto* const data = static_cast<unsigned char*>(blocks::take(bytes));
        if (!data) continue;
        data[0] = data[bytes - 1] = static_cast<unsigned char>(t);
        expect(data[0] == t && data[bytes - 1] == t, "a block belongs to one thread");
        blocks::give(data);
      }
    });
  for (std::thread& thread : threads) thread.join();
}

}  // namespace

int main() {
  blocks_come_again();
  the_best_block_is_taken();
  no_more_is_kept_than_allowed();
  what_does_not_exist_is_refused();
  threads_share_the_blocks();
  return failures.load();
}
