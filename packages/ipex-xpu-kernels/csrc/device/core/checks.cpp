// SPDX-License-Identifier: Apache-2.0
// Checks of what only the device can read, and with them the offsets of indices.
#include "device/core/ipex_ops.h"

namespace ipex::xpu {
namespace {

using at::Tensor;
using std::optional;

// Flags of the last op that was checked, on devices whose flags are looked at late.
struct Raised {
  Tensor flags;
  DeviceCheck check;
};
Raised& last_of(c10::DeviceIndex device) {
  // Never destroyed: the device may be gone by then.
  thread_local auto* all = new std::vector<Raised>;
  if (all->size() <= static_cast<std::size_t>(device)) all->resize(device + 1u);
  return (*all)[static_cast<std::size_t>(device)];
}

// What is wrong.
optional<std::string> complaint(const Tensor& flags, const DeviceCheck& check) {
  const Tensor host = to_host(flags);
  const auto* values = host.const_data_ptr<std::int64_t>();
  for (std::size_t i = 0; i < check.flags; ++i) {
    if (values[i] != 0) return check.message(i, values[i]);
  }
  return std::nullopt;
}

[[noreturn]] void raise(const std::string& text, bool is_index) {
  TORCH_CHECK_INDEX(!is_index, text);
  TORCH_CHECK(false, text);
}

optional<std::string> find_wrong(const Tensor& like, DeviceCheck check) {
  const auto device = static_cast<c10::DeviceIndex>(like.get_device());
  Raised& last = last_of(device);
  if (last.flags.defined()) {
    const Raised before = std::exchange(last, {});
    const auto wrong = complaint(before.flags, before.check);
    if (wrong) raise(*wrong + " (of an op that was started before)", before.check.is_index);
  }
  const Tensor flags =
      at::zeros({static_cast<std::int64_t>(check.flags)}, like.options().dtype(at::kLong));
  check.check(out_data(flags));
  if (host_readable(device)) return complaint(flags, check);
  check.check = nullptr;
  last = {flags, std::move(check)};
  return std::nullopt;
}

}  // namespace

void check_on_device(const Tensor& like, DeviceCheck check) {
  const bool is_index = check.is_index;
  if (const auto wrong = find_wrong(like, std::move(check))) raise(*wrong, is_index);
}

bool in_bounds(const Tensor& like, DeviceCheck check) {
  const bool is_index = check.is_index;
  const auto wrong = find_wrong(like, std::move(check));
  if (wrong && fallback_mode() == FallbackMode::Error) raise(*wrong, is_index);
  return !wrong;
}

namespace {

Tensor checked_offsets(const std::vector<Indexed>& parts, bool wrap, long skipped,
                       DeviceCheck bounds) {
  const Tensor& like = parts.front().index;
  const Tensor result = at::empty(like.sizes(), like.options().dtype(at::kLong));
  if (like.numel() == 0) return result;
  bounds.flags = parts.size();
  bounds.check = [&](void* flags) {
    auto* flag = static_cast<long*>(flags);
    bool first = true;
    for (const Indexed& part : parts) {
      const Tensor dense = part.index.contiguous();
      launch_for(like, dense.scalar_type() == at::kInt ? "offsets<int>" : "offsets<long>",
                 like.numel(), out_data(result), data(dense), ulong(like.numel()),
                 static_cast<long>(part.size), static_cast<long>(part.stride), skipped,
                 first ? 1 : 0, wrap ? 1 : 0, static_cast<void*>(flag++));
      first = false;
    }
  };
  check_on_device(like, std::move(bounds));
  return result;
}
std::int64_t wrong_index(std::int64_t flag) { return flag == kNoIndex ? 0 : flag; }

}  // namespace

Tensor offsets_of(const char* op, const std::vector<Indexed>& parts, bool wrap, long skipped) {
  DeviceCheck bounds;
  std::vector<std::pair<std::int64_t, std::int64_t>> dims;
  for (const Indexed& part : parts) dims.emplace_back(part.dim, part.size);
  bounds.message = [op, dims](std::size_t which, std::int64_t value) {
    return c10::str(op, ": index ", wrong_index(value), " is out of bounds for dimension ",
                    dims[which].first, " with size ", dims[which].second);
  };
  return checked_offsets(parts, wrap, skipped, std::move(bounds));
}

Tensor offsets_of(const char* op, const char* argument, const Indexed& part) {
  DeviceCheck bounds;
  bounds.is_index = false;
  bounds.message = [=, size = part.size](std::size_t, std::int64_t value) {
    return c10::str(op, ": ", argument, " must hold rows in [0, ", size, "), got ",
                    wrong_index(value));
  };
  return checked_offsets({part}, false, kNoIndex, std::move(bounds));
}

}  // namespace ipex::xpu
