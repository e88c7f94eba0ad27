// SPDX-License-Identifier: Apache-2.0
// libipex_cpp.so: what a program without Python links or opens. It brings the kernels
// (libipex_cpu.so, which lies beside it) and the schemas of the ops, which in Python come from
// ipex_core.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <cstdio>
#include <cstdlib>

#include "cpp/int8_conv.h"
#include "ipex/c_api.h"

namespace {

constexpr const char* kSchemas[] = {
#include "cpp/schemas.inc"
};

void define_schemas() {
  // Never freed: the end of a library object would take its ops away from programs that still run.
  TorchLibraryHandle library = nullptr;
  if (aoti_torch_library_init_fragment("ipex", "libipex_cpp", 0, &library) != 0) {
    std::fprintf(stderr, "libipex_cpp: this torch cannot register ops\n");
    return;
  }
  for (const char* schema : kSchemas) {
    // Fails where ipex_core has defined the op before: then that definition is as good. A test
    // looks after the schemas themselves.
    static_cast<void>(aoti_torch_library_def(library, schema));
  }
}

// In Python ipex_core.config reads the variable, with more to choose from and an exception for what
// is impossible.
void apply_environment() {
  const char* level = std::getenv("IPEX_CPU_ISA");
  if (level == nullptr || *level == '\0') return;
  const char* error = ipex_cpu_set_level(level);
  if (*error == '!') std::fprintf(stderr, "libipex_cpp: IPEX_CPU_ISA: %s\n", error + 1);
}

__attribute__((constructor)) void load() {
  define_schemas();
  ipex::cpp::define_int8_ops();
  apply_environment();
}

}  // namespace
