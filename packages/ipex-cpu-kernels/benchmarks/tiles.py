# SPDX-License-Identifier: Apache-2.0
"""Products of many rows on AMX beside what the tiles give at that moment, stock and oneDNN, in turns in one process.

    python packages/ipex-cpu-kernels/benchmarks/tiles.py --threads 1 8

The ceiling is a block of two by two tiles fed from L1, on as many threads: it does nothing else, and moves with what
other programs leave of the cores. int4 has groups of 128 and takes bfloat16 or int8 activations. Needs g++ and AMX.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from ipex_core.benchmark import paired
from ipex_core.ops.woq_weight import woq_weight

SHAPES = ((512, 768, 3072), (4096, 384, 1536), (1024, 2048, 5632), (2048, 4096, 4096))
#: Steps of the ceiling, each four products of tiles, and the blocks of four tiles in L1 that they go through.
STEPS, TILES = 4096, 8
SOURCE = f"""
#include <immintrin.h>
#include <omp.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <cstring>
struct alignas(64) Config {{ unsigned char palette = 1, start = 0, reserved[14] = {{}};
  unsigned short bytes[16] = {{}}; unsigned char rows[16] = {{}}; }};
template <bool kInt8> static void multiply(char* data) {{
  Config config;
  for (int i = 0; i < 8; ++i) config.bytes[i] = 64, config.rows[i] = 16;
  _tile_loadconfig(&config);
  _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
  for (int step = 0; step < {STEPS}; ++step) {{
    const char* at = data + step % {TILES} * 4096;
    _tile_loadd(4, at, 64); _tile_loadd(5, at + 1024, 64);
    _tile_loadd(6, at + 2048, 64); _tile_loadd(7, at + 3072, 64);
    if (kInt8) {{
      _tile_dpbusd(0, 4, 6); _tile_dpbusd(1, 4, 7); _tile_dpbusd(2, 5, 6); _tile_dpbusd(3, 5, 7);
    }} else {{
      _tile_dpbf16ps(0, 4, 6); _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(2, 5, 6); _tile_dpbf16ps(3, 5, 7);
    }}
  }}
  _tile_stored(0, data + {TILES} * 4096, 64);
  _tile_release();
}}
extern "C" int ceiling(int threads, int int8) {{
  if (syscall(SYS_arch_prctl, 0x1023, 18)) return 1;
#pragma omp parallel num_threads(threads)
  {{
    alignas(4096) static thread_local char data[{TILES} * 4096 + 1024];
    std::memset(data, 0, sizeof data);
    int8 ? multiply<true>(data) : multiply<false>(data);
  }}
  return 0;
}}
"""


def ceiling(folder: str) -> Callable[[int, bool], None]:
    """Compile the ceiling; return what runs it on some threads."""
    source = Path(folder, "ceiling.cpp")
    source.write_text(SOURCE)
    library = str(source.with_suffix(".so"))
    flags = ("-O2", "-march=sapphirerapids", "-fopenmp", "-shared", "-fPIC")
    subprocess.run(["g++", *flags, str(source), "-o", library], check=True)
    found = ctypes.CDLL(library)

    def run(threads: int, int8: bool) -> None:
        if found.ceiling(threads, int8):
            raise SystemExit("tiles: the CPU must have AMX, and the system must allow it")

    return run


def products(rows: int, depth: int, columns: int) -> dict[str, Callable[[], object]]:
    """Return what computes the product, by name."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, depth, generator=generator).bfloat16()
    weight = (torch.randn(columns, depth, generator=generator) / depth**0.5).bfloat16()
    packed = torch.ops.ipex.pack_linear_weight(weight)
    reordered = torch.ops.mkldnn._reorder_linear_weight(weight, rows)
    codes = torch.randint(-127, 127, (columns, depth), dtype=torch.int8)
    int8, scale = torch.ops.ipex.pack_int8_weight(codes), torch.full((columns,), 0.01)
    int4, int4_pairs = (woq_weight(columns, depth, "int4", 128, order=o) for o in ("vnni", "dot"))
    ops = torch.ops.ipex
    return {
        "stock": lambda: functional.linear(x, weight),
        "oneDNN": lambda: torch.ops.mkldnn._linear_pointwise(x, reordered, None, "none", [], ""),
        "bf16": lambda: ops.linear(x, packed, columns),
        "int8": lambda: ops.int8_linear(x, int8, columns, scale),
        "int4 bf16": lambda: ops.woq_linear(x, int4_pairs, columns, lowp_mode="bf16"),
        "int4 int8": lambda: ops.woq_linear(
            x, int4, columns, lowp_mode="int8", act_quant_mode="per_ic_block_sym"
        ),
    }


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, torch.get_num_threads()])
    parser.add_argument("--seconds", type=float, default=4.0, help="for one product (4)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        run = ceiling(folder)
        names = ("stock", "oneDNN", "bf16", "int8", "int4 bf16", "int4 int8")
        print("| threads | rows x depth x columns | ceiling bf16, int8 | ", " | ".join(names), "|")
        print("|" + "---|" * (3 + len(names)))
        for threads in arguments.threads:
            torch.set_num_threads(threads)
            for shape in SHAPES:
                rates = measure(products(*shape), run, threads, shape, arguments.seconds)
                cells = [f"{rates[name]:.2f}" for name in names]
                for at, name in enumerate(names):
                    if name not in ("stock", "oneDNN"):
                        limit = rates["ceiling8" if "int8" in name else "ceiling"]
                        cells[at] += f" ({100 * rates[name] / limit:.0f} %)"
                limits = f"{rates['ceiling']:.2f}, {rates['ceiling8']:.2f}"
                sizes = "x".join(map(str, shape))
                print(f"| {threads} | {sizes} | {limits} | " + " | ".join(cells) + " |", flush=True)


def measure(
    functions: Mapping[str, Callable[[], object]],
    run: Callable[[int, bool], None],
    threads: int,
    shape: tuple[int, int, int],
    seconds: float,
) -> dict[str, float]:
    """Return Tera-operations per second by name."""
    limits: dict[str, Callable[[], Any]] = {
        "ceiling": lambda: run(threads, False),
        "ceiling8": lambda: run(threads, True),
    }
    times = paired({**functions, **limits}, seconds=seconds)
    work = dict.fromkeys(functions, 2.0 * shape[0] * shape[1] * shape[2])
    # Four products of 16 x 16 numbers in a step, with 32 or 64 steps along the depth.
    work |= {
        name: threads * STEPS * 4 * 16.0 * 16 * deep * 2
        for name, deep in (("ceiling", 32), ("ceiling8", 64))
    }
    return {name: work[name] / statistics.median(times[name]) / 1e12 for name in times}


if __name__ == "__main__":
    main()
