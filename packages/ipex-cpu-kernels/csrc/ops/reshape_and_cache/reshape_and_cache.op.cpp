// SPDX-License-Identifier: Apache-2.0
#include "reshape_and_cache.h"

#include <cmath>
#include <vector>

#include "ipex/glue/kv_glue.h"
#include "ipex/glue/op_loops.h"

namespace ipex {
namespace {

const auto kernels = IPEX_KERNELS("reshape_and_cache", reshape_and_cache);
const auto flash_kernels = IPEX_KERNELS("reshape_and_cache_flash", reshape_and_cache);

void check_scale(const char* op, const char* name, double scale) {
  IPEX_CHECK(scale > 0.0 && std::isfinite(scale), op, ": ", name,
             " must be positive and finite, got ", scale);
}

void check_arguments(const char* op, const Tensor& key, const Tensor& value,
                     const Tensor& key_cache, const Tensor& value_cache, const Tensor& slots,
                     const std::string& kind, double k_scale, double v_scale,
                     const OptionalTensor& key_scales, const OptionalTensor& value_scales) {
  check_tensor(op, "key", key);
  IPEX_CHECK(key.dim() == 3, op, ": key must be 3-D [tokens, kv_heads, head_size], got ", key.dim(),
             "-D");
  check_like(op, "value", value, key, "key");
  check_caches(op, key_cache, value_cache, key, "key",
               "[num_blocks, kv_heads, block_size, head_size]", true);
  IPEX_CHECK(key_cache.size(1) == key.size(1) && key_cache.size(3) == key.size(2), op,
             ": key_cache must have shape [num_blocks, ", key.size(1), ", block_size, ",
             key.size(2), "], got ", shape_text(key_cache));
  IPEX_CHECK(slots.is_cpu(), op, ": slot_mapping must be on the device of key = cpu");
  IPEX_CHECK(is_index_dtype(slots.scalar_type()), op,
             ": slot_mapping must have dtype int32, int64, got ", dtype_name(slots.scalar_type()));
  IPEX_CHECK(slots.dim() == 1 && slots.size(0) == key.size(0), op,
             ": slot_mapping must be 1-D of size key.shape[0] = ", key.size(0), ", got ",
             shape_text(slots));
  check_cache_kind(op, key_cache, kind);
  check_scale(op, "k_scale", k_scale);
  check_scale(op, "v_scale", v_scale);
  check_row_scales(op, "key_scales", key_scales, key_cache);
  check_row_scales(op, "value_scales", value_scales, key_cache);
  if (key_scales) check_not_expanded(op, "key_scales", *key_scales);
  if (value_scales) check_not_expanded(op, "value_scales", *value_scales);
  IPEX_CHECK(key_scales.has_value() == value_scales.has_value(), op,
             ": value_scales must be given if and only if key_scales are, got ",
             value_scales ? "a tensor" : "None");
}

Tensor elements_contiguous(const Tensor& x) {
  return x.stride(2) == 1 || x.size(2) <= 1 ? x : torch::stable::contiguous(x);
}

// Whether no slot is written twice. Ascending slots, the usual ones, tell without a sort.
bool all_different(const std::vector<int64_t>& slots) {
  bool ascending = true;
  for (size_t i = 1; i < slots.size() && ascending; ++i) ascending = slots[i - 1] < slots[i];
  if (ascending) return true;
  std::vector<int64_t> sorted = slots;
  std::sort(sorted.begin(), sorted.end());
  for (size_t i = 1; i < sorted.size(); ++i)
    if (sorted[i] >= 0 && sorted[i - 1] == sorted[i]) return false;
  return true;
}

template <class K>
void write(const char* op, const K& handles, const Tensor& key0, const Tensor& value0,
           const Tensor& key_cache, const Tensor& value_cache, const Tensor& slot_mapping,
           const std::string& kind, double k_scale, double v_scale,
           const OptionalTensor& key_scales, const OptionalTensor& value_scales) {
  check_arguments(op, key0, value0, key_cache, value_cache, slot_mapping, kind, k_scale, v_scale,
                  key_scales, value_scales);
  const int64_t tokens = key0.size(0), block_size = key_cache.size(2);
  const int64_t capacity = key_cache.size(0) * block_size;
  const Indices given(slot_mapping);
  std::vector<int64_t> slots(static_cast<size_t>(tokens));
  for (int64_t t = 0; t < tokens; ++t) {
    slots[static_cast<size_t>(t)] = given[t];
    IPEX_CHECK(given[t] < capacity, op, ": slot_mapping must hold slots below num_blocks * ",
               "block_size = ", capacity, ", got ", given[t]);
  }
  if (key0.numel() == 0) return;
  const Tensor key = elements_contiguous(key0), value = elements_contiguous(value0);
  CacheWriteArgs args{};
  args.key = key.const_data_ptr();
  args.value = value.const_data_ptr();
  args.key_token = key.stride(0);
  args.key_head = key.stride(1);
  args.value_token = value.stride(0);
  args.value_head = value.stride(1);
  args.slots = slots.data();
  args.cache.type = kv_type(key_cache.scalar_type());
  args.cache.key = kv_part(key_cache, key_scales, k_scale, 0, 1, 2);
  args.cache.value = kv_part(value_cache, value_scales, v_scale, 0, 1, 2);
  args.block_size = block_size;
  args.heads = key.size(1);
  args.size = key.size(2);
  // Of tokens with the same slot the last one stays: one thread writes them in order.
  const bool together = !all_different(slots);
  handles.visit(key.scalar_type(), [&]<class T>(auto* kernel) {
    parallel_for(tokens, together ? tokens : row_grain<T>(2 * args.heads * args.size),
                 [&](int64_t begin, int64_t end) { kernel(&args, begin, end); });
  });
}

void reshape_and_cache(const Tensor& key, const Tensor& value, const Tensor& key_cache,
                       const Tensor& value_cache, const Tensor& slot_mapping,
                       const std::string& kv_cache_dtype, double k_scale, double v_scale,
                       const OptionalTensor& key_scales, const OptionalTensor& value_scales) {
  write("reshape_and_cache", kernels, key, value, key_cache, value_cache, slot_mapping,
        kv_cache_dtype, k_scale, v_scale, key_scales, value_scales);
}

void reshape_and_cache_flash(const Tensor& key, const Tensor& value, const Tensor& key_cache,
                             const Tensor& value_cache, const Tensor& slot_mapping,
                             const std::string& kv_cache_dtype, double k_scale, double v_scale,
                             const OptionalTensor& key_scales, const OptionalTensor& value_scales) {
  write("reshape_and_cache_flash", flash_kernels, key, value, key_cache, value_cache, slot_mapping,
        kv_cache_dtype, k_scale, v_scale, key_scales, value_scales);
}

}  // namespace
}  // namespace ipex

STABLE_TORCH_LIBRARY_IMPL(ipex, CPU, m) {
  IPEX_IMPL(m, "reshape_and_cache", ipex::reshape_and_cache);
  IPEX_IMPL(m, "reshape_and_cache_flash", ipex::reshape_and_cache_flash);
}
