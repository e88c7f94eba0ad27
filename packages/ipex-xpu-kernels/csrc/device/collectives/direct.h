// SPDX-License-Identifier: Apache-2.0
// Collectives whose values stay on the device: each process reads what it needs from the memory of
// the others, and kernels reduce it.
#pragma once

#include <ATen/core/TensorBody.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <chrono>
#include <cstdint>
#include <vector>

#include "device/core/runtime.h"

namespace ipex::xpu {

using DirectGroup = c10::intrusive_ptr<c10d::ProcessGroup>;
using DirectWork = c10::intrusive_ptr<c10d::Work>;

// Each function starts a collective and returns its work, or null where the values must go through
// the host: on other hosts, in small numbers, or of a dtype or a reduction that is not there. All
// processes get the same answer, since they ask with equal sizes.
DirectWork direct_allreduce(const DirectGroup& group, const at::Tensor& tensor,
                            const c10d::ReduceOp& op, std::chrono::milliseconds timeout);
DirectWork direct_broadcast(const DirectGroup& group, const at::Tensor& tensor, int root,
                            std::chrono::milliseconds timeout);
// One output for each process.
DirectWork direct_allgather(const DirectGroup& group, const std::vector<at::Tensor>& outputs,
                            const at::Tensor& input, std::chrono::milliseconds timeout);
// One part of the input for each process.
DirectWork direct_reduce_scatter(const DirectGroup& group, const at::Tensor& output,
                                 const at::Tensor& input, const c10d::ReduceOp& op,
                                 std::chrono::milliseconds timeout);

}  // namespace ipex::xpu
