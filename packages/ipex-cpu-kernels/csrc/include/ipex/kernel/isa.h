// SPDX-License-Identifier: Apache-2.0
// What the level this file is compiled for may use. Derived from the compiler's own macros, never
// set by hand, so that the flags in cmake/IsaLevels.cmake are the only switch.
#pragma once

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define IPEX_HAVE_AVX2 1
#else
#define IPEX_HAVE_AVX2 0
#endif

#if defined(__AVXVNNI__)
#define IPEX_HAVE_AVX_VNNI 1
#else
#define IPEX_HAVE_AVX_VNNI 0
#endif

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#define IPEX_HAVE_AVX512 1
#else
#define IPEX_HAVE_AVX512 0
#endif

#if defined(__AVX512VNNI__)
#define IPEX_HAVE_AVX512_VNNI 1
#else
#define IPEX_HAVE_AVX512_VNNI 0
#endif

#if defined(__AVX512BF16__)
#define IPEX_HAVE_AVX512_BF16 1
#else
#define IPEX_HAVE_AVX512_BF16 0
#endif

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__)
#define IPEX_HAVE_AMX 1
#else
#define IPEX_HAVE_AMX 0
#endif

#if defined(__AVX512FP16__)
#define IPEX_HAVE_AVX512_FP16 1
#else
#define IPEX_HAVE_AVX512_FP16 0
#endif
