// SPDX-License-Identifier: Apache-2.0
// The collectives of torch.distributed for tensors of the device: through a back end of the host
// (gloo), on the same memory where the host can read it and on copies elsewhere.
#include <torch/library.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "core/core.h"
#include "device/collectives/direct.h"
#include "device/collectives/staged_work.h"
#include "device/core/runtime.h"

namespace ipex::xpu {
namespace {

using at::Tensor;
using at::TensorList;
using c10d::OpType;
using c10d::ReduceOp;
using Group = c10::intrusive_ptr<c10d::ProcessGroup>;
using Work = c10::intrusive_ptr<c10d::Work>;
using Reduction = c10::intrusive_ptr<ReduceOp>;
using TensorLists = std::vector<std::vector<Tensor>>;

std::chrono::milliseconds milliseconds(std::int64_t timeout) {
  return std::chrono::milliseconds(timeout);
}

const c10::intrusive_ptr<c10d::Backend> backend(const Group& group) {
  return group->getBackend(c10::DeviceType::XPU);
}

// One collective: tensors are added to the stage, then the back end is called.
class Call {
 public:
  Call(const Group& group, OpType operation)
      : backend_(backend(group)),
        size_(group->getSize()),
        operation_(operation),
        stage_(std::make_shared<Stage>()) {}

  template <typename T>
  T in(const T& tensors, Wire wire = Wire::Bytes) {
    return stage_->add(tensors, false, wire);
  }
  template <typename T>
  T out(const T& tensors, Wire wire = Wire::Bytes) {
    return stage_->add(tensors, true, wire);
  }
  std::vector<Tensor> in(TensorList tensors, Wire wire = Wire::Bytes) {
    return stage_->add(tensors, false, wire);
  }
  std::vector<Tensor> out(TensorList tensors, Wire wire = Wire::Bytes) {
    return stage_->add(tensors, true, wire);
  }

  // The mean is the sum, divided when it is there: gloo has no mean.
  ReduceOp reduction(const Reduction& op) {
    if (op->op_ != ReduceOp::AVG) return *op;
    stage_->divide_by(size_);
    return ReduceOp(ReduceOp::SUM);
  }

  c10d::Backend& operator*() const { return *backend_; }
  Work start(Work inner) {
    return c10::make_intrusive<StagedWork>(std::move(inner), stage_, operation_);
  }

