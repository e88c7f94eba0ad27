// SPDX-License-Identifier: Apache-2.0
// Working memory that outlives a call. Fresh memory of some hundred KiB costs a page fault for
// every 4 KiB, which is more than a small op takes.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>

namespace ipex {

// What a block is for. Two users of one area at a time would overwrite each other, so each op has
// its own: name a new one here rather than take another op's.
enum class Area {
  kAttentionTask,    // packed keys and values of one task
  kAttentionCall,    // packed heads that all threads of a call share
  kBmmPanels,        // packed second operand
  kBmmRows,          // rows of the first operand, gathered
  kCausalConv,       // filter in float
  kConvolutionRows,  // rows of the product that a convolution is
  kDecodeTask,
  kDecodePartial,  // results of the parts of a sequence
  kEmbeddingUpdate,
  kExpertsMiddle,  // activations between the two products
  kExpertsTask,
  kExpertsWoq,  // operands of weight-only products
  kInt8Activations,
  kInt8Interaction,
  kInt8Matmul,
  kInteraction,
  kLora,
  kMlaTask,
  kMlaPartial,
  kMoeRouting,
  kNms,
  kNormQuant,
  kPointwise,
  kRecurrence,  // a part of the state of one text
  kVarlenConv,  // filter in float
  kRoiAlign,
  kSampleToken,
  kSelectiveScan,
  kStateUpdate,
  kTiles,  // for gemm_block() in any op: kGemmScratch bytes
  kUpsample,
  kWoqOperand,
  kWoqPanels,
  kWoqInt8Codes,
  kWoqInt8Panels,
};

struct Free {
  void operator()(void* memory) const { std::free(memory); }
};

// One block per thread and area, grown as needed and kept up to kKept bytes. Aligned to 64 bytes.
template <Area kArea>
class Scratch {
 public:
  // Memory of the calling thread, valid until its next call; nullptr if memory is short. Does not
  // throw, so that it can be called inside a parallel loop.
  static char* get(int64_t bytes) noexcept {
    thread_local Scratch block;
    if (bytes <= 0) bytes = 1;  // nothing is not "no memory"
#ifdef __SANITIZE_ADDRESS__
    // A block of its own and of exactly this size for each call: use of more, or of an old block,
    // is reported.
    void* fresh = nullptr;
    block.memory_.reset();
    if (posix_memalign(&fresh, 64, static_cast<size_t>(bytes)) != 0) fresh = nullptr;
    block.memory_.reset(static_cast<char*>(fresh));
    return block.memory_.get();
#endif
    if (bytes > block.size_ || block.size_ > kKept) {
      block.memory_.reset();
      const int64_t size = (bytes + 63) / 64 * 64;
      block.memory_.reset(static_cast<char*>(std::aligned_alloc(64, static_cast<size_t>(size))));
      block.size_ = block.memory_ ? size : 0;
    }
    return block.memory_.get();
  }

 private:
  static constexpr int64_t kKept = int64_t{16} << 20;

  std::unique_ptr<char, Free> memory_;
  int64_t size_ = 0;
};

}  // namespace ipex
