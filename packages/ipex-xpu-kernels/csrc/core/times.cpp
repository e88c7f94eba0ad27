// SPDX-License-Identifier: Apache-2.0
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <limits>
#include <map>
#include <mutex>
#include <stdexcept>
#include <tuple>
#include <utility>

#include "core.h"

namespace ipex::xpu {
namespace {

namespace profiling = sycl::info::event_profiling;

struct Timed {
  std::string name;
  sycl::event event;
};

struct Profiled {
  ProfiledWork work;
  sycl::queue queue;
  sycl::event event;
};

// Who wants times.
constexpr int kTimes = 1;
constexpr int kProfile = 2;
std::atomic<int> wanted{0};
std::mutex mutex;

// These outlive the exit.
std::vector<Timed>& timed() {
  static auto* kept = new std::vector<Timed>;
  return *kept;
}
std::vector<Profiled>& profiled() {
  static auto* kept = new std::vector<Profiled>;
  return *kept;
}

thread_local std::vector<std::uint64_t> ops;
thread_local std::vector<std::uint64_t> annotations;

void pop(std::vector<std::uint64_t>& ids) {
  // A profile may begin within an op, whose end is then told alone.
  if (!ids.empty()) ids.pop_back();
}

// What to add to times of a device to get times of the host. A device notes its time while
// something is submitted, so that each submission bounds the sum from both sides.
class Clock {
 public:
  void see(std::int64_t device_time, const ProfiledWork& work) {
    least_ = std::max(least_, work.submit_begin - device_time);
    most_ = std::min(most_, work.submit_end - device_time);
  }
  std::int64_t offset() const { return least_ + (most_ - least_) / 2; }

 private:
  std::int64_t least_ = std::numeric_limits<std::int64_t>::min();
  std::int64_t most_ = std::numeric_limits<std::int64_t>::max();
};

template <typename Info>
std::int64_t time_of(const sycl::event& event) {
  return static_cast<std::int64_t>(event.get_profiling_info<Info>());
}

const char* copy_name(const sycl::queue& q, const void* to, const void* from) {
  const sycl::context context = q.get_context();
  const bool to_device = sycl::get_pointer_type(to, context) == sycl::usm::alloc::device;
  const bool from_device = sycl::get_pointer_type(from, context) == sycl::usm::alloc::device;
  if (to_device) return from_device ? "Memcpy DtoD" : "Memcpy HtoD";
  return from_device ? "Memcpy DtoH" : "Memcpy HtoH";
}

}  // namespace

bool keeps_times() { return wanted.load(std::memory_order_relaxed) != 0; }

std::int64_t host_time() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::system_clock::now().time_since_epoch())
      .count();
}

void keep_time(const sycl::queue& q, std::string_view name, Work kind, std::int64_t begin,
               const sycl::event& event) {
  const std::int64_t end = host_time();
  const std::lock_guard lock(mutex);
  if ((wanted & kTimes) != 0 && kind == Work::Kernel) timed().push_back({std::string(name), event});
  if ((wanted & kProfile) != 0) {
    ProfiledWork work;
    work.name = name;
    work.kind = kind;
    work.submit_begin = begin;
    work.submit_end = end;
    work.thread = static_cast<int>(syscall(SYS_gettid));
    work.op = ops.empty() ? 0 : ops.back();
    work.annotations = annotations;
    profiled().push_back({std::move(work), q, event});
  }
}

void start_kernel_times() {
  const std::lock_guard lock(mutex);
  timed().clear();
  wanted |= kTimes;
}

std::vector<KernelTime> stop_kernel_times() {
  std::vector<Timed> kept;
  {
    const std::lock_guard lock(mutex);
    wanted &= ~kTimes;
    kept.swap(timed());
  }
  std::vector<KernelTime> times;
  times.reserve(kept.size());
  try {
    for (auto& [name, event] : kept) {
      event.wait();
      times.push_back({std::move(name), event.get_profiling_info<profiling::command_start>(),
                       event.get_profiling_info<profiling::command_end>()});
    }
  } catch (const sycl::exception& e) {
    throw std::runtime_error(std::string("kernel_times: the queue does not measure: ") + e.what());
  }
  return times;
}

void start_profile() {
  const std::lock_guard lock(mutex);
  profiled().clear();
  wanted |= kProfile;
}

std::vector<ProfiledWork> stop_profile() {
  std::vector<Profiled> kept;
  {
    const std::lock_guard lock(mutex);
    wanted &= ~kProfile;
    kept.swap(profiled());
  }
  std::vector<ProfiledWork> works;
  works.reserve(kept.size());
  std::map<int, Clock> clocks;
  try {
    for (Profiled& one : kept) {
      one.event.wait();
      ProfiledWork& work = one.work;
      std::tie(work.device, work.stream) = place_of(one.queue);
      work.begin = time_of<profiling::command_start>(one.event);
      work.end = time_of<profiling::command_end>(one.event);
      clocks[work.device].see(time_of<profiling::command_submit>(one.event), work);
      works.push_back(std::move(work));
    }
  } catch (const sycl::exception& e) {
    throw std::runtime_error(std::string("profile: a queue does not measure: ") + e.what());
  }
  for (ProfiledWork& work : works) {
    const std::int64_t offset = clocks[work.device].offset();
    work.begin += offset;
    work.end += offset;
  }
  return works;
}

void push_op(std::uint64_t id) { ops.push_back(id); }
void pop_op() { pop(ops); }
void push_annotation(std::uint64_t id) { annotations.push_back(id); }
void pop_annotation() { pop(annotations); }

sycl::event submit_copy(sycl::queue& q, void* to, const void* from, std::size_t bytes) {
  if (!keeps_times()) return q.memcpy(to, from, bytes);
  const std::int64_t begin = host_time();
  sycl::event event = q.memcpy(to, from, bytes);
  keep_time(q, copy_name(q, to, from), Work::Copy, begin, event);
  return event;
}

sycl::event submit_fill(sycl::queue& q, void* to, int value, std::size_t bytes) {
  if (!keeps_times()) return q.memset(to, value, bytes);
  const std::int64_t begin = host_time();
  sycl::event event = q.memset(to, value, bytes);
  keep_time(q, "Memset (Device)", Work::Fill, begin, event);
  return event;
}

}  // namespace ipex::xpu
