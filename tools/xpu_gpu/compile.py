# SPDX-License-Identifier: Apache-2.0
"""Compile all kernels for the device in several processes, which leave them in the cache: compile.py PROCESSES."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import sys
import time
from pathlib import Path

import ipex_xpu_kernels


def compile_file(manifest: str) -> tuple[str, float, str]:
    """Return the name of a file, the seconds that its kernels took, and what went wrong."""
    start = time.perf_counter()
    ipex_xpu_kernels.activate()
    from ipex_xpu_kernels import _C

    rows = (line for line in Path(manifest).read_text("utf-8").splitlines() if line[:1] != "#")
    try:
        # One compiles all of its file.
        _C.build_kernel(next(rows).split()[0], 0)
        problem = ""
    except RuntimeError as error:
        problem = str(error)[:2000]
    return Path(manifest).stem, time.perf_counter() - start, problem


def main() -> None:
    folder = Path(ipex_xpu_kernels.__file__).with_name("kernels")
    # The largest sources first.
    files = sorted(folder.glob("*.txt"), key=lambda file: -file.stat().st_size)
    context = multiprocessing.get_context("spawn")
    bad = 0
    with concurrent.futures.ProcessPoolExecutor(int(sys.argv[1]), mp_context=context) as pool:
        for name, seconds, problem in pool.map(compile_file, map(str, files)):
            print(f"{name}: {seconds:.1f} s {problem}", flush=True)
            bad += bool(problem)
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
