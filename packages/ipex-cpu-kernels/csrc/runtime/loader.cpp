// SPDX-License-Identifier: Apache-2.0
#include "runtime/loader.h"

#include <dlfcn.h>

#include <atomic>
#include <mutex>
#include <stdexcept>

#include "runtime/cpu_features.h"

namespace ipex::cpu {
namespace {

struct Level {
  const char* name;
  uint64_t features;
};

constexpr Level kLevels[] = {
#include "isa_levels.inc"
};
constexpr int kCount = static_cast<int>(sizeof(kLevels) / sizeof(kLevels[0]));

std::mutex mutex;
void* modules[kCount] = {};
int active = -1;  // -1: not chosen yet
std::atomic<uint64_t> current_epoch{1};

bool eligible(int i) { return (kLevels[i].features & ~usable_features()) == 0; }

int best() {
  for (int i = kCount - 1; i >= 0; --i)
    if (eligible(i)) return i;
  throw std::runtime_error("ipex-cpu-kernels: this build has no ISA level that the CPU can run");
}

int active_index() {
  if (active < 0) active = best();
  return active;
}

int find(const std::string& name) {
  for (int i = 0; i < kCount; ++i)
    if (name == kLevels[i].name) return i;
  return -1;
}

std::string module_path(int i) {
  // The modules lie beside this library; their place is not known before it is installed.
  Dl_info info;
  if (!dladdr(reinterpret_cast<void*>(&module_path), &info) || !info.dli_fname)
    throw std::runtime_error("ipex-cpu-kernels: cannot find the path of libipex_cpu.so");
  const std::string self = info.dli_fname;
  return self.substr(0, self.rfind('/') + 1) + "libipex_cpu_" + kLevels[i].name + ".so";
}

// Only eligible modules are ever opened: nothing of a module for a newer CPU may run here.
void* module(int i) {
  if (!modules[i]) {
    modules[i] = dlopen(module_path(i).c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!modules[i]) throw std::runtime_error(std::string("ipex-cpu-kernels: ") + dlerror());
  }
  return modules[i];
}

}  // namespace

std::vector<std::string> levels_built() {
  std::vector<std::string> names;
  for (const Level& level : kLevels) names.emplace_back(level.name);
  return names;
}

std::vector<std::string> levels_available() {
  std::vector<std::string> names;
  for (int i = 0; i < kCount; ++i)
    if (eligible(i)) names.emplace_back(kLevels[i].name);
  return names;
}

std::string active_level() {
  std::lock_guard lock(mutex);
  return kLevels[active_index()].name;
}

namespace {
bool active_has(Feature feature) {
  std::lock_guard lock(mutex);
  return (kLevels[active_index()].features & feature) != 0;
}
}  // namespace

bool active_has_amx() { return active_has(kAmx); }
bool active_has_avx512() { return active_has(kAvx512); }
bool active_has_avx512_bf16() { return active_has(kAvx512Bf16); }

std::string why_unavailable(const std::string& level) {
  const int i = find(level);
  if (i < 0) return "this build has no level " + level;
  std::string reasons;
  for (uint64_t bit = 1; bit <= kLevels[i].features; bit <<= 1) {
    if (!(kLevels[i].features & bit)) continue;
    const std::string reason = why_unusable(static_cast<Feature>(bit));
    if (!reason.empty()) reasons += (reasons.empty() ? "" : ", ") + reason;
  }
  return reasons;
}

std::string set_level(const std::string& level) {
  std::lock_guard lock(mutex);
  if (level.empty()) {
    active = best();
  } else {
    const std::string reason = why_unavailable(level);
    if (!reason.empty()) return "ISA level " + level + " cannot be used: " + reason;
    active = find(level);
  }
  current_epoch.fetch_add(1, std::memory_order_release);
  return "";
}

uint64_t epoch() { return current_epoch.load(std::memory_order_acquire); }

Resolved resolve(const char* symbol) {
  std::lock_guard lock(mutex);
  for (int i = active_index(); i >= 0; --i) {
    if (!eligible(i)) continue;
    if (void* function = dlsym(module(i), symbol)) return {function, kLevels[i].name};
  }
  throw std::runtime_error(std::string("ipex-cpu-kernels: no usable ISA level has the kernel ") +
                           symbol);
}

std::vector<std::string> levels_with(const char* symbol) {
  std::lock_guard lock(mutex);
  std::vector<std::string> names;
  for (int i = 0; i < kCount; ++i)
    if (eligible(i) && dlsym(module(i), symbol)) names.emplace_back(kLevels[i].name);
  return names;
}

}  // namespace ipex::cpu
