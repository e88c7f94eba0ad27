// SPDX-License-Identifier: Apache-2.0
#include "ipex/glue/op_table.h"

#include <unordered_map>

namespace ipex::program {
namespace {

// Filled by static initializers, in any order; only read afterwards.
std::unordered_map<std::string, Entry>& table() {
  static std::unordered_map<std::string, Entry> entries;
  return entries;
}

}  // namespace

void add(const char* name, Entry entry) { table().insert_or_assign(name, std::move(entry)); }

const Entry* find(const std::string& name) {
  const auto found = table().find(name);
  return found == table().end() ? nullptr : &found->second;
}

}  // namespace ipex::program
