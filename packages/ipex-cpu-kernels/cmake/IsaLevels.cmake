# SPDX-License-Identifier: Apache-2.0
# The only list of ISA levels. Python has a copy that is generated: python tools/generate_isa.py.

# Feature bit (csrc/runtime/cpu_features.h) | its names in /proc/cpuinfo, with which Python explains a choice.
set(IPEX_ISA_FEATURES
  "kAvx2|avx2 fma f16c"
  "kAvxVnni|avx_vnni"
  "kAvx512|avx512f avx512bw avx512vl avx512dq avx512cd"
  "kAvx512Vnni|avx512_vnni"
  "kAvx512Bf16|avx512_bf16"
  "kAmx|amx_tile amx_int8 amx_bf16"
  "kAvx512Fp16|avx512_fp16"
)

# Name | required feature bits | compiler flags.
# Lowest first. A level is eligible if the CPU has all its bits and the operating system saves their registers; the
# last eligible row wins. Flags are explicit because g++ 12 knows no -march name for every CPU that matters.
set(_IPEX_AVX2 "-mavx2 -mfma -mf16c")
set(_IPEX_AVX512 "${_IPEX_AVX2} -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512cd -mprefer-vector-width=512")
set(_IPEX_AVX512_BF16 "${_IPEX_AVX512} -mavx512vnni -mavx512bf16")
set(_IPEX_AMX "${_IPEX_AVX512_BF16} -mamx-tile -mamx-int8 -mamx-bf16")

set(IPEX_ISA_TABLE
  "default|0|"
  "avx2|kAvx2|${_IPEX_AVX2}"
  "avx2_vnni|kAvx2+kAvxVnni|${_IPEX_AVX2} -mavxvnni"
  "avx512|kAvx2+kAvx512|${_IPEX_AVX512}"
  "avx512_vnni|kAvx2+kAvx512+kAvx512Vnni|${_IPEX_AVX512} -mavx512vnni"
  "avx512_bf16|kAvx2+kAvx512+kAvx512Vnni+kAvx512Bf16|${_IPEX_AVX512_BF16}"
  "amx|kAvx2+kAvx512+kAvx512Vnni+kAvx512Bf16+kAmx|${_IPEX_AMX}"
  "avx512_fp16|kAvx2+kAvx512+kAvx512Vnni+kAvx512Bf16+kAmx+kAvx512Fp16|${_IPEX_AMX} -mavx512fp16"
)
