# SPDX-License-Identifier: Apache-2.0
"""Time the steps of optimizers against stock PyTorch, paired, and against the rate of memory.

Prints a table and writes it as JSON for ``docs/data``::

    python optimizers.py --threads 2 --json optimizers.json
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import json
import mmap
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import ipex
from ipex_core import benchmark
from ipex_core.optim import Lamb, Lars

Tensor = torch.Tensor
#: Name -> maker, bytes that a step has to move per float32 parameter.
FLOAT: dict[str, tuple[Callable[..., Any], int]] = {
    "SGD, momentum": (lambda p, **k: torch.optim.SGD(p, lr=1e-3, momentum=0.9, **k), 20),
    "Adagrad": (lambda p, **k: torch.optim.Adagrad(p, lr=1e-3, **k), 20),
    "Adam": (lambda p, **k: torch.optim.Adam(p, lr=1e-3, **k), 28),
    "AdamW": (lambda p, **k: torch.optim.AdamW(p, lr=1e-3, **k), 28),
}
#: The two have norms before the update: one more pass over what they need.
OURS: dict[str, tuple[Callable[..., Any], int]] = {
    "Lamb": (lambda p: Lamb(p, lr=1e-3, weight_decay=0.01), 36),
    "Lars, momentum": (lambda p: Lars(p, lr=1e-3, momentum=0.9, weight_decay=0.01), 28),
}
SPLIT: dict[str, tuple[Callable[..., Any], int]] = {
    "SGD": (lambda p: torch.optim.SGD(p, lr=1e-3), 10),
    "SGD, momentum": (FLOAT["SGD, momentum"][0], 18),
    "AdamW": (FLOAT["AdamW"][0], 26),
}


def layers(count: int, width: int = 1024) -> torch.nn.Module:
    """Return square linear layers of `count` million parameters in all, with gradients."""
    torch.manual_seed(0)
    number = max(1, (count << 20) // width**2)
    model = torch.nn.Sequential(
        *(torch.nn.Linear(width, width, bias=False) for _ in range(number))
    ).train()
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    return model


def plain_lamb(params: list[Tensor], state: dict[Tensor, list[Tensor]]) -> None:
    """Do a step of LAMB in stock operations."""
    for p in params:
        grad = p.grad
        assert grad is not None
        m, v = state.setdefault(p, [torch.zeros_like(p), torch.zeros_like(p)])
        m.mul_(0.9).add_(grad, alpha=0.1)
        v.mul_(0.999).addcmul_(grad, grad, value=0.001)
        update = (m / 0.1) / ((v / 0.001).sqrt() + 1e-8)
        update.add_(p, alpha=0.01)
        p.add_(update, alpha=float(-1e-3 * p.norm() / update.norm()))


def plain_lars(params: list[Tensor], state: dict[Tensor, list[Tensor]]) -> None:
    """Do a step of LARS in stock operations."""
    for p in params:
        grad = p.grad
        assert grad is not None
        (buffer,) = state.setdefault(p, [torch.zeros_like(p)])
        norm = p.norm()
        factor = 1e-3 * norm / (grad.norm() + 0.01 * norm)
        update = grad.add(p, alpha=0.01).mul_(factor)
        buffer.mul_(0.9).add_(update)
        p.add_(buffer, alpha=-1e-3)


def ours(model: torch.nn.Module, make: Callable[..., Any], dtype: Any = None) -> Callable[[], Any]:
    """Return the step of an optimizer after `ipex.optimize`."""
    model, optimizer = ipex.optimize(
        model, dtype, optimizer=make(model.parameters()), inplace=dtype is None
    )
    for p in model.parameters():
        p.grad = torch.randn(p.shape).to(p.dtype)
    return optimizer.step  # type: ignore[no-any-return]


def with_master(model: torch.nn.Module, make: Callable[..., Any]) -> Callable[[], Any]:
    """Return a step of a float32 master weight, with a cast of gradients and weights."""
    masters = [torch.nn.Parameter(p.detach().clone()) for p in model.parameters()]
    weights = [p.detach().bfloat16() for p in masters]
    grads = [torch.randn(p.shape).bfloat16() for p in masters]
    optimizer = make(masters)

    @torch.no_grad()
    def step() -> None:
        for p, g in zip(masters, grads, strict=True):
            p.grad = g.float()
        optimizer.step()
        for p, w in zip(masters, weights, strict=True):
            w.copy_(p)

    return step


def compare(candidates: dict[str, Callable[[], Any]], n_bytes: int, seconds: float) -> list[str]:
    """Return the median time of ours, its ratios to the others, and its share of the rate of memory."""
    numbers = torch.ones(n_bytes // 8)  # read and written in place, as weights and states are
    times = benchmark.paired(
        {**candidates, "limit": lambda: numbers.mul_(1.0)}, seconds=seconds, min_rounds=5
    )
    row = [f"{1e3 * statistics.median(times['ipex']):.1f}"]
    for name in ("stock", "fused=True"):
        if name not in times:
            row.append("-")
            continue
        r = benchmark.ratio(times[name], times["ipex"])
        row.append(f"**{r.median:.2f}** ({r.low:.2f}-{r.high:.2f})")
    share = benchmark.ratio(times["limit"], times["ipex"]).median
    return [*row, f"{100 * share:.0f} %"]


def resident() -> int:
    """Return the bytes of memory that this process has."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)  # what was freed goes back to the system
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * mmap.PAGESIZE


