// SPDX-License-Identifier: Apache-2.0
#include "runtime/topology.h"

#include <sched.h>

#include <cstdio>
#include <string>
#include <vector>

namespace ipex::cpu {
namespace {

struct Topology {
  std::vector<int> core_of;  // by CPU; -1 unknown
  bool shared = false;
};

// The first CPU of a list such as "3,67" or "0-1"; -1 if it is unknown.
int first_sibling(int cpu) {
  const std::string path =
      "/sys/devices/system/cpu/cpu" + std::to_string(cpu) + "/topology/thread_siblings_list";
  std::FILE* file = std::fopen(path.c_str(), "re");
  if (!file) return -1;
  int first = -1;
  if (std::fscanf(file, "%d", &first) != 1) first = -1;
  std::fclose(file);
  return first;
}

Topology read_topology() {
  Topology t;
  // Numbers can have gaps where CPUs are offline, but the file system ends somewhere.
  for (int cpu = 0, missing = 0; cpu < kMaxCores && missing < 64; ++cpu) {
    const int first = first_sibling(cpu);
    t.core_of.push_back(first < kMaxCores ? first : -1);
    missing = first < 0 ? missing + 1 : 0;
    if (first >= 0 && first != cpu) t.shared = true;
  }
  return t;
}

const Topology& topology() {
  static const Topology t = read_topology();
  return t;
}

}  // namespace

bool has_shared_cores() { return topology().shared; }

int current_core() noexcept {
  const int cpu = sched_getcpu();
  const Topology& t = topology();
  return cpu >= 0 && cpu < static_cast<int>(t.core_of.size()) ? t.core_of[static_cast<size_t>(cpu)]
                                                              : -1;
}

}  // namespace ipex::cpu
