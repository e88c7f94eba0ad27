# SPDX-License-Identifier: Apache-2.0
# Generated from packages/ipex-cpu-kernels/cmake/IsaLevels.cmake, do not edit: python tools/generate_isa.py
"""The ISA levels of the CPU kernels, lowest first, and what each needs."""

_NAMES = {
    "kAvx2": "avx2 fma f16c",
    "kAvxVnni": "avx_vnni",
    "kAvx512": "avx512f avx512bw avx512vl avx512dq avx512cd",
    "kAvx512Vnni": "avx512_vnni",
    "kAvx512Bf16": "avx512_bf16",
    "kAmx": "amx_tile amx_int8 amx_bf16",
    "kAvx512Fp16": "avx512_fp16",
}
_BITS = {
    "default": "",
    "avx2": "kAvx2",
    "avx2_vnni": "kAvx2 kAvxVnni",
    "avx512": "kAvx2 kAvx512",
    "avx512_vnni": "kAvx2 kAvx512 kAvx512Vnni",
    "avx512_bf16": "kAvx2 kAvx512 kAvx512Vnni kAvx512Bf16",
    "amx": "kAvx2 kAvx512 kAvx512Vnni kAvx512Bf16 kAmx",
    "avx512_fp16": "kAvx2 kAvx512 kAvx512Vnni kAvx512Bf16 kAmx kAvx512Fp16",
}

#: Level -> the features that it needs, by their names in ``/proc/cpuinfo``. Used only to explain: the choice is made by
#: the kernel package from cpuid.
LEVEL_FEATURES: dict[str, tuple[str, ...]] = {
    level: tuple(feature for bit in bits.split() for feature in _NAMES[bit].split())
    for level, bits in _BITS.items()
}

#: Levels that this release knows, lowest first. A kernel package may bring more (see `variables.py`).
ISA_LEVELS: tuple[str, ...] = tuple(LEVEL_FEATURES)
