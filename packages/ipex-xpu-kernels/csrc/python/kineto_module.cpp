// SPDX-License-Identifier: Apache-2.0
// The Python module `ipex_xpu_kernels._kineto`: kernels of the device in the profiles of
// torch.profiler. A module of its own, so that a torch without these symbols of kineto loses no
// more than them.
#include <libkineto.h>
#include <output_base.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/core.h"

namespace py = pybind11;
namespace ipex::xpu {
namespace {

using libkineto::ActivityType;
using libkineto::GenericTraceActivity;
using libkineto::ITraceActivity;

// Numbers of ops begin at 1; the ones of what they started must not be among them.
constexpr std::int32_t kFirstId = 1 << 30;
constexpr const char* kSubmit = "SYCL submit";

ActivityType type_of(Work kind) {
  switch (kind) {
    case Work::Copy:
      return ActivityType::GPU_MEMCPY;
    case Work::Fill:
      return ActivityType::GPU_MEMSET;
    default:
      return ActivityType::CONCURRENT_KERNEL;
  }
}

const std::set<ActivityType>& device_types() {
  static const std::set<ActivityType> types{ActivityType::CONCURRENT_KERNEL,
                                            ActivityType::GPU_MEMCPY, ActivityType::GPU_MEMSET,
                                            ActivityType::GPU_USER_ANNOTATION};
  return types;
}

std::unique_ptr<libkineto::DeviceInfo> device_label(int device) {
  return std::unique_ptr<libkineto::DeviceInfo>(
      new libkineto::DeviceInfo{device, device + libkineto::kExceedMaxPid, device_info(device).name,
                                "XPU " + std::to_string(device)});
}

// One profile, from its start to its trace.
class Session final : public libkineto::IActivityProfilerSession {
 public:
  explicit Session(std::set<ActivityType> types) : types_(std::move(types)) {}
  ~Session() override {
    if (status_ == libkineto::TraceStatus::RECORDING) drop();
  }

  void start() override {
    start_profile();
    status_ = libkineto::TraceStatus::RECORDING;
  }

  // An exception would leave torch's profiler open for ever.
  void stop() override {
    status_ = libkineto::TraceStatus::PROCESSING;
    try {
      works_ = stop_profile();
    } catch (const std::exception& e) {
      errors_.emplace_back(e.what());
      status_ = libkineto::TraceStatus::ERROR;
    }
  }

  std::vector<std::string> errors() override { return errors_; }

  void processTrace(libkineto::ActivityLogger& logger) override {
    processTrace(logger, [](std::int32_t) { return nullptr; }, 0, 0);
  }

  void processTrace(libkineto::ActivityLogger& logger, libkineto::getLinkedActivityCallback linked,
                    std::int64_t start, std::int64_t end) override {
    buffer_ = std::make_unique<libkineto::CpuTraceBuffer>();
    buffer_->span = libkineto::TraceSpan(start, end, "xpu");
    buffer_->gpuOpCount = static_cast<int>(works_.size());
    const auto find = [&linked](std::uint64_t id) -> const ITraceActivity* {
      return id == 0 ? nullptr : linked(static_cast<std::int32_t>(id));
    };
    std::int32_t id = kFirstId;
    for (const ProfiledWork& work : works_) {
      const ITraceActivity* op = find(work.op);
      add_submit(work, op, id);
      add_work(work, op, id);
      places_.emplace(work.device, work.stream);
      ++id;
    }
    if (types_.count(ActivityType::GPU_USER_ANNOTATION) != 0) add_annotations(find);
    for (const auto& one : buffer_->activities) one->log(logger);
    for (int device = 1; device < device_count(); ++device)
      logger.handleDeviceInfo(*device_label(device), start);
  }

  std::unique_ptr<libkineto::DeviceInfo> getDeviceInfo() override { return device_label(0); }

  std::vector<libkineto::ResourceInfo> getResourceInfos() override {
    std::vector<libkineto::ResourceInfo> infos;
    for (const auto& [device, stream] : places_)
      infos.push_back({stream, stream, device, "stream " + std::to_string(stream)});
    return infos;
  }

  std::unique_ptr<libkineto::CpuTraceBuffer> getTraceBuffer() override {
    return std::move(buffer_);
  }

