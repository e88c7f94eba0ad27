# SPDX-License-Identifier: Apache-2.0
"""Kernels on the SYCL CPU device against stock CPU torch, in turns.

    IPEX_XPU_DEVICE=cpu python kernels.py [--dtype float32,bfloat16] [--rows 8192] [--columns 2048] [--only NAME]

Prints for each op the milliseconds of both (the least of the rounds), their ratio, and the bytes per second that the
op has to move, also as a share of the rate of memory: that of stock ``torch.add(a, b, out=c)`` in the same rounds. The
stock ops take new memory from the system for each result, kernels that of the device's cache. ``mm`` has no such share.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import ipex_core  # noqa: F401  (defines torch.ops.ipex)
import ipex_xpu_kernels

Tensor = torch.Tensor


def rotate_half(x: Tensor) -> Tensor:
    return torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), -1)


def cases(
    rows: int, columns: int, dtype: torch.dtype
) -> dict[str, tuple[Callable[..., Any], Callable[..., Any], tuple[Any, ...], float]]:
    """Name -> (op on the device, what stock torch runs, arguments, passes over a tensor of rows x columns)."""
    x, y = torch.randn(2, rows, columns, dtype=dtype)
    weight = torch.ones(columns, dtype=dtype)
    heads = columns // 128
    query = torch.randn(rows, heads, 128, dtype=dtype)
    key = torch.randn(rows, 1, 128, dtype=dtype)
    angles = torch.randn(rows, 64)
    sin, cos = angles.sin(), angles.cos()
    order = torch.randperm(rows)
    mask = x > 0
    ops = torch.ops.ipex

    def stock_rope(query: Tensor, key: Tensor, sin: Tensor, cos: Tensor, *_: Any) -> None:
        s, c = (torch.cat((t, t), -1).to(query.dtype).unsqueeze(1) for t in (sin, cos))
        for t in (query, key):
            t.copy_(t * c + rotate_half(t) * s)

    square = torch.randn(2, 1024, 1024, dtype=dtype)
    same: Callable[..., Any]
    result = {}
    for name, same, args, passes in (
        ("add", torch.add, (x, y), 3.0),
        ("add a row", torch.add, (x, weight), 2.0),
        ("gelu", F.gelu, (x,), 2.0),
        ("softmax", lambda x: x.softmax(-1), (x,), 2.0),
        ("layer_norm", lambda x, w: F.layer_norm(x, (columns,), w, w), (x, weight), 2.0),
        ("sum, rows", lambda x: x.sum(-1), (x,), 1.0),
        ("sum, columns", lambda x: x.sum(0), (x,), 1.0),
        ("sum, all", torch.sum, (x,), 1.0),
        ("amax, rows", lambda x: x.amax(-1), (x,), 1.0),
        ("argmax, rows", lambda x: x.argmax(-1), (x,), 1.0),
        ("transposed copy", lambda x: x.t().contiguous(), (x,), 2.0),
        ("index_select", lambda x, i: x.index_select(0, i), (x, order), 2.0),
        ("masked_fill", lambda x, m: x.masked_fill(m, 0), (x, mask), 2.0 + 1 / x.element_size()),
        ("mm of 1024 x 1024", torch.mm, tuple(square), 0.0),
        ("dropout", lambda x: F.dropout(x, 0.1), (x,), 2.0 + 1 / x.element_size()),
    ):
        result[name] = (same, same, args, passes)
    result["silu_mul"] = (ops.silu_mul, lambda a, b: F.silu(a) * b, (x, y), 3.0)
    result["rms_norm"] = (
        ops.rms_norm,
        lambda x, w: F.rms_norm(x, (columns,), w, 1e-6),
        (x, weight),
        2.0,
    )
    result["rope"] = (
        ops.rotary_embedding,
        stock_rope,
        (query, key, sin, cos, 128, True),
        2.0 * (heads + 1) / heads,
    )
    return result


def seconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    torch.xpu.synchronize()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dtype", default="float32,bfloat16")
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--columns", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", default="")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    options = parser.parse_args()
    rows: list[list[str | float]] = []
    ipex_xpu_kernels.activate()
    ipex_xpu_kernels.set_kernel_mode("always")
    print(
        f"torch {torch.__version__}, {torch.xpu.get_device_name()}, {torch.get_num_threads()} threads"
    )
    print(f"{'op':18}{'dtype':10}{'xpu ms':>9}{'cpu ms':>9}{'ratio':>7}{'GB/s':>7}{'of DRAM':>9}")
    for name_of_dtype in options.dtype.split(","):
        dtype = getattr(torch, name_of_dtype)
        a, b, c = torch.randn(3, options.rows, options.columns, dtype=dtype)
        size = a.numel() * a.element_size()
        for name, (op, stock, args, passes) in cases(options.rows, options.columns, dtype).items():
            if options.only not in name:
                continue
            on_device = [t.to("xpu") if isinstance(t, Tensor) else t for t in args]
            calls = (
                lambda op=op, args=on_device: op(*args),
                lambda op=stock, args=args: op(*args),
                lambda a=a, b=b, c=c: torch.add(a, b, out=c),
            )
            times = [[seconds(call) for call in calls] for _ in range(options.rounds + 1)][1:]
            device, host, copy = (min(column) for column in zip(*times, strict=True))
            rate, dram = passes * size / device / 1e9, 3 * size / copy / 1e9
            row = [name, name_of_dtype, device * 1e3, host * 1e3, host / device, rate, rate / dram]
            rows.append([round(v, 3) if isinstance(v, float) else v for v in row])
            print(
                f"{name:18}{name_of_dtype:10}{device * 1e3:9.2f}{host * 1e3:9.2f}{host / device:7.2f}"
                f"{rate:7.1f}{rate / dram:9.0%}",
                flush=True,
            )
    if options.json:
        options.json.write_text(json.dumps(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
