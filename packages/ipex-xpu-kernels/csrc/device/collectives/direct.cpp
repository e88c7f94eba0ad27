// SPDX-License-Identifier: Apache-2.0
#include "device/collectives/direct.h"

#include <ATen/core/ivalue.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>

#include "core/core.h"
#include "device/collectives/neighbors.h"
#include "device/collectives/staged_work.h"

namespace ipex::xpu {
namespace {

using at::Tensor;
using c10::ivalue::Future;
using c10d::OpType;
using c10d::ReduceOp;
using Milliseconds = std::chrono::milliseconds;

// Below this gloo on the host is sooner done: it needs no two kernels and no two meetings.
constexpr std::int64_t kLeastBytes = 64 << 10;

std::atomic<CollectiveMode> g_collective_mode{CollectiveMode::Auto};
std::atomic<std::uint64_t> g_direct_collectives{0};

// A collective in flight. It has ended when its results are on the device.
class Ending final : public c10d::Work {
 public:
  Ending(OpType operation, std::vector<Tensor> outputs)
      : Work(-1, operation),
        outputs_(std::move(outputs)),
        future_(c10::make_intrusive<Future>(c10::ListType::create(c10::TensorType::get()))) {}

  void end(const std::exception_ptr& error) {
    finish(error);
    if (error)
      future_->setError(error);
    else
      future_->markCompleted(c10::IValue(outputs_));
  }
  std::vector<Tensor> result() override {
    wait();
    return outputs_;
  }
  c10::intrusive_ptr<Future> getFuture() override { return future_; }

 private:
  std::vector<Tensor> outputs_;
  c10::intrusive_ptr<Future> future_;
};

// The values, or their bytes, one after another.
Tensor flat(const Tensor& tensor) { return tensor.detach().contiguous().view({-1}); }
Tensor flat_bytes(const Tensor& tensor) { return flat(tensor).view(at::kByte); }

// Puts the values of flat(tensor) into the tensor where that was a copy.
void put_back(const Tensor& line, const Tensor& tensor) {
  if (line.const_data_ptr() != tensor.const_data_ptr())
    tensor.detach().copy_(line.view(tensor.scalar_type()).view(tensor.sizes()));
}

// sum = sum op other
void combine(const Tensor& sum, const Tensor& other, ReduceOp::RedOpType op) {
  Tensor out = sum;
  switch (op) {
    case ReduceOp::PRODUCT:
      out.mul_(other);
      return;
    case ReduceOp::MIN:
      at::minimum_out(out, sum, other);
      return;
    case ReduceOp::MAX:
      at::maximum_out(out, sum, other);
      return;
    default:
      out.add_(other);
  }
}

// The processes of a group that reach each other, and the thread that runs its collectives in their
// order.
class Direct {
 public:
  Direct(std::unique_ptr<Neighbors> neighbors, c10::DeviceIndex device, Milliseconds timeout)
      : neighbors_(std::move(neighbors)),
        device_(device),
        group_timeout_(timeout),
        thread_([this] { run(); }) {}

  int rank() const { return neighbors_->rank(); }
  int size() const { return neighbors_->size(); }

  DirectWork start(OpType operation, std::vector<Tensor> outputs, Milliseconds timeout,
                   std::function<void()> steps) {
    ++g_direct_collectives;
    auto work = c10::make_intrusive<Ending>(operation, std::move(outputs));
    {
      const std::lock_guard lock(mutex_);
      ++left_;
      tasks_.push_back({std::move(steps), work, current_stream(device_), timeout});
    }
    changed_.notify_one();
    return work;
  }

  // For the steps of a collective, in this order: write into memory(rank(), half), meet(), read
  // from the others; the next one takes the other half.
  int next_half() { return half_ = 1 - half_; }
  Tensor memory(int rank, int half, std::int64_t count, at::ScalarType dtype) const {
    const c10::Device device(c10::kXPU, device_);
    return at::for_blob(neighbors_->memory(rank, half), {count})
        .options(at::TensorOptions(dtype).device(device))
        .target_device(device)
        .make_tensor();
  }
  // Waits for the device, then for the other processes.
  void meet() {
    complete();
    neighbors_->wait(timeout_, stop_);
  }
  void complete() { current_queue(device_).wait_and_throw(); }
  // How many elements a half holds.
  std::int64_t room(const Tensor& line) const {
    return static_cast<std::int64_t>(neighbors_->half()) / line.element_size();
  }

  // The others may still come to what was started; not for ever.
  void stop() {
    if (!thread_.joinable()) return;
    {
      std::unique_lock lock(mutex_);
      ended_.wait_for(lock, std::chrono::seconds(5), [this] { return left_ == 0; });
      stop_ = true;
    }
    changed_.notify_one();
    thread_.join();
  }
  // For a group that is gone: whether its memory may go, too. Asked again until it may.
  bool leave() {
    {
      const std::lock_guard lock(mutex_);
      if (left_ != 0) return false;
    }
    stop();
    return neighbors_->leave();
  }

 private:
  struct Task {
    std::function<void()> steps;
    c10::intrusive_ptr<Ending> work;
    c10::Stream stream;
    Milliseconds timeout;
  };