 private:
  c10::intrusive_ptr<c10d::Backend> backend_;
  std::int64_t size_;
  OpType operation_;
  std::shared_ptr<Stage> stage_;
};

std::tuple<std::vector<Tensor>, Work> broadcast(TensorList tensors, const Group& group,
                                                std::int64_t root_rank, std::int64_t root_tensor,
                                                bool async, std::int64_t timeout) {
  if (tensors.size() == 1) {
    if (Work work =
            direct_broadcast(group, tensors[0], static_cast<int>(root_rank), milliseconds(timeout)))
      return {tensors.vec(), work};
  }
  Call call(group, OpType::BROADCAST);
  auto hosts = call.out(tensors);
  return {tensors.vec(), call.start((*call).broadcast(
                             hosts, {root_rank, root_tensor, milliseconds(timeout), async}))};
}

std::tuple<std::vector<Tensor>, Work> allreduce(TensorList tensors, const Group& group,
                                                const Reduction& op,
                                                const std::optional<Tensor>& sparse_indices,
                                                bool async, std::int64_t timeout) {
  TORCH_CHECK_NOT_IMPLEMENTED(!sparse_indices, "all_reduce: sparse tensors of xpu are not offered");
  if (tensors.size() == 1) {
    if (Work work = direct_allreduce(group, tensors[0], *op, milliseconds(timeout)))
      return {tensors.vec(), work};
  }
  Call call(group, OpType::ALLREDUCE);
  auto hosts = call.out(tensors, Wire::Values);
  c10d::AllreduceOptions options;
  options.reduceOp = call.reduction(op);
  options.timeout = milliseconds(timeout);
  options.asyncOp = async;
  return {tensors.vec(), call.start((*call).allreduce(hosts, options))};
}

Work allreduce_coalesced(TensorList tensors, const Group& group, const Reduction& op, bool async,
                         std::int64_t timeout) {
  Call call(group, OpType::ALLREDUCE_COALESCED);
  auto hosts = call.out(tensors, Wire::Values);
  c10d::AllreduceCoalescedOptions options;
  options.reduceOp = call.reduction(op);
  options.timeout = milliseconds(timeout);
  options.asyncOp = async;
  return call.start((*call).allreduce_coalesced(hosts, options));
}

Work reduce(TensorList tensors, const Group& group, const Reduction& op, std::int64_t root_rank,
            std::int64_t root_tensor, bool async, std::int64_t timeout) {
  Call call(group, OpType::REDUCE);
  auto hosts = call.out(tensors, Wire::Values);
  c10d::ReduceOptions options;
  // Elsewhere than at the root the tensor holds parts of the sum or what it held.
  options.reduceOp = group->getRank() == root_rank || op->op_ != ReduceOp::AVG
                         ? call.reduction(op)
                         : ReduceOp(ReduceOp::SUM);
  options.rootRank = root_rank;
  options.rootTensor = root_tensor;
  options.timeout = milliseconds(timeout);
  options.asyncOp = async;
  return call.start((*call).reduce(hosts, options));
}

std::tuple<TensorLists, Work> allgather(const TensorLists& outputs, TensorList inputs,
                                        const Group& group, bool async, std::int64_t timeout) {
  if (inputs.size() == 1 && outputs.size() == 1) {
    if (Work work = direct_allgather(group, outputs[0], inputs[0], milliseconds(timeout)))
      return {outputs, work};
  }
  Call call(group, OpType::ALLGATHER);
  auto sources = call.in(inputs);
  auto hosts = call.out(outputs);
  return {outputs, call.start((*call).allgather(hosts, sources, {milliseconds(timeout), async}))};
}

std::tuple<Tensor, Work> allgather_base(Tensor& output, Tensor& input, const Group& group,
                                        bool async, std::int64_t timeout) {
  if (output.is_contiguous() && output.numel() == input.numel() * group->getSize()) {
    const auto parts = output.detach().view({-1}).chunk(group->getSize());
    if (Work work = direct_allgather(group, parts, input, milliseconds(timeout)))
      return {output, work};
  }
  Call call(group, OpType::_ALLGATHER_BASE);
  Tensor source = call.in(input);
  Tensor host = call.out(output);
  return {output,
          call.start((*call)._allgather_base(host, source, {milliseconds(timeout), async}))};
}

Work allgather_coalesced(const TensorLists& outputs, const TensorList& inputs, const Group& group,
                         bool async) {
  Call call(group, OpType::ALLGATHER_COALESCED);
  auto sources = call.in(inputs);
  auto hosts = call.out(outputs);
  c10d::AllgatherOptions options;
  options.asyncOp = async;
  return call.start((*call).allgather_coalesced(hosts, sources, options));
}

Work allgather_into_tensor_coalesced(const TensorList outputs, const TensorList inputs,
                                     const Group& group, bool async) {
  Call call(group, OpType::COALESCED);
  auto sources = call.in(inputs);
  auto hosts = call.out(outputs);
  c10d::AllgatherOptions options;
  options.asyncOp = async;
  return call.start((*call).allgather_into_tensor_coalesced(hosts, sources, options));
}

Work gather(const TensorLists& outputs, const TensorList& inputs, const Group& group,
            std::int64_t root_rank, bool async, std::int64_t timeout) {
  Call call(group, OpType::GATHER);
  auto sources = call.in(inputs);
  auto hosts = call.out(outputs);
  return call.start((*call).gather(hosts, sources, {root_rank, milliseconds(timeout), async}));
}

std::tuple<std::vector<Tensor>, Work> scatter(const TensorList& outputs, const TensorLists& inputs,
                                              const Group& group, std::int64_t root_rank,
                                              bool async, std::int64_t timeout) {
  Call call(group, OpType::SCATTER);
  auto sources = call.in(inputs);
  auto hosts = call.out(outputs);
  return {outputs.vec(),
          call.start((*call).scatter(hosts, sources, {root_rank, milliseconds(timeout), async}))};
}

std::tuple<std::vector<Tensor>, Work> reduce_scatter(const TensorList& outputs,
                                                     const TensorLists& inputs, const Group& group,
                                                     const Reduction& op, bool async,
                                                     std::int64_t timeout) {
  Call call(group, OpType::REDUCE_SCATTER);
  auto sources = call.in(inputs, Wire::Values);
  auto hosts = call.out(outputs, Wire::Values);
  const c10d::ReduceScatterOptions options{call.reduction(op), milliseconds(timeout), async};
  return {outputs.vec(), call.start((*call).reduce_scatter(hosts, sources, options))};
}

std::tuple<Tensor, Work> reduce_scatter_base(Tensor& output, Tensor& input, const Group& group,
                                             const Reduction& op, bool async,
                                             std::int64_t timeout) {
  if (Work work = direct_reduce_scatter(group, output, input, *op, milliseconds(timeout)))
    return {output, work};
  Call call(group, OpType::_REDUCE_SCATTER_BASE);
  Tensor source = call.in(input, Wire::Values);
  Tensor host = call.out(output, Wire::Values);
  const c10d::ReduceScatterOptions options{call.reduction(op), milliseconds(timeout), async};
  return {output, call.start((*call)._reduce_scatter_base(host, source, options))};
}

Work reduce_scatter_tensor_coalesced(const TensorList outputs, const TensorList inputs,
                                     const Group& group, const Reduction& op, bool async,
                                     std::int64_t timeout) {
  Call call(group, OpType::COALESCED);
  auto sources = call.in(inputs, Wire::Values);
  auto hosts = call.out(outputs, Wire::Values);
  const c10d::ReduceScatterOptions options{call.reduction(op), milliseconds(timeout), async};
  return call.start((*call).reduce_scatter_tensor_coalesced(hosts, sources, options));
}

Work alltoall_base(Tensor& output, Tensor& input, const Group& group,
                   std::vector<std::int64_t> output_sizes, std::vector<std::int64_t> input_sizes,
                   bool async, std::int64_t timeout) {
  Call call(group, OpType::ALLTOALL_BASE);
  Tensor source = call.in(input);
  Tensor host = call.out(output);
  return call.start((*call).alltoall_base(host, source, output_sizes, input_sizes,
                                          {milliseconds(timeout), async}));
}

std::tuple<std::vector<Tensor>, Work> alltoall(const TensorList& outputs, const TensorList& inputs,
                                               const Group& group, bool async,
                                               std::int64_t timeout) {
  Call call(group, OpType::ALLTOALL);
  auto sources = call.in(inputs);
  auto hosts = call.out(outputs);
  return {outputs.vec(),
          call.start((*call).alltoall(hosts, sources, {milliseconds(timeout), async}))};
}

Work send(TensorList tensors, const Group& group, std::int64_t to, std::int64_t tag) {
  Call call(group, OpType::SEND);
  auto hosts = call.in(tensors);
  return call.start((*call).send(hosts, static_cast<int>(to), static_cast<int>(tag)));
}

Work recv(TensorList tensors, const Group& group, std::int64_t from, std::int64_t tag) {
  Call call(group, OpType::RECV);
  auto hosts = call.out(tensors);
  return call.start((*call).recv(hosts, static_cast<int>(from), static_cast<int>(tag)));
}

Work recv_any_source(TensorList tensors, const Group& group, std::int64_t tag) {
  Call call(group, OpType::RECVANYSOURCE);
  auto hosts = call.out(tensors);
  return call.start((*call).recvAnysource(hosts, static_cast<int>(tag)));
}

Work barrier(Tensor /*tensor*/, const Group& group, const std::vector<std::int64_t>& device_ids,
             bool async, std::int64_t timeout) {
  for (int i = 0; i < device_count(); ++i) synchronize(i);
  c10d::BarrierOptions options;
  options.device_ids = device_ids;
  options.timeout = milliseconds(timeout);
  options.asyncOp = async;
  return backend(group)->barrier(options);
}

}  // namespace

void register_collectives() {
  static torch::Library library(torch::Library::IMPL, "c10d", c10::DispatchKey::XPU, __FILE__,
                                __LINE__);
  library.impl("broadcast_", &broadcast);
  library.impl("allreduce_", &allreduce);
  library.impl("allreduce_coalesced_", &allreduce_coalesced);
  library.impl("reduce_", &reduce);
  library.impl("allgather_", &allgather);
  library.impl("_allgather_base_", &allgather_base);
  library.impl("allgather_coalesced_", &allgather_coalesced);
  library.impl("allgather_into_tensor_coalesced_", &allgather_into_tensor_coalesced);
  library.impl("gather_", &gather);
  library.impl("scatter_", &scatter);
  library.impl("reduce_scatter_", &reduce_scatter);
  library.impl("_reduce_scatter_base_", &reduce_scatter_base);
  library.impl("reduce_scatter_tensor_coalesced_", &reduce_scatter_tensor_coalesced);
  library.impl("alltoall_base_", &alltoall_base);
  library.impl("alltoall_", &alltoall);
  library.impl("send", &send);
  library.impl("recv_", &recv);
  library.impl("recv_any_source_", &recv_any_source);
  library.impl("barrier", &barrier);
}

}  // namespace ipex::xpu
