#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Check that each library of ipex-cpu-kernels has the instructions of its ISA level, and none of a higher one.

    python tools/check_isa.py dist/ipex_cpu_kernels-*.whl
    python tools/check_isa.py FOLDER-WITH-LIBRARIES

One instruction too many ends a process on an older CPU with SIGILL. One that is missing makes a level a copy of the one
below. Both are read from the disassembly (objdump, of binutils, which g++ needs anyway). The features of a level
are those of ``cmake/IsaLevels.cmake``; libraries without a level may use the x86-64 baseline only.

Exit codes: 0; 1 if a library breaks the rule; 2 if there is nothing to check or no objdump.
"""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import generate_isa

__all__ = ["disassembled", "levels", "main", "needed_feature", "problems"]

#: Features that no level has, by name for the message.
FOREIGN = "an extension that no level has"

# One row per feature, in the order in which they are tried. The first pattern that matches the mnemonic decides, before
# the operands are looked at.
_MNEMONICS: tuple[tuple[str, str], ...] = (
    ("kAmx", r"tdp(bf16ps|b[su][su]d)|tile(loaddt?1?|stored|zero|release)|(ld|st)tilecfg"),
    (FOREIGN, r"t[a-z0-9]*fp16ps|tcmm[a-z0-9]+"),
    ("kAvx512Bf16", r"vdpbf16ps|vcvtne2?ps2bf16[xy]?"),
    # Of AVX and AVX-512, which have no other mnemonics with these endings.
    ("kAvx2", r"vcvtph2ps|vcvtps2ph"),
    ("kAvx512Fp16", r"v[a-z0-9]+(ph|sh)[xyz]?|vcvt[a-z]*(ph|sh)2[a-z0-9]+|vcvt[a-z0-9]+2phx|vmovw"),
    (
        FOREIGN,
        # VBMI, VBMI2, IFMA, BITALG, VPOPCNTDQ, VP2INTERSECT, ER, GFNI, VAES, VPCLMULQDQ
        r"vperm[it]2b|vpermb|vpmultishiftqb|vp(compress|expand)[bw]|vpsh[lr]dv?[wdq]|vpmadd52[lh]uq"
        r"|vpopcnt[bwdq]|vpshufbitqmb|vp2intersect[dq]|v(exp2|rcp28|rsqrt28)[ps][sd]|v?gf2p8\w+"
        r"|v?aes(enc|dec|imc|keygen)\w*|v?pclmul\w+|sha(1|256)\w+"
        # BMI, ADX, MOVBE, XSAVE: the flags of AVX2 do not bring them.
        r"|andn[lq]?|bextr[lq]?|bls(i|r|msk)[lq]?|bzhi[lq]?|mulx[lq]?|p(dep|ext)[lq]?|rorx[lq]?"
        r"|s(ar|hl|hr)x[lq]?|lzcnt[lwq]?|ad[co]x[lq]?|movbe[lwq]?|xsave\w*|xrstor\w*",
    ),
    ("vnni", r"vpdp(bus|wss)ds?"),
    (FOREIGN, r"vpdp\w+"),
    (
        "kAvx512",
        r"vpternlog[dq]|vperm[it]2\w+|vpermw|vmovdq[au](8|16|32|64)|vp(andn?|x?or)[dq]"
        r"|v(extract|insert|broadcast|shuf)[if]\d+x\d+|vpmov(us|s)?(wb|dw|db|qd|qw|qb)|vpmov[bwdq]2m|vpmovm2[bwdq]"
        r"|v(rndscale|reduce|scalef|getexp|getmant|fixupimm|range|fpclass)[ps][sd][xyz]?"
        r"|v(rcp|rsqrt)14[ps][sd]|vpsra(v?)q|vpsravw|vps[lr]lvw|vpro[lr]v?[dq]|valign[dq]"
        r"|v?p?blendm(ps|pd|[bwdq])|vp(compress|expand)[dq]|v(compress|expand)p[sd]|vpconflict[dq]|vplzcnt[dq]"
        r"|vpmullq|vptestn?m[bwdq]|vp(min|max)[su]q|vpabsq|vdbpsadbw|vpcmp(eq|neq|n?lt|n?le)?u[bwdq]"
        r"|vcvtt?p[sd]2u?qq\w*|vcvtt?p[sd]2udq\w*|vcvtu?qq2p[sd]\w*|vcvtudq2p[sd]|vcvtt?s[sd]2usi\w*|vcvtusi2s[sd]\w*"
        r"|k(add|andn?|mov|not|x?n?or|ortest|shift[lr]|test|unpck)[bwdq]{1,2}",
    ),
    # SSE3 to SSE4.2, with which the baseline does not come.
    (
        "kAvx2",
        r"addsub[ps][sd]|h(add|sub)p[sd]|lddqu|mov(ddup|s[hl]dup)|p(abs|sign)[bwd]|palignr|ph(add|sub)s?[wd]|pmaddubsw"
        r"|pmulhrsw|pshufb|p?blendv?(b|ps|pd|w)?|dpp[sd]|extractps|insertps|movntdqa|mpsadbw|packusdw|pcmpeqq|pcmpgtq"
        r"|pcmp[ei]str[im]|p(extr|insr)[bdq]|phminposuw|pm(ax|in)(s[bd]|u[wd])|pmov[sz]x[bwd][wdq]|pmuldq|pmulld|ptest"
        r"|round[ps][sd]|crc32[bwlq]?|popcnt[lwq]?",
    ),
)
_PATTERNS = tuple((feature, re.compile(pattern)) for feature, pattern in _MNEMONICS)
# Registers and decorations that only EVEX has.
_EVEX = re.compile(r"%zmm\d|%[xy]mm(1[6-9]|2\d|3[01])|%k[0-7]|\{1to\d+\}|\{(r[nduz]-)?sae\}")
_LINE = re.compile(
    r"^\s+[0-9a-f]+:\t(?:(?:lock|rep[nz]?|repz|bnd|notrack|cs|ds|es|data16|addr32|\{\w+\}) )*([a-z]\w*)[ \t]*(.*)$"
)


def levels() -> dict[str, set[str]]:
    """Return the features of each ISA level, lowest level first, from the one file that lists them."""
    return {level.name: set(level.bits) for level in generate_isa.levels().values()}


@functools.cache
def _of_mnemonic(mnemonic: str) -> str:
    return next((f for f, pattern in _PATTERNS if pattern.fullmatch(mnemonic)), "")


def needed_feature(line: str) -> str:
    """Return the feature that an instruction needs.

    Args:
        line: A line of ``objdump -d --no-show-raw-insn``.

    Returns:
        A name as in ``cmake/IsaLevels.cmake``, `FOREIGN`, or an empty string: x86-64 baseline, or no instruction.
    """
    match = _LINE.match(line)
    if match is None:
        return ""
    mnemonic, operands = match.groups()
    feature = _of_mnemonic(mnemonic)
    if feature == "vnni":
        return "kAvxVnni" if "{vex}" in line else "kAvx512Vnni"
    if feature not in {"", "kAvx2"}:
        return feature
    vector = mnemonic.startswith("v") and mnemonic not in {"verr", "verw"}
    if "{evex}" in line or (vector and _EVEX.search(operands)):
        return "kAvx512"
    return "kAvx2" if vector else feature


def disassembled(library: Path) -> Iterator[str]:
    """Yield the lines of the disassembly of a library."""
    command = ["objdump", "-d", "--no-show-raw-insn", str(library)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield from process.stdout
    if process.returncode:
        raise RuntimeError(f"objdump cannot read {library}")


def problems(library: Path, features: Mapping[str, set[str]]) -> Iterator[str]:
    """Yield what is wrong with the instructions of one library.

    Args:
        library: Its name tells the level: ``libipex_cpu_LEVEL.so``; any other library is held to the baseline.
        features: Features of each level, see `levels`.
    """
    level = library.stem.removeprefix("libipex_cpu_")
    allowed = features.get(level, set())
    found: dict[str, str] = {}
    for line in disassembled(library):
        feature = needed_feature(line)
        if feature and feature not in found:
            found[feature] = " ".join(line.split("\t", 1)[1].split())
    for feature, instruction in found.items():
        if feature not in allowed:
            yield f"{library.name}: '{instruction}' needs {feature.removeprefix('k')}, which this level does not have"
    below = [f for f in features.values() if f < allowed]
    own = allowed - set().union(*below)
    for feature in sorted(own - found.keys()):
        yield f"{library.name}: no instruction needs {feature.removeprefix('k')}, for which this level is there"


def main(arguments: list[str]) -> int:
    """Check the libraries in the wheels and folders that are named."""
    if shutil.which("objdump") is None:
        print("objdump is missing: install binutils", file=sys.stderr)
        return 2
    features = levels()
    checked = 0
    wrong: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        for number, argument in enumerate(arguments):
            place = Path(argument)
            if place.suffix == ".whl":
                target = Path(folder) / str(number)
                with zipfile.ZipFile(place) as archive:
                    for name in archive.namelist():
                        if name.endswith(".so"):
                            archive.extract(name, target)
                place = target
            for library in sorted(place.rglob("libipex_cp*.so")):
                checked += 1
                wrong += problems(library, features)
    for line in wrong:
        print(line, file=sys.stderr)
    if not checked:
        print(f"no libipex_cpu*.so in {' '.join(arguments) or 'no argument'}", file=sys.stderr)
        return 2
    print(f"ISA levels: {checked} libraries checked, {len(wrong)} problems")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
