// SPDX-License-Identifier: Apache-2.0
// Finds the kernel of the best eligible level for a symbol.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace ipex::cpu {

// Names of the levels in this build / usable on this machine / the active one. Lowest first.
std::vector<std::string> levels_built();
std::vector<std::string> levels_available();
std::string active_level();
bool active_has_amx();
bool active_has_avx512();
bool active_has_avx512_bf16();

// Why a level cannot be used here; "" if it can.
std::string why_unavailable(const std::string& level);

// Makes `level` the highest one that kernels come from; "" means the best available. Returns an
// error text or "".
std::string set_level(const std::string& level);

// Changes with every successful set_level; cached kernel pointers of an older epoch are resolved
// again.
uint64_t epoch();

struct Resolved {
  void* function = nullptr;
  std::string level;
};

// The kernel named `symbol` at the active level, or at the next lower eligible one that has it.
// Throws std::runtime_error if no eligible level exports it or a module cannot be loaded.
Resolved resolve(const char* symbol);

// Eligible levels that export `symbol`, lowest first. Loads their modules: for introspection only.
std::vector<std::string> levels_with(const char* symbol);

}  // namespace ipex::cpu
