// SPDX-License-Identifier: Apache-2.0
// Random numbers: one seed for the Philox streams of kernels and for the host generator of ops
// without a kernel.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Functions.h>
#include <ATen/Utils.h>
#include <c10/core/GeneratorImpl.h>

#include <cstring>
#include <deque>
#include <mutex>

#include "core/core.h"
#include "device/core/runtime.h"

namespace ipex::xpu {
namespace {

using c10::Device;
using c10::DeviceIndex;

class XpuGenerator final : public c10::GeneratorImpl {
 public:
  explicit XpuGenerator(DeviceIndex device, std::uint64_t seed = c10::default_rng_seed_val)
      : c10::GeneratorImpl(Device(c10::kXPU, device), c10::DispatchKeySet(c10::DispatchKey::XPU)),
        seed_(seed),
        host_(at::detail::createCPUGenerator(seed)) {}

  static c10::DeviceType device_type() { return c10::kXPU; }

  void set_current_seed(std::uint64_t seed) override {
    seed_ = seed;
    offset_ = 0;
    host_.set_current_seed(seed);
  }
  std::uint64_t current_seed() const override { return seed_; }
  std::uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_;
  }
  void set_offset(std::uint64_t offset) override { offset_ = offset; }
  std::uint64_t get_offset() const override { return offset_; }

  // Seed and offset (8 bytes each, as other devices have them), then the state of the host
  // generator.
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    const at::Tensor host = host_.get_state();
    at::Tensor state =
        at::empty({kPrefix + host.numel()}, at::TensorOptions(at::kByte).device(at::kCPU));
    auto* bytes = state.mutable_data_ptr<std::uint8_t>();
    std::memcpy(bytes, &seed_, sizeof seed_);
    std::memcpy(bytes + sizeof seed_, &offset_, sizeof offset_);
    std::memcpy(bytes + kPrefix, host.const_data_ptr<std::uint8_t>(),
                static_cast<std::size_t>(host.numel()));
    return state.getIntrusivePtr();
  }
  void set_state(const c10::TensorImpl& state) override {
    at::detail::check_rng_state(state);
    const at::Tensor size_of = host_.get_state();
    const std::int64_t full = kPrefix + size_of.numel();
    TORCH_CHECK_VALUE(state.numel() == full || state.numel() == kPrefix,
                      "set_rng_state: new_state must have ", full, " or ", kPrefix, " bytes, got ",
                      state.numel());
    const auto* bytes = state.data_dtype_initialized<std::uint8_t>();
    std::uint64_t seed = 0;
    std::memcpy(&seed, bytes, sizeof seed);
    set_current_seed(seed);
    std::memcpy(&offset_, bytes + sizeof seed, sizeof offset_);
    if (state.numel() == full) {
      at::Tensor host = at::empty({size_of.numel()}, size_of.options());
      std::memcpy(host.mutable_data_ptr<std::uint8_t>(), bytes + kPrefix,
                  static_cast<std::size_t>(host.numel()));
      host_.set_state(host);
    }
  }

  const at::Generator& host() const { return host_; }
  std::uint64_t take(std::uint64_t count) {
    const std::uint64_t before = offset_;
    offset_ += (count + 3) / 4 * 4;  // a Philox round makes four numbers
    return before;
  }

 private:
  static constexpr std::int64_t kPrefix = 16;

  XpuGenerator* clone_impl() const override {
    auto* copy = new XpuGenerator(device().index(), seed_);
    copy->offset_ = offset_;
    copy->host_ = host_.clone();
    return copy;
  }

  std::uint64_t seed_;
  std::uint64_t offset_ = 0;
  at::Generator host_;
};

XpuGenerator& implementation(const at::Generator& generator) {
  TORCH_CHECK_VALUE(generator.device().type() == c10::kXPU, "xpu: generator must be on xpu, got ",
                    generator.device());
  return *static_cast<XpuGenerator*>(generator.unsafeGetGeneratorImpl());
}

}  // namespace

const at::Generator& default_generator(DeviceIndex device) {
  static auto* all = [] {
    auto* made = new std::deque<at::Generator>;
    for (int i = 0; i < device_count(); ++i)
      made->push_back(at::make_generator<XpuGenerator>(static_cast<DeviceIndex>(i)));
    return made;
  }();
  if (device < 0) device = current_device();
  check_device(device);
  return (*all)[static_cast<std::size_t>(device)];
}

at::Generator make_generator(DeviceIndex device) {
  if (device < 0) device = current_device();
  check_device(device);
  return at::make_generator<XpuGenerator>(device);
}

at::Generator host_generator(const at::Generator& generator) {
  return implementation(generator).host();
}

std::pair<std::uint64_t, std::uint64_t> next_philox(const at::Generator& generator,
                                                    std::uint64_t count) {
  XpuGenerator& impl = implementation(generator);
  const std::lock_guard lock(impl.mutex_);
  return {impl.current_seed(), impl.take(count)};
}

}  // namespace ipex::xpu
