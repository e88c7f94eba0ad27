// SPDX-License-Identifier: Apache-2.0
// Collectives of tensors of the device through a back end of the host: what is sent and received,
// and the work in flight.
#pragma once

#include <ATen/core/TensorBody.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace ipex::xpu {

// How the values of a tensor travel: as they are, since they are reduced, or as bytes, which back
// ends take of any dtype.
enum class Wire : std::uint8_t { Values, Bytes };

// Makes the mean of a sum, in place: whole numbers are rounded towards zero.
void divide_sum(const at::Tensor& sum, std::int64_t by);

// The tensors of one collective on the host. Kept alive until the collective has ended, also
// if its handle is dropped.
class Stage {
 public:
  // What the back end reads and, where `output`, writes; always contiguous. Tensors of the host
  // stay what they are.
  at::Tensor add(const at::Tensor& tensor, bool output, Wire wire);
  std::vector<at::Tensor> add(at::TensorList tensors, bool output, Wire wire);
  std::vector<std::vector<at::Tensor>> add(const std::vector<std::vector<at::Tensor>>& tensors,
                                           bool output, Wire wire);
  // Outputs are divided by this at the end: the mean, which the back end cannot compute itself.
  void divide_by(std::int64_t divisor) { divisor_ = divisor; }

  // Moves what was received to the device, once; later calls wait for the first.
  void finish();
  const std::vector<at::Tensor>& outputs() const { return outputs_; }

 private:
  struct Item {
    at::Tensor tensor;  // of the device
    at::Tensor host;    // its memory or a copy of it
    at::Tensor wire;    // contiguous
    bool output = false;
  };
  std::vector<Item> items_;
  std::vector<at::Tensor> outputs_;
  std::int64_t divisor_ = 1;
  std::once_flag once_;
};

// The work of the back end; it has ended when its results are on the device.
class StagedWork final : public c10d::Work {
 public:
  StagedWork(c10::intrusive_ptr<c10d::Work> inner, std::shared_ptr<Stage> stage,
             c10d::OpType operation);

  bool isCompleted() override;
  bool isSuccess() const override { return inner_->isSuccess(); }
  std::exception_ptr exception() const override { return inner_->exception(); }
  int sourceRank() const override { return inner_->sourceRank(); }
  std::vector<at::Tensor> result() override;
  void synchronize() override { wait(); }
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void blockCurrentStream() override { wait(); }
  void abort() override { inner_->abort(); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  std::uint64_t getSequencenumber() const override { return inner_->getSequencenumber(); }

 private:
  c10::intrusive_ptr<c10d::Work> inner_;
  std::shared_ptr<Stage> stage_;
  std::atomic<bool> waited_{false};
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

}  // namespace ipex::xpu
