// SPDX-License-Identifier: Apache-2.0
// Tensors that nothing uses any more, kept for the next allocation of the same shape. A new tensor
// costs 0.3 to 1 us, and page faults if it is large; the layers of a model need the same few shapes
// again and again.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "ipex/glue/dispatch.h"

namespace ipex {

// While one lives, `new_tensor` on the thread that made it takes tensors out of it first.
class TensorPool {
 public:
  TensorPool() : outer_(current()) { current() = this; }
  ~TensorPool() { current() = outer_; }
  TensorPool(const TensorPool&) = delete;
  TensorPool& operator=(const TensorPool&) = delete;

  static TensorPool*& current() {
    thread_local TensorPool* pool = nullptr;
    return pool;
  }

  // Takes a tensor that nothing else refers to.
  void give(Tensor&& tensor) {
    Entry entry;
    entry.dim = tensor.dim();
    if (entry.dim > kMaxDim || entry.dim == 0) return;
    entry.dtype = tensor.scalar_type();
    std::memcpy(entry.sizes, tensor.sizes().data(), sizeof(int64_t) * entry.dim);
    std::memcpy(entry.strides, tensor.strides().data(), sizeof(int64_t) * entry.dim);
    entry.bytes = tensor.numel() * static_cast<int64_t>(tensor.element_size());
    if (entry.bytes == 0 || bytes_ + entry.bytes > kMaxBytes) return;
    bytes_ += entry.bytes;
    entry.tensor = std::move(tensor);
    entries_.push_back(std::move(entry));
  }

  // A pooled tensor of this shape in `found`, or false.
  bool take(const int64_t* sizes, const int64_t* strides, int64_t dim, ScalarType dtype,
            OptionalTensor& found) {
    const size_t bytes = sizeof(int64_t) * static_cast<size_t>(dim);
    // From the back: what was freed last is still in the cache.
    for (size_t i = entries_.size(); i-- > 0;) {
      Entry& entry = entries_[i];
      if (entry.dim != dim || entry.dtype != dtype || std::memcmp(entry.sizes, sizes, bytes) != 0 ||
          std::memcmp(entry.strides, strides, bytes) != 0)
        continue;
      bytes_ -= entry.bytes;
      found = std::move(entry.tensor);
      entries_.erase(entries_.begin() + static_cast<std::ptrdiff_t>(i));
      return true;
    }
    return false;
  }

 private:
  static constexpr int64_t kMaxDim = 5;
  // More than this is given back to the system: the peak of a long prefill must not grow by what
  // other shapes have left behind.
  static constexpr int64_t kMaxBytes = int64_t{64} << 20;

  struct Entry {
    ScalarType dtype;
    int64_t dim, bytes;
    int64_t sizes[kMaxDim], strides[kMaxDim];
    OptionalTensor tensor;
  };

  TensorPool* outer_;
  std::vector<Entry> entries_;
  int64_t bytes_ = 0;
};

}  // namespace ipex
