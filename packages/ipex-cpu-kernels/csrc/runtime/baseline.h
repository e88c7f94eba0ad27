// SPDX-License-Identifier: Apache-2.0
// Included before each source file of libipex_cpu.so (CMakeLists.txt): the versions of glibc's
// functions that manylinux_2_28 has. The newest ones, which the linker would take, differ in how
// errors are reported or in the library they lie in. baseline.cpp has what no version can be chosen
// for.
#pragma once

#if defined(__linux__) && defined(__x86_64__)
__asm__(".symver dlopen,dlopen@GLIBC_2.2.5");
__asm__(".symver dlsym,dlsym@GLIBC_2.2.5");
__asm__(".symver dlerror,dlerror@GLIBC_2.2.5");
__asm__(".symver dladdr,dladdr@GLIBC_2.2.5");
__asm__(".symver exp,exp@GLIBC_2.2.5");
__asm__(".symver log,log@GLIBC_2.2.5");
__asm__(".symver pow,pow@GLIBC_2.2.5");
#endif
