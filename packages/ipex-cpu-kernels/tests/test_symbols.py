# SPDX-License-Identifier: Apache-2.0
"""What the native modules export, import and contain."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from ipex_core.kernels.providers import provider_for
from ipex_cpu_kernels import _native

LIBRARY = _native._find_library()
LEVELS = provider_for("cpu").isa_built

needs_binutils = pytest.mark.skipif(
    shutil.which("nm") is None or shutil.which("objdump") is None, reason="binutils not installed"
)


def output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def module(level: str) -> Path:
    return LIBRARY.parent / f"libipex_cpu_{level}.so"


@needs_binutils
@pytest.mark.parametrize("built", LEVELS)
def test_modules_export_only_kernels(built):
    names = [
        line.split()[-1]
        for line in output("nm", "-D", "--defined-only", str(module(built))).splitlines()
    ]
    assert names
    assert all(name.startswith("ipex_k_") for name in names), names


@needs_binutils
@pytest.mark.parametrize("built", LEVELS)
def test_modules_need_only_libc(built):
    """No libstdc++, no torch: nothing an ISA module could merge inline code with."""
    needed = re.findall(r"NEEDED\s+(\S+)", output("objdump", "-p", str(module(built))))
    assert set(needed) <= {"libc.so.6", "libm.so.6", "libgcc_s.so.1", "ld-linux-x86-64.so.2"}, (
        needed
    )


@needs_binutils
def test_all_levels_have_the_same_kernels():
    def exported(level):
        return {
            line.split()[-1]
            for line in output("nm", "-D", "--defined-only", str(module(level))).splitlines()
        }

    first = exported(LEVELS[0])
    assert all(exported(level) == first for level in LEVELS)


@needs_binutils
def test_glue_exports_its_c_functions_only():
    names = [
        line.split()[-1] for line in output("nm", "-D", "--defined-only", str(LIBRARY)).splitlines()
    ]
    assert all(name.startswith("ipex_cpu_") for name in names), names


@needs_binutils
def test_glue_uses_the_stable_abi_only():
    """No C++ symbol of torch and none of Python: one binary for every torch >= 2.11 and every Python."""
    names = [
        line.split()[-1]
        for line in output("nm", "-D", "--undefined-only", str(LIBRARY)).splitlines()
    ]
    torch_cpp = [n for n in names if re.match(r"_ZN?K?(2at|3c10|5torch)", n)]
    python = [n for n in names if n.startswith(("Py", "_Py"))]
    assert not torch_cpp
    assert not python
    needed = re.findall(r"NEEDED\s+(\S+)", output("objdump", "-p", str(LIBRARY)))
    assert not any("gomp" in n or "omp5" in n or "python" in n for n in needed), needed


@needs_binutils
def test_no_path_of_the_build_machine():
    text = LIBRARY.read_bytes()
    assert b"RUNPATH" not in text
    header = output("objdump", "-p", str(LIBRARY))
    assert "RPATH" not in header
    assert "RUNPATH" not in header


def test_files_exist_for_all_levels():
    assert LIBRARY.is_file()
    assert [level for level in LEVELS if not module(level).is_file()] == []


@needs_binutils
@pytest.mark.skipif(
    tuple(map(int, (platform.libc_ver()[1] or "0.0").split(".")[:2])) > (2, 36),
    reason="built on a newer system than those that releases are built on",
)
@pytest.mark.parametrize(
    "library", sorted(LIBRARY.parent.glob("libipex_*.so")), ids=lambda p: p.stem
)
def test_libraries_need_nothing_newer_than_manylinux_2_28(library):
    limits = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11)}
    text = output("objdump", "-T", str(library))
    needed = re.findall(r"\((GLIBC|GLIBCXX|CXXABI)_([0-9.]+)\) +(?:\.hidden )?(\w+)", text)
    assert needed
    assert not [
        f"{symbol}@{name}_{version}"
        for name, version, symbol in needed
        if tuple(map(int, version.split("."))) > limits[name]
    ]