  void run() {
    for (;;) {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [this] { return stop_ || !tasks_.empty(); });
      if (tasks_.empty()) return;
      Task task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      try {
        // The others have left this one alone in it: they cannot meet it again.
        if (broken_) std::rethrow_exception(broken_);
        const c10::StreamGuard stream(task.stream);
        const at::AutoDispatchBelowADInplaceOrView no_autograd;
        // A collective without a timeout of its own takes the group's.
        timeout_ = task.timeout > Milliseconds(0) ? task.timeout : group_timeout_;
        task.steps();
        complete();
      } catch (...) {
        broken_ = std::current_exception();
        neighbors_->fail();
      }
      task.steps = nullptr;  // its tensors, before somebody goes on
      task.work->end(broken_);
      lock.lock();
      --left_;
      ended_.notify_all();
    }
  }

  std::unique_ptr<Neighbors> neighbors_;
  c10::DeviceIndex device_;
  int half_ = 0;
  Milliseconds group_timeout_, timeout_{0};
  std::exception_ptr broken_;
  std::atomic<bool> stop_{false};
  std::mutex mutex_;
  std::condition_variable changed_, ended_;
  int left_ = 0;  // tasks that have not ended
  std::deque<Task> tasks_;
  std::thread thread_;  // last: it uses the others
};

struct Known {
  c10::weak_intrusive_ptr<c10d::Backend> backend;
  c10::DeviceIndex device;
  std::unique_ptr<Direct> direct;  // null: through the host
};
std::mutex g_groups_mutex;
std::vector<Known>& known() {
  static auto* instance = new std::vector<Known>;
  return *instance;
}
std::unordered_map<std::string, Milliseconds>& timeouts() {
  static auto* instance = new std::unordered_map<std::string, Milliseconds>;
  return *instance;
}
bool g_collectives_stopped = false;

Direct* direct_of(const DirectGroup& group, const Tensor& tensor) {
  const CollectiveMode mode = g_collective_mode;
  if (mode == CollectiveMode::Host || !tensor.is_xpu() || tensor.is_complex() ||
      tensor.layout() != at::kStrided || tensor.numel() == 0)
    return nullptr;
  const auto bytes = static_cast<std::int64_t>(tensor.nbytes());
  if (mode == CollectiveMode::Auto && bytes < kLeastBytes) return nullptr;
  const auto backend = group->getBackend(c10::DeviceType::XPU);
  const auto device = static_cast<c10::DeviceIndex>(tensor.get_device());
  Milliseconds timeout = kProcessGroupDefaultTimeout;
  {
    const std::lock_guard lock(g_groups_mutex);
    if (g_collectives_stopped) return nullptr;
    for (Known& one : known()) {
      if (one.device == device && one.backend.lock() == backend) return one.direct.get();
    }
    const auto found = timeouts().find(group->getGroupName());
    if (found != timeouts().end()) timeout = found->second;
  }
  // Without the lock: another thread may ask for another group, whose processes wait for it.
  auto neighbors = Neighbors::meet(*backend, device, mode == CollectiveMode::Direct);
  const std::lock_guard lock(g_groups_mutex);
  std::erase_if(known(), [](const Known& one) {
    return one.backend.expired() && (!one.direct || one.direct->leave());
  });
  known().push_back(
      {c10::weak_intrusive_ptr<c10d::Backend>(backend), device,
       neighbors ? std::make_unique<Direct>(std::move(neighbors), device, timeout) : nullptr});
  return known().back().direct.get();
}

bool reduces(const Tensor& tensor, const ReduceOp& op) {
  const at::ScalarType dtype = tensor.scalar_type();
  const bool number = dtype == at::kFloat || dtype == at::kDouble || dtype == at::kHalf ||
                      dtype == at::kBFloat16 ||
                      (at::isIntegralType(dtype, /*includeBool=*/false) && dtype != at::kShort);
  return number &&
         (op.op_ == ReduceOp::SUM || op.op_ == ReduceOp::AVG || op.op_ == ReduceOp::PRODUCT ||
          op.op_ == ReduceOp::MIN || op.op_ == ReduceOp::MAX);
}

}  // namespace

void set_group_timeout(const std::string& group, double seconds) {
  const std::lock_guard lock(g_groups_mutex);
  timeouts()[group] = std::chrono::duration_cast<Milliseconds>(
      std::chrono::duration<double>(std::min(seconds, 1e9)));
}
void set_collective_mode(CollectiveMode mode) { g_collective_mode = mode; }
std::uint64_t direct_collectives() { return g_direct_collectives; }

void stop_collectives() {
  const std::lock_guard lock(g_groups_mutex);
  g_collectives_stopped = true;
  for (Known& one : known()) {
    if (one.direct) one.direct->stop();
  }
}

