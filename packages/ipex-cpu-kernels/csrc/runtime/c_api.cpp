// SPDX-License-Identifier: Apache-2.0
// The C functions of c_api.h, which the Python package calls through ctypes.
#include "ipex/c_api.h"

#include <string>
#include <string_view>

#include "ipex/glue/deferred.h"
#include "ipex/glue/dispatch.h"
#include "runtime/arena.h"
#include "runtime/cpu_features.h"
#include "runtime/loader.h"

#define IPEX_C_API extern "C" IPEX_C_FUNCTION

namespace {

const char* keep(std::string text) {
  thread_local std::string kept;
  kept = std::move(text);
  return kept.c_str();
}

std::string join(const std::vector<std::string>& items) {
  std::string text;
  for (const std::string& item : items) text += (text.empty() ? "" : ",") + item;
  return text;
}

// C functions must not throw; an error comes back as "!text".
template <class F>
const char* guarded(const F& f) {
  try {
    return keep(f());
  } catch (const std::exception& error) {
    return keep(std::string("!") + error.what());
  }
}

}  // namespace

IPEX_C_API int ipex_cpu_kernel_api() { return IPEX_KERNEL_API_VERSION; }

IPEX_C_API const char* ipex_cpu_levels_built() {
  return guarded([] { return join(ipex::cpu::levels_built()); });
}

IPEX_C_API const char* ipex_cpu_levels_available() {
  return guarded([] { return join(ipex::cpu::levels_available()); });
}

IPEX_C_API const char* ipex_cpu_level() {
  return guarded([] { return ipex::cpu::active_level(); });
}

IPEX_C_API const char* ipex_cpu_why_unavailable(const char* level) {
  return guarded([&] { return ipex::cpu::why_unavailable(level); });
}

IPEX_C_API const char* ipex_cpu_set_level(const char* level) {
  return guarded([&] {
    const std::string error = ipex::cpu::set_level(level);
    return error.empty() ? error : "!" + error;
  });
}

IPEX_C_API void* ipex_cpu_find_kernel(const char* symbol) {
  try {
    return ipex::cpu::resolve(symbol).function;
  } catch (const std::exception&) {
    return nullptr;
  }
}

IPEX_C_API const char* ipex_cpu_kernels(const char* op) {
  return guarded([&] {
    std::string text;
    const std::string wanted = op;
    for (const ipex::KernelBase* k = ipex::KernelBase::first(); k; k = k->next()) {
      if (!k->symbol() || (!wanted.empty() && wanted != k->op())) continue;
      text += std::string(k->op()) + " " + k->symbol() + " " +
              ipex::cpu::resolve(k->symbol()).level + " " +
              join(ipex::cpu::levels_with(k->symbol())) + "\n";
    }
    return text;
  });
}

// Loads no module.
IPEX_C_API const char* ipex_cpu_ops() {
  return guarded([] {
    std::string text;
    for (const ipex::KernelBase* k = ipex::KernelBase::first(); k; k = k->next())
      if (!std::string_view(k->op()).starts_with("program"))  // built-ins are no ops
        text += std::string(text.empty() ? "" : ",") + k->op();
    return text;
  });
}

IPEX_C_API const char* ipex_cpu_features() {
  return guarded([] {
    std::string text;
    for (uint64_t bit = 1; bit <= ipex::cpu::kAvx512Fp16; bit <<= 1) {
      const auto feature = static_cast<ipex::cpu::Feature>(bit);
      const std::string reason = ipex::cpu::why_unusable(feature);
      if (!reason.empty()) text += "-";
      text += ipex::cpu::feature_name(feature);
      if (!reason.empty()) text += ": " + reason;
      text += "\n";
    }
    return text;
  });
}

IPEX_C_API const char* ipex_cpu_define(const char* library, const char* name) {
  return guarded([&] { return std::string(ipex::Deferred::define(library, name) ? name : ""); });
}

IPEX_C_API void ipex_cpu_enable_huge_pages(int enabled) {
  ipex::arena::enable_huge_pages(enabled != 0);
}

IPEX_C_API int64_t ipex_cpu_arena_bytes() { return ipex::arena::mapped_bytes(); }
