// SPDX-License-Identifier: Apache-2.0
// Arguments that an op writes to.
#pragma once

#include "ipex/glue/dispatch.h"

namespace ipex {

// No two elements may share memory by a stride of 0.
inline void check_not_expanded(const char* op, const char* name, const Tensor& x) {
  for (int64_t i = 0; i < x.dim(); ++i)
    IPEX_CHECK(x.stride(i) != 0 || x.size(i) <= 1, op, ": ", name,
               " must not be expanded, got stride 0 in dimension ", i);
}

// An argument and what the kernel writes instead: the argument itself, or a copy in another layout
// that finish() copies back.
class InPlace {
 public:
  InPlace(const Tensor& argument, const Tensor& usable)
      : argument_(argument), usable_(usable), copied_(usable.get() != argument.get()) {}
  const Tensor& tensor() const { return usable_; }
  void finish() {
    if (copied_) torch::stable::copy_(argument_, usable_);
  }

 private:
  Tensor argument_;
  Tensor usable_;
  bool copied_;
};

}  // namespace ipex
