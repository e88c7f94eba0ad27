// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "ipex/kv_view.h"

namespace ipex {

struct CacheWriteArgs {
  const void* key;  // [tokens, heads, size]
  const void* value;
  int64_t key_token, key_head, value_token, value_head;  // distances in elements
  const int64_t* slots;                                  // checked; negative ones are skipped
  KvView cache;                                          // part.scale: what a row is divided by
  int64_t block_size, heads, size;
};

}  // namespace ipex

// Writes tokens [begin, end).
#define IPEX_DECLARE_RESHAPE_AND_CACHE(suffix)                                             \
  IPEX_KERNEL_API void ipex_k_reshape_and_cache_##suffix(const ipex::CacheWriteArgs* args, \
                                                         int64_t begin, int64_t end)
IPEX_DECLARE_RESHAPE_AND_CACHE(f32);
IPEX_DECLARE_RESHAPE_AND_CACHE(bf16);
IPEX_DECLARE_RESHAPE_AND_CACHE(f16);
#undef IPEX_DECLARE_RESHAPE_AND_CACHE
