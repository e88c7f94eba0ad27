// SPDX-License-Identifier: Apache-2.0
#include "device/collectives/staged_work.h"

#include <ATen/core/ivalue.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include "device/core/runtime.h"

namespace ipex::xpu {

using at::Tensor;
using c10::ivalue::Future;

namespace {

// What gloo takes. Others travel as their bytes, one more dimension, so that the sizes of the
// others are what they were.
bool is_sent_as_values(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
    case at::kDouble:
    case at::kHalf:
    case at::kBFloat16:
    case at::kChar:
    case at::kByte:
    case at::kInt:
    case at::kLong:
      return true;
    default:
      return false;
  }
}

}  // namespace

void divide_sum(const Tensor& sum, std::int64_t by) {
  if (at::isIntegralType(sum.scalar_type(), /*includeBool=*/true))
    sum.div_(by, "trunc");
  else
    sum.div_(by);
}

Tensor Stage::add(const Tensor& tensor, bool output, Wire wire) {
  if (output) outputs_.push_back(tensor);
  if (!tensor.defined() || !tensor.is_xpu()) return tensor;
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  Item item{tensor, to_host(tensor.detach()), {}, output};
  item.host = item.host.resolve_conj().resolve_neg();
  item.wire = item.host.contiguous();
  items_.push_back(item);
  return wire == Wire::Values || is_sent_as_values(tensor.scalar_type())
             ? item.wire
             : item.wire.unsqueeze(-1).view(at::kByte);
}

std::vector<Tensor> Stage::add(at::TensorList tensors, bool output, Wire wire) {
  std::vector<Tensor> result;
  for (const Tensor& tensor : tensors) result.push_back(add(tensor, output, wire));
  return result;
}

std::vector<std::vector<Tensor>> Stage::add(const std::vector<std::vector<Tensor>>& tensors,
                                            bool output, Wire wire) {
  std::vector<std::vector<Tensor>> result;
  for (const auto& one : tensors) result.push_back(add(at::TensorList(one), output, wire));
  return result;
}

void Stage::finish() {
  std::call_once(once_, [&] {
    const at::AutoDispatchBelowADInplaceOrView no_autograd;
    for (const Item& item : items_) {
      if (!item.output) continue;
      if (divisor_ != 1) divide_sum(item.wire, divisor_);
      if (!item.wire.is_same(item.host)) item.host.copy_(item.wire);
      from_host(item.host, item.tensor);
    }
  });
}

StagedWork::StagedWork(c10::intrusive_ptr<c10d::Work> inner, std::shared_ptr<Stage> stage,
                       c10d::OpType operation)
    : Work(-1, operation), inner_(std::move(inner)), stage_(std::move(stage)) {
  if (c10d::isP2POp(operation)) return;  // makes progress when somebody waits
  c10::intrusive_ptr<Future> inner_future;
  try {
    inner_future = inner_->getFuture();
  } catch (const c10::Error&) {
    return;  // gloo's reduce_scatter: its last step is done by the one who waits
  }
  future_ = c10::make_intrusive<Future>(c10::ListType::create(c10::TensorType::get()));
  inner_future->addCallback([kept = stage_, future = future_](Future& done) {
    try {
      if (done.hasError()) {
        future->setError(done.exception_ptr());
        return;
      }
      kept->finish();
      future->markCompleted(c10::IValue(kept->outputs()));
    } catch (...) {
      future->setError(std::current_exception());
    }
  });
}

bool StagedWork::isCompleted() {
  if (waited_) return true;
  if (!inner_->isCompleted()) return false;
  if (inner_->isSuccess()) stage_->finish();
  return true;
}

bool StagedWork::wait(std::chrono::milliseconds timeout) {
  const bool completed = inner_->wait(timeout);
  stage_->finish();
  waited_ = true;
  return completed;
}

std::vector<Tensor> StagedWork::result() {
  wait();
  return stage_->outputs();
}

c10::intrusive_ptr<Future> StagedWork::getFuture() {
  TORCH_CHECK_NOT_IMPLEMENTED(
      !c10d::isP2POp(opType_),
      "xpu: the work of send and recv has no future: call wait() of the work");
  if (!future_) {
    wait();
    future_ = c10::make_intrusive<Future>(c10::ListType::create(c10::TensorType::get()));
    future_->markCompleted(c10::IValue(stage_->outputs()));
  }
  return future_;
}

}  // namespace ipex::xpu
