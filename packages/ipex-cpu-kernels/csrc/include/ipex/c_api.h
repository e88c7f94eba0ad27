// SPDX-License-Identifier: Apache-2.0
// The C functions of libipex_cpu.so: which instruction sets there are, which one is used, and the
// kernels themselves. C and C++; needs neither torch nor Python. Strings belong to the library and
// stay valid until the next call on the same thread. Where a function can fail, the string begins
// with "!" and the message follows.
#pragma once

#include <stdint.h>

#include "ipex/kernel_api.h"

#define IPEX_C_FUNCTION __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

// The version of the contract, IPEX_KERNEL_API_VERSION, that the library was built for.
IPEX_C_FUNCTION int ipex_cpu_kernel_api(void);

// The ISA levels of this build, and those that this machine can run: names, lowest first, with
// commas between them.
IPEX_C_FUNCTION const char* ipex_cpu_levels_built(void);
IPEX_C_FUNCTION const char* ipex_cpu_levels_available(void);

// The level in use; why one cannot be used, "" if it can; sets it for the whole process ("" is the
// best one).
IPEX_C_FUNCTION const char* ipex_cpu_level(void);
IPEX_C_FUNCTION const char* ipex_cpu_why_unavailable(const char* level);
IPEX_C_FUNCTION const char* ipex_cpu_set_level(const char* level);

// The address of a kernel at the level in use, for instance of "ipex_k_rms_norm_bf16", or null if
// no kernel has this name. ipex/ops/<op>/<op>.h declare what they take. Ask again after
// ipex_cpu_set_level.
IPEX_C_FUNCTION void* ipex_cpu_find_kernel(const char* symbol);

// All kernels of an op, or of all with "": a line "op symbol level available,available" for each.
IPEX_C_FUNCTION const char* ipex_cpu_kernels(const char* op);

// Names of all ops with kernels, with commas between them.
IPEX_C_FUNCTION const char* ipex_cpu_ops(void);

// A line "name" for each CPU feature that can be used, "-name: reason" for each other.
IPEX_C_FUNCTION const char* ipex_cpu_features(void);

// Registers an op of another library with torch, for instance "rotary_embedding" of "_C", which
// nothing else may have defined. Its name, or "" if there is no such op.
IPEX_C_FUNCTION const char* ipex_cpu_define(const char* library, const char* name);

// Whether packed weights may lie in huge pages (they may, until told otherwise), and the bytes they
// take.
IPEX_C_FUNCTION void ipex_cpu_enable_huge_pages(int enabled);
IPEX_C_FUNCTION int64_t ipex_cpu_arena_bytes(void);

#ifdef __cplusplus
}
#endif
