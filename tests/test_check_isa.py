# SPDX-License-Identifier: Apache-2.0
"""The check that no library has instructions of a higher ISA level: tools/check_isa.py."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

import check_isa

pytestmark = pytest.mark.skipif(
    shutil.which("as") is None or shutil.which("objdump") is None, reason="binutils not installed"
)

BASELINE = ("addps %xmm1, %xmm2", "cvtps2pd %xmm1, %xmm2", "imul %rax, %rbx", "sqrtss %xmm1, %xmm2")
#: What the assembler is given, by the feature that it needs.
NEEDS = {
    "kAvx2": (
        "vaddps %ymm1, %ymm2, %ymm3",
        "vaddps %xmm1, %xmm2, %xmm3",
        "vfmadd231ps %ymm1, %ymm2, %ymm3",
        "vcvtph2ps %xmm1, %ymm2",
        "vpmovzxwd %xmm1, %ymm2",
        "pshufb %xmm1, %xmm2",
        "popcnt %rax, %rbx",
        "roundps $1, %xmm1, %xmm2",
    ),
    "kAvxVnni": ("{vex} vpdpbusd %ymm1, %ymm2, %ymm3",),
    "kAvx512": (
        "vaddps %zmm1, %zmm2, %zmm3",
        "vaddps %ymm17, %ymm2, %ymm3",
        "vaddps %ymm1, %ymm2, %ymm3{%k1}",
        "vpternlogd $1, %xmm1, %xmm2, %xmm3",
        "vmovdqu8 %ymm1, %ymm2",
        "vextracti32x4 $1, %zmm1, %xmm2",
        "kmovd %eax, %k1",
        "vpermi2w %ymm1, %ymm2, %ymm3",
        "vcvtph2ps %ymm1, %zmm2",
    ),
    "kAvx512Vnni": ("vpdpbusd %zmm1, %zmm2, %zmm3", "{evex} vpdpwssd %ymm1, %ymm2, %ymm3"),
    "kAvx512Bf16": ("vdpbf16ps %zmm1, %zmm2, %zmm3", "vcvtneps2bf16 %zmm1, %ymm2"),
    "kAmx": ("tdpbssd %tmm1, %tmm2, %tmm3", "tdpbf16ps %tmm1, %tmm2, %tmm3", "tilerelease"),
    "kAvx512Fp16": (
        "vaddph %zmm1, %zmm2, %zmm3",
        "vfmadd231sh %xmm1, %xmm2, %xmm3",
        "vcvtps2phx %zmm1, %ymm2",
        "vmovw %eax, %xmm1",
    ),
    check_isa.FOREIGN: (
        "vpermb %zmm1, %zmm2, %zmm3",
        "vpopcntd %zmm1, %zmm2",
        "andn %eax, %ebx, %ecx",
        "shlx %eax, %ebx, %ecx",
        "lzcnt %eax, %ebx",
        "vgf2p8mulb %ymm1, %ymm2, %ymm3",
    ),
}


def assembled(path: Path, instructions: tuple[str, ...]) -> Path:
    source = "".join(f"{line}\n" for line in instructions)
    subprocess.run(
        ["as", "-o", str(path), "-"], input=source, text=True, check=True, capture_output=True
    )
    return path


@pytest.mark.parametrize("feature", ["", *NEEDS])
def test_each_instruction_needs_its_feature(feature: str, tmp_path: Path) -> None:
    wanted = NEEDS.get(feature, BASELINE)
    lines = list(check_isa.disassembled(assembled(tmp_path / "code.o", wanted)))[-len(wanted) :]
    assert [check_isa.needed_feature(line) for line in lines] == [feature] * len(wanted), lines


def test_a_level_has_its_instructions_and_none_of_a_higher_one(tmp_path: Path) -> None:
    features = check_isa.levels()
    library = tmp_path / "libipex_cpu_avx2.so"
    assert list(check_isa.problems(assembled(library, NEEDS["kAvx2"]), features)) == []
    (too_new,) = check_isa.problems(
        assembled(library, (*NEEDS["kAvx2"], *NEEDS["kAvx512"])), features
    )
    assert "needs Avx512" in too_new
    (missing,) = check_isa.problems(assembled(library, BASELINE), features)
    assert "no instruction needs Avx2" in missing
    other = assembled(tmp_path / "libipex_cpu.so", NEEDS["kAvx2"])
    assert "needs Avx2" in next(check_isa.problems(other, features))


def test_every_level_above_the_lowest_has_a_feature_of_its_own() -> None:
    features = check_isa.levels()
    assert features["default"] == set()
    assert features["avx512_bf16"] == {"kAvx2", "kAvx512", "kAvx512Vnni", "kAvx512Bf16"}
    assert len(set(map(frozenset, features.values()))) == len(features)


def test_installed_libraries(capsys: pytest.CaptureFixture[str]) -> None:
    """Each level that was built, and the libraries that run on any x86-64."""
    kernels = pytest.importorskip("ipex_cpu_kernels")
    assert check_isa.main([str(Path(kernels.__file__).parent)]) == 0, capsys.readouterr().err


def test_nothing_to_check_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert check_isa.main([str(tmp_path)]) == 2
    assert str(tmp_path) in capsys.readouterr().err
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert check_isa.main([str(tmp_path)]) == 2
    assert "install binutils" in capsys.readouterr().err
