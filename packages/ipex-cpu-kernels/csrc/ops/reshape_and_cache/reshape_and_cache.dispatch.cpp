// SPDX-License-Identifier: Apache-2.0
#include "reshape_and_cache.h"

#include "ipex/kernel/kv_store.h"

namespace ipex {
namespace {

template <class T>
IPEX_INLINE void write_tokens(const CacheWriteArgs& args, int64_t begin, int64_t end) {
  const KvView& cache = args.cache;
  for (int64_t t = begin; t < end; ++t) {
    const int64_t slot = args.slots[t];
    if (slot < 0) continue;
    const int64_t block = slot / args.block_size, row = slot % args.block_size;
    const T* key = static_cast<const T*>(args.key) + t * args.key_token;
    const T* value = static_cast<const T*>(args.value) + t * args.value_token;
    for (int64_t h = 0; h < args.heads; ++h) {
      store_kv_row(key + h * args.key_head, args.size, cache.type, cache.key, block, h, row);
      store_kv_row(value + h * args.value_head, args.size, cache.type, cache.value, block, h, row);
    }
  }
}

}  // namespace
}  // namespace ipex

void ipex_k_reshape_and_cache_f32(const ipex::CacheWriteArgs* args, int64_t begin, int64_t end) {
  ipex::write_tokens<float>(*args, begin, end);
}
void ipex_k_reshape_and_cache_bf16(const ipex::CacheWriteArgs* args, int64_t begin, int64_t end) {
  ipex::write_tokens<ipex::BFloat16>(*args, begin, end);
}
void ipex_k_reshape_and_cache_f16(const ipex::CacheWriteArgs* args, int64_t begin, int64_t end) {
  ipex::write_tokens<ipex::Half>(*args, begin, end);
}