DirectWork direct_allreduce(const DirectGroup& group, const Tensor& tensor, const ReduceOp& op,
                            Milliseconds timeout) {
  Direct* d = reduces(tensor, op) ? direct_of(group, tensor) : nullptr;
  if (d == nullptr) return {};
  return d->start(OpType::ALLREDUCE, {tensor}, timeout, [d, tensor, op = op.op_] {
    const Tensor line = flat(tensor);
    const std::int64_t count = line.numel(), room = d->room(line);
    for (std::int64_t at = 0; at < count; at += room) {
      const std::int64_t n = std::min(room, count - at), each = (n + d->size() - 1) / d->size();
      const int half = d->next_half();
      const auto memory = [&](int rank) { return d->memory(rank, half, n, line.scalar_type()); };
      // The part of the values that a process reduces.
      const auto part = [&](const Tensor& of, int rank) {
        const std::int64_t begin = std::min(n, rank * each);
        return of.narrow(0, begin, std::min(each, n - begin));
      };
      const Tensor piece = line.narrow(0, at, n);
      memory(d->rank()).copy_(piece);
      d->meet();
      const Tensor sum = part(memory(d->rank()), d->rank());
      for (int r = 0; r < d->size(); ++r) {
        if (r != d->rank()) combine(sum, part(memory(r), d->rank()), op);
      }
      if (op == ReduceOp::AVG) divide_sum(sum, d->size());
      d->meet();
      for (int r = 0; r < d->size(); ++r) part(piece, r).copy_(part(memory(r), r));
    }
    put_back(line, tensor);
  });
}

DirectWork direct_broadcast(const DirectGroup& group, const Tensor& tensor, int root,
                            Milliseconds timeout) {
  Direct* d = direct_of(group, tensor);
  if (d == nullptr) return {};
  return d->start(OpType::BROADCAST, {tensor}, timeout, [d, tensor, root] {
    const Tensor line = flat_bytes(tensor);
    const std::int64_t count = line.numel(), room = d->room(line);
    for (std::int64_t at = 0; at < count; at += room) {
      const std::int64_t n = std::min(room, count - at);
      const Tensor piece = line.narrow(0, at, n);
      const Tensor memory = d->memory(root, d->next_half(), n, at::kByte);
      if (d->rank() == root) memory.copy_(piece);
      d->meet();
      if (d->rank() != root) piece.copy_(memory);
    }
    if (d->rank() != root) put_back(line, tensor);
  });
}

DirectWork direct_allgather(const DirectGroup& group, const std::vector<Tensor>& outputs,
                            const Tensor& input, Milliseconds timeout) {
  const auto same = [&](const Tensor& t) {
    return t.is_xpu() && t.get_device() == input.get_device() &&
           t.scalar_type() == input.scalar_type() && t.numel() == input.numel();
  };
  Direct* d = std::all_of(outputs.begin(), outputs.end(), same) ? direct_of(group, input) : nullptr;
  if (d == nullptr || static_cast<int>(outputs.size()) != d->size()) return {};
  return d->start(OpType::ALLGATHER, outputs, timeout, [d, outputs, input] {
    const Tensor line = flat_bytes(input);
    std::vector<Tensor> lines;
    for (const Tensor& output : outputs) lines.push_back(flat_bytes(output));
    const std::int64_t count = line.numel(), room = d->room(line);
    for (std::int64_t at = 0; at < count; at += room) {
      const std::int64_t n = std::min(room, count - at);
      const int half = d->next_half();
      d->memory(d->rank(), half, n, at::kByte).copy_(line.narrow(0, at, n));
      d->meet();
      for (int r = 0; r < d->size(); ++r)
        lines[static_cast<std::size_t>(r)].narrow(0, at, n).copy_(d->memory(r, half, n, at::kByte));
    }
    for (std::size_t r = 0; r < lines.size(); ++r) put_back(lines[r], outputs[r]);
  });
}

DirectWork direct_reduce_scatter(const DirectGroup& group, const Tensor& output,
                                 const Tensor& input, const ReduceOp& op, Milliseconds timeout) {
  const bool fits = reduces(input, op) && output.is_xpu() &&
                    output.get_device() == input.get_device() &&
                    output.scalar_type() == input.scalar_type() &&
                    output.numel() * group->getSize() == input.numel();
  Direct* d = fits ? direct_of(group, input) : nullptr;
  if (d == nullptr) return {};
  return d->start(OpType::_REDUCE_SCATTER_BASE, {output}, timeout, [d, output, input, op = op.op_] {
    const Tensor line = flat(output), parts = flat(input);
    const std::int64_t each = line.numel(), room = d->room(line) / d->size();
    for (std::int64_t at = 0; at < each; at += room) {
      const std::int64_t n = std::min(room, each - at);
      const int half = d->next_half();
      // What a process has of another one's part.
      const auto memory = [&](int rank, int part) {
        return d->memory(rank, half, n * d->size(), line.scalar_type()).narrow(0, part * n, n);
      };
      for (int r = 0; r < d->size(); ++r)
        memory(d->rank(), r).copy_(parts.narrow(0, r * each + at, n));
      d->meet();
      const Tensor sum = line.narrow(0, at, n);
      sum.copy_(memory(0, d->rank()));
      for (int r = 1; r < d->size(); ++r) combine(sum, memory(r, d->rank()), op);
      if (op == ReduceOp::AVG) divide_sum(sum, d->size());
    }
    put_back(line, output);
  });
}

}  // namespace ipex::xpu
