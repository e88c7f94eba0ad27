// SPDX-License-Identifier: Apache-2.0
#include "runtime/cpu_features.h"

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace ipex::cpu {
namespace {

struct Cpuid {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
};

Cpuid cpuid(unsigned leaf, unsigned subleaf) {
  Cpuid r;
  if (!__get_cpuid_count(leaf, subleaf, &r.eax, &r.ebx, &r.ecx, &r.edx)) return Cpuid{};
  return r;
}

bool bit(unsigned word, int index) { return (word >> index) & 1u; }

// Register state the operating system saves at a context switch (XCR0); 0 if it does not use XSAVE.
uint64_t saved_state() {
  if (!bit(cpuid(1, 0).ecx, 27)) return 0;
  unsigned low, high;
  // Written out because the intrinsic needs -mxsave, which baseline code must not be built with.
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (uint64_t{high} << 32) | low;
}

// Linux hands out AMX tile data per process and only on request.
bool request_amx_permission() {
  constexpr long kArchReqXcompPerm = 0x1023;
  constexpr long kXfeatureXtileData = 18;
  return syscall(SYS_arch_prctl, kArchReqXcompPerm, kXfeatureXtileData) == 0;
}

struct Detected {
  uint64_t on_cpu = 0;    // the CPU reports it
  uint64_t os_saves = 0;  // the operating system saves its registers
  bool amx_granted = false;
};

Detected detect() {
  Detected d;
  const Cpuid leaf1 = cpuid(1, 0), leaf7 = cpuid(7, 0), leaf7_1 = cpuid(7, 1);
  const bool avx2 = bit(leaf7.ebx, 5) && bit(leaf1.ecx, 12) && bit(leaf1.ecx, 29);
  if (avx2) d.on_cpu |= kAvx2;
  if (bit(leaf7_1.eax, 4)) d.on_cpu |= kAvxVnni;
  const bool avx512 = bit(leaf7.ebx, 16) && bit(leaf7.ebx, 17) && bit(leaf7.ebx, 28) &&
                      bit(leaf7.ebx, 30) && bit(leaf7.ebx, 31);
  if (avx512) d.on_cpu |= kAvx512;
  if (bit(leaf7.ecx, 11)) d.on_cpu |= kAvx512Vnni;
  if (bit(leaf7_1.eax, 5)) d.on_cpu |= kAvx512Bf16;
  if (bit(leaf7.edx, 22) && bit(leaf7.edx, 24) && bit(leaf7.edx, 25)) d.on_cpu |= kAmx;
  if (bit(leaf7.edx, 23)) d.on_cpu |= kAvx512Fp16;

  constexpr uint64_t kYmm = 0x6, kZmm = 0xe6, kTile = 0x60000;
  const uint64_t state = saved_state();
  if ((state & kYmm) == kYmm) d.os_saves |= kAvx2 | kAvxVnni;
  if ((state & kZmm) == kZmm) d.os_saves |= kAvx512 | kAvx512Vnni | kAvx512Bf16 | kAvx512Fp16;
  if ((state & kTile) == kTile) d.os_saves |= kAmx;
  if (d.on_cpu & d.os_saves & kAmx) d.amx_granted = request_amx_permission();
  return d;
}

const Detected& detected() {
  static const Detected d = detect();
  return d;
}

}  // namespace

uint64_t usable_features() {
  const Detected& d = detected();
  uint64_t usable = d.on_cpu & d.os_saves;
  if (!d.amx_granted) usable &= ~uint64_t{kAmx};
  return usable;
}

std::string why_unusable(Feature feature) {
  const Detected& d = detected();
  const std::string name = feature_name(feature);
  if (!(d.on_cpu & feature)) return "the CPU lacks " + name;
  if (!(d.os_saves & feature)) return "the operating system does not save the registers of " + name;
  if (feature == kAmx && !d.amx_granted)
    return "the operating system refused the permission for " + name;
  return "";
}

const char* feature_name(Feature feature) {
  switch (feature) {
    case kAvx2:
      return "avx2+fma+f16c";
    case kAvxVnni:
      return "avx_vnni";
    case kAvx512:
      return "avx512 f+bw+vl+dq+cd";
    case kAvx512Vnni:
      return "avx512_vnni";
    case kAvx512Bf16:
      return "avx512_bf16";
    case kAmx:
      return "amx tile+int8+bf16";
    case kAvx512Fp16:
      return "avx512_fp16";
  }
  return "?";
}

}  // namespace ipex::cpu
