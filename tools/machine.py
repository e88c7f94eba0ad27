#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What a machine lacks that the sessions of nox need; one line each, with what to do.

Runs on every Python, also on those that are too old for the packages.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

__all__ = ["LEAST_GCC", "MOST_PYTHON", "compiler_problem", "problems"]

LEAST_PYTHON, MOST_PYTHON = (3, 10), (3, 14)
LEAST_GCC = 12


def problems(checkout: Path) -> list[str]:
    """Return why no session can run here.

    Args:
        checkout: The folder that has to take dist/, reports/ and the environments.
    """
    found = []
    version = sys.version_info[:2]
    if not LEAST_PYTHON <= version <= MOST_PYTHON:
        found.append(
            f"Python {_dotted(LEAST_PYTHON)} to {_dotted(MOST_PYTHON)} is needed, nox runs with {_dotted(version)}"
            f" ({sys.executable}): start it with another one,"
            " `python3.12 -m pip install nox && python3.12 -m nox -s demo`"
        )
    if not sys.platform.startswith("linux"):
        found.append(
            f"Linux is needed, this is {platform.system()}: the checks build native code for Linux;"
            " ipex-core, ipex-quant, ipex-llm and ipex install with pip"
        )
    elif not platform.libc_ver()[0]:
        found.append(
            "glibc is needed, this system has another C library (musl?): torch has no wheels for it; use a distribution"
            " such as Debian, Ubuntu or Fedora"
        )
    if platform.machine() not in {"x86_64", "AMD64"}:
        found.append(
            f"an x86-64 processor is needed, this is {platform.machine()}: ipex-cpu-kernels does not build there;"
            " ipex-core, ipex-quant, ipex-llm and ipex install with pip and run on stock ops"
        )
    if not os.access(checkout, os.W_OK):
        found.append(
            f"{checkout} cannot be written: copy the checkout to a folder of yours;"
            " wheels, reports and environments go there"
        )
    return found


def compiler_problem() -> str:
    """Return why the kernels cannot be compiled here, or an empty string."""
    name = os.environ.get("CXX", "") or next(filter(shutil.which, ("c++", "g++")), "")
    if not name or shutil.which(name.split()[0]) is None:
        return (
            f"g++ {LEAST_GCC} or newer is needed, there is no {name or 'C++ compiler'}:"
            " install it (Debian, Ubuntu: apt install g++) or set CXX"
        )
    command = [*name.split(), "-dM", "-E", "-x", "c++", os.devnull]
    macros = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    numbers = dict(re.findall(r"^#define (__GNUC__|__clang__) (\d+)$", macros, re.MULTILINE))
    found = "clang" if "__clang__" in numbers else f"g++ {numbers.get('__GNUC__', 'of no version')}"
    if "__clang__" in numbers or int(numbers.get("__GNUC__", 0)) < LEAST_GCC:
        return (
            f"g++ {LEAST_GCC} or newer is needed, {name} is {found}: install a newer one and name it,"
            f" CXX=g++-{LEAST_GCC} nox -s demo"
        )
    return ""


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
