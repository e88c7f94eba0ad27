// SPDX-License-Identifier: Apache-2.0
// Prints the highest ISA level that this CPU can run, and on a second line why it is no higher one.
// cmake/SelectLevels.cmake builds and runs it.
#include <cstdint>
#include <cstdio>
#include <string>

// try_run() takes one source file.
#include "runtime/cpu_features.cpp"

namespace ipex::cpu {
namespace {

struct Level {
  const char* name;
  uint64_t features;
};

constexpr Level kLevels[] = {
#include "isa_levels.inc"
};

// The first missing feature of a level, in words; "" if it has all.
std::string why_not(const Level& level) {
  for (uint64_t bit = 1; bit <= level.features; bit <<= 1)
    if (level.features & bit & ~usable_features()) return why_unusable(static_cast<Feature>(bit));
  return "";
}

}  // namespace
}  // namespace ipex::cpu

int main() {
  const char* best = "default";
  std::string reason = "no level is higher";
  for (const auto& level : ipex::cpu::kLevels) {
    const std::string missing = why_not(level);
    if (missing.empty()) {
      best = level.name;
      reason = "no level is higher";
    } else if (reason == "no level is higher") {
      reason = std::string(level.name) + ": " + missing;
    }
  }
  std::printf("%s\n%s", best, reason.c_str());
}
