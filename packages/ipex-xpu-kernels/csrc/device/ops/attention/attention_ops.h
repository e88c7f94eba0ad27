// SPDX-License-Identifier: Apache-2.0
// The kernel of attention.sycl.cpp, for torch's op and for ops of ipex.
#pragma once

#include <ATen/core/TensorBody.h>

#include <optional>

namespace ipex::xpu {

struct Attention {
  // [batch, heads, rows, size] or [blocks, heads, rows of a block, size]; steps of 1 between the
  // numbers of a head.
  at::Tensor query, key, value, out;
  std::optional<at::Tensor> mask;       // float32, [batch, heads, queries, keys], of any strides
  std::optional<at::Tensor> slopes;     // float32, [heads] or [sequences, heads]
  std::optional<at::Tensor> sinks;      // float32, [heads]
  std::optional<at::Tensor> q_starts;   // int32, [sequences + 1]: rows of `query` of each sequence
  std::optional<at::Tensor> k_starts;   // int32, [sequences + 1]: rows of `key` of each sequence
  std::optional<at::Tensor> k_lengths;  // int32, [sequences]: how many rows of `key` are in use
  std::optional<at::Tensor> table;      // int32, [sequences, blocks]: the blocks of each sequence
  std::int64_t sequences = 0;
  std::int64_t longest = 0;  // queries of a sequence, at most
  std::int64_t behind = -1;  // keys that a query sees before and behind its place; negative: all
  std::int64_t ahead = -1;
  double scale = 1;
  double softcap = 0;
  bool bottom_right = false;  // the last query stands at the last key
};

// Whether the kernel has this dtype and these sizes of heads.
bool attention_supported(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value);
void attention_kernel(const Attention& call);

}  // namespace ipex::xpu