def memory(count: int, split: bool) -> list[Any]:
    """Return what weights take after `ipex.optimize`, as a share of their float32 bytes."""
    base = resident()
    model = layers(count)
    model.zero_grad()  # to None
    before = resident() - base
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    model, optimizer = ipex.optimize(
        model, torch.bfloat16, optimizer, inplace=True, split_master_weight_for_bf16=split
    )
    after = resident() - base
    form = "bfloat16 split" if split else "bfloat16, float32 master weights"
    return [form, f"{before >> 20}", f"{after >> 20}", f"**{after / before:.2f}**"]


def main() -> None:
    """Print the table and write it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--layers", type=int, default=16, help="millions of parameters")
    parser.add_argument("--width", type=int, default=1024, help="of each square weight")
    parser.add_argument("--seconds", type=float, default=4.0, help="for each row")
    parser.add_argument("--json")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    count = options.layers << 20

    def model() -> torch.nn.Module:
        return layers(options.layers, options.width)

    memory(1, True)  # what libraries take when they are loaded is not the weights'
    held = [memory(options.layers, split) for split in (True, False)]
    print(*held, sep="\n")
    rows: list[list[Any]] = []

    def add(name: str, form: str, candidates: dict[str, Callable[[], Any]], each: int) -> None:
        rows.append([name, form, *compare(candidates, each * count, options.seconds)])
        print("  ".join(map(str, rows[-1])), flush=True)

    for name, (make, each) in FLOAT.items():
        candidates = {
            "stock": make(model().parameters()).step,
            "fused=True": make(model().parameters(), fused=True).step,
            "ipex": ours(model(), make),
        }
        add(name, "float32", candidates, each)
    for (name, (make, each)), plain in zip(OURS.items(), (plain_lamb, plain_lars), strict=True):
        parameters = [p.detach() for p in model().parameters()]
        for p in parameters:
            p.grad = torch.randn_like(p)
        state: dict[Tensor, list[Tensor]] = {}
        candidates = {
            "stock": lambda f=plain, p=parameters, s=state: f(p, s),
            "ipex": ours(model(), make),
        }
        add(name, "float32", candidates, each)
    for name, (make, each) in SPLIT.items():
        candidates = {
            "stock": with_master(model(), make),
            "ipex": ours(model(), make, torch.bfloat16),
        }
        add(name, "bfloat16 split", candidates, each)
    if options.json:
        taken = {
            "title": "Memory of weights in training",
            "command": "python packages/ipex/benchmarks/optimizers.py",
            "columns": ["Weights", "float32 MiB", "after optimize MiB", "Ratio"],
            "rows": held,
        }
        table = {
            "title": "Steps of optimizers",
            "machine": benchmark.machine()["cpu"] + f", {options.threads} threads",
            "command": "python packages/ipex/benchmarks/optimizers.py",
            "columns": [
                *("Optimizer", "Weights", "ipex ms", "stock / ipex", "fused=True / ipex"),
                "Of the memory rate",
            ],
            "rows": rows,
        }
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({"tables": [table, taken]}, file, indent=1)


if __name__ == "__main__":
    main()
