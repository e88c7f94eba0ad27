# SPDX-License-Identifier: Apache-2.0
"""A training step of a transformer layer on xpu and on the host, in turns; first uses of kernels; imports.

    IPEX_XPU_DEVICE=cpu python steps.py [--rounds 20] [--json FILE]

First uses and imports are timed in processes of their own: with an empty cache of binaries, with a filled one, and
without a device.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import ipex_xpu_kernels

FIRST_USE = """
import time, torch, ipex_xpu_kernels
ipex_xpu_kernels.activate()
x = torch.ones(1000, device="xpu")
x.relu(); torch.xpu.synchronize()
start = time.perf_counter(); x.sin(); torch.xpu.synchronize(); first = time.perf_counter()
x.sin(); torch.xpu.synchronize(); second = time.perf_counter()
print(first - start - (second - first))
"""
IMPORT = """
import time, torch
start = time.perf_counter()
import ipex_xpu_kernels
ipex_xpu_kernels.activate()
print(time.perf_counter() - start)
"""


def child(code: str, **variables: str | None) -> float:
    """Run code in a process of its own and return the number that it prints."""
    environment = {k: v for k, v in {**os.environ, **variables}.items() if v is not None}
    found = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    return float(found.stdout)


def starts(runs: int) -> dict[str, float]:
    """Return the least seconds of the first use of a kernel and of the import."""
    with tempfile.TemporaryDirectory() as folder:
        cold = [child(FIRST_USE, IPEX_XPU_CACHE=str(Path(folder, str(i)))) for i in range(runs)]
        warm = [child(FIRST_USE, IPEX_XPU_CACHE=str(Path(folder, "0"))) for _ in range(runs)]
    none = [child(IMPORT, IPEX_XPU_DEVICE=None) for _ in range(runs)]
    return {
        "first use of a kernel, empty cache": min(cold),
        "first use of a kernel, filled cache": min(warm),
        "import without a device": min(none),
    }


def step_of(device: str) -> Callable[[], None]:
    """Return a training step: forward, backward and AdamW of a transformer layer with the sizes of BERT-base / 2."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(
        384, 6, 1536, dropout=0.1, batch_first=True, activation="gelu"
    )
    layer.to(device)
    optimizer = torch.optim.AdamW(layer.parameters(), fused=True)
    x = torch.randn(8, 128, 384, device=device)

    def step() -> None:
        layer(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if device == "xpu":
            torch.xpu.synchronize()

    return step


def steps(rounds: int) -> tuple[float, float, float]:
    """Return the median seconds of a step on xpu and on the host, and the median of their ratios."""
    calls = step_of("xpu"), step_of("cpu")
    times = []
    for _ in range(rounds + 2):
        pair = []
        for call in calls:
            start = time.perf_counter()
            call()
            pair.append(time.perf_counter() - start)
        times.append(pair)
    times = times[2:]
    device, host = (statistics.median(column) for column in zip(*times, strict=True))
    return device, host, statistics.median(a / b for a, b in times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--runs", type=int, default=3, help="processes for each start")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file, in seconds")
    options = parser.parse_args()
    ipex_xpu_kernels.activate()
    found: dict[str, float] = {}
    if options.rounds:
        device, host, ratio = steps(options.rounds)
        found |= {"step on xpu": device, "step on the host": host, "ratio": ratio}
        print(f"step: xpu {device * 1e3:.1f} ms, host {host * 1e3:.1f} ms, ratio {ratio:.2f}")
    if options.runs:
        for name, seconds in starts(options.runs).items():
            found[name] = seconds
            print(f"{name}: {seconds * 1e3:.1f} ms")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
