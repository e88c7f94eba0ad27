// SPDX-License-Identifier: Apache-2.0
// Ops of another library than ipex, which only that library or a plug-in for it may define: they
// are listed when this library is loaded, and registered with torch when ipex_cpu_define asks.
#pragma once

#include <torch/csrc/stable/library.h>

#include <cstdint>

#include "ipex/glue/dispatch.h"

namespace ipex {

class Deferred {
 public:
  using Boxed = void(StableIValue*, uint64_t, uint64_t);

  // An op without tensors among its arguments needs another key.
  Deferred(const char* library, const char* schema, Boxed* function, const char* key = "CPU");

  // Defines the op of this name and returns whether there is one; library is "_C", name "add".
  static bool define(const char* library, const char* name);

 private:
  const char* library_;
  const char* schema_;
  Boxed* function_;
  const char* key_;
  const Deferred* next_;
};

}  // namespace ipex