  void pushCorrelationId(std::uint64_t id) override { push_op(id); }
  void popCorrelationId() override { pop_op(); }
  void pushUserCorrelationId(std::uint64_t id) override { push_annotation(id); }
  void popUserCorrelationId() override { pop_annotation(); }

 private:
  static void drop() noexcept {
    try {
      stop_profile();
    } catch (const std::exception&) {
      // What was measured will not be read.
    }
  }

  GenericTraceActivity& add(ActivityType type, const std::string& name, std::int64_t begin,
                            std::int64_t end) {
    buffer_->emplace_activity(buffer_->span, type, name);
    GenericTraceActivity& added = *buffer_->activities.back();
    added.startTime = begin;
    added.endTime = end;
    return added;
  }

  // The call on the host, from which an arrow leads to what it started.
  void add_submit(const ProfiledWork& work, const ITraceActivity* op, std::int32_t id) {
    if (types_.count(ActivityType::XPU_RUNTIME) == 0) return;
    auto& call = add(ActivityType::XPU_RUNTIME, kSubmit, work.submit_begin, work.submit_end);
    call.id = id;
    call.device = libkineto::processId();
    call.resource = work.thread;
    call.threadId = work.thread;
    call.linked = op;
    call.flow.id = static_cast<std::uint32_t>(id);
    call.flow.type = libkineto::kLinkAsyncCpuGpu;
    call.flow.start = 1;
  }

  void add_work(const ProfiledWork& work, const ITraceActivity* op, std::int32_t id) {
    if (types_.count(type_of(work.kind)) == 0) return;
    auto& done = add(type_of(work.kind), work.name, work.begin, work.end);
    done.id = id;
    done.device = work.device;
    done.resource = work.stream;
    done.linked = op;
    done.flow.id = static_cast<std::uint32_t>(id);
    done.flow.type = libkineto::kLinkAsyncCpuGpu;
    done.flow.start = 0;
    done.addMetadata("device", work.device);
    done.addMetadata("stream", work.stream);
    done.addMetadata("correlation", id);
  }

  // What record_function names, on the device: from the first to the last work within it.
  template <typename Find>
  void add_annotations(const Find& find) {
    std::map<std::pair<std::pair<int, int>, std::uint64_t>, std::pair<std::int64_t, std::int64_t>>
        spans;
    for (const ProfiledWork& work : works_) {
      for (const std::uint64_t one : work.annotations) {
        const auto [at, added] =
            spans.try_emplace({{work.device, work.stream}, one}, std::pair(work.begin, work.end));
        if (!added) {
          at->second.first = std::min(at->second.first, work.begin);
          at->second.second = std::max(at->second.second, work.end);
        }
      }
    }
    for (const auto& [key, span] : spans) {
      const ITraceActivity* named = find(key.second);
      if (named == nullptr) continue;
      auto& added = add(ActivityType::GPU_USER_ANNOTATION, named->name(), span.first, span.second);
      added.id = static_cast<std::int32_t>(key.second);
      added.device = key.first.first;
      added.resource = key.first.second;
    }
  }

  std::set<ActivityType> types_;
  std::vector<std::string> errors_;
  std::vector<ProfiledWork> works_;
  std::set<std::pair<int, int>> places_;
  std::unique_ptr<libkineto::CpuTraceBuffer> buffer_;
};

class Profiler final : public libkineto::IActivityProfiler {
 public:
  const std::string& name() const override {
    static const std::string name = "ipex_xpu";
    return name;
  }
  const std::set<ActivityType>& availableActivities() const override { return device_types(); }

  // No session where a profile asks for nothing of a device.
  std::unique_ptr<libkineto::IActivityProfilerSession> configure(
      const std::set<ActivityType>& types, const libkineto::Config&) override {
    const bool asked = std::any_of(types.begin(), types.end(), [](ActivityType type) {
      return device_types().count(type) != 0;
    });
    return asked ? std::make_unique<Session>(types) : nullptr;
  }
  std::unique_ptr<libkineto::IActivityProfilerSession> configure(
      std::int64_t, std::int64_t, const std::set<ActivityType>& types,
      const libkineto::Config& config) override {
    return configure(types, config);
  }
};

}  // namespace

PYBIND11_MODULE(_kineto, m) {
  m.def("attach", [] {
    libkineto::api().registerProfilerFactory([] { return std::make_unique<Profiler>(); });
  });
}

}  // namespace ipex::xpu
