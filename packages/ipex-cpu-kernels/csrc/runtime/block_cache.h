// SPDX-License-Identifier: Apache-2.0
// Memory of large results of programs, kept from one run to the next. The system would take each
// block back when it is freed and give it again page by page: a run of ResNet-50 with 16 images had
// 75000 page faults, a quarter of its time.
#pragma once

#include <cstddef>

namespace ipex::blocks {

// Blocks from this size on.
constexpr size_t kLeast = size_t{1} << 20;
// What is kept while nothing uses it.
constexpr size_t kMostKept = size_t{256} << 20;

// A block of at least `bytes`, aligned to a cache line, or nullptr if there is no memory.
void* take(size_t bytes) noexcept;
// Gives back what `take` returned. Any thread may.
void give(void* data) noexcept;
// Bytes that are kept now.
size_t kept() noexcept;

}  // namespace ipex::blocks
