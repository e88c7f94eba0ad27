# SPDX-License-Identifier: Apache-2.0
"""Ops on a GPU by this package's kernels, beside ``torch.cuda`` on the same card where there is one.

    python gpu.py xpu --json xpu.json        # in the environment of tools/xpu_gpu/run.sh
    python gpu.py cuda --json cuda.json      # with torch's own CUDA device
    python gpu.py compare xpu.json cuda.json

One process cannot hold both devices, so they run in turns: A B A B, and `compare` takes the medians. The rate of memory
is the rate of a copy of 256 MiB in the same process; products are in TFLOP/s.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

_ROWS, _COLUMNS = 8192, 8192  # 128 MiB in bfloat16


def cases(device: str, dtype: torch.dtype) -> Iterator[tuple[str, Callable[[], Any], float, float]]:
    """Yield name, call, bytes moved and floating-point operations."""
    x, y = (torch.randn(_ROWS, _COLUMNS, device=device, dtype=dtype) for _ in range(2))
    weight = torch.ones(_COLUMNS, device=device, dtype=dtype)
    size = float(x.numel() * x.element_size())
    yield "add", lambda: x + y, 3 * size, 0
    yield "gelu", lambda: F.gelu(x), 2 * size, 0
    yield "layer_norm", lambda: F.layer_norm(x, (_COLUMNS,), weight, weight), 2 * size, 0
    yield "softmax", lambda: x.softmax(-1), 2 * size, 0
    yield "sum, rows", lambda: x.sum(-1), size, 0
    yield "sum, columns", lambda: x.sum(0), size, 0
    yield "sum, all", lambda: x.sum(), size, 0
    a, b = (torch.randn(4096, 4096, device=device, dtype=dtype) for _ in range(2))
    yield "mm of 4096", lambda: a @ b, 0, 2.0 * 4096**3
    c, d = (torch.randn(64, 1024, 1024, device=device, dtype=dtype) for _ in range(2))
    yield "bmm of 64 x 1024", lambda: torch.bmm(c, d), 0, 2.0 * 64 * 1024**3
    q = torch.randn(4, 16, 2048, 64, device=device, dtype=dtype)
    yield (
        "attention, 4 x 16 heads of 2048 x 64",
        lambda: F.scaled_dot_product_attention(q, q, q),
        0,
        4.0 * 4 * 16 * 2048**2 * 64,
    )
    tiny = torch.ones(8, device=device, dtype=dtype)
    yield "launch (add of 8 elements)", lambda: tiny + tiny, 0, 0
    if device == "xpu":
        yield from language_cases(dtype)


def language_cases(
    dtype: torch.dtype,
) -> Iterator[tuple[str, Callable[[], Any], float, float]]:
    """Yield ops of language models, which torch.cuda does not have: one token of each of some sequences.

    Lengths and tables are the same tensors at each call, as the layers of a model share them.
    """
    from ipex_core.ops.woq_weight import woq_weight

    ops = torch.ops.ipex
    x, y = (torch.randn(_ROWS, _COLUMNS, device="xpu", dtype=dtype) for _ in range(2))
    weight = torch.ones(_COLUMNS, device="xpu", dtype=dtype)
    size = float(x.numel() * x.element_size())
    yield "rms_norm", lambda: ops.rms_norm(x, weight, 1e-6), 2 * size, 0
    yield "silu_mul", lambda: ops.silu_mul(x, y), 3 * size, 0
    for sequences in (8, 64):
        yield from decoding_cases(dtype, sequences)
    sequences = 8
    rows = torch.randn(sequences, 4096, device="xpu", dtype=dtype)
    large = torch.randn(1, 8192, device="xpu", dtype=dtype)
    for form in ("int8", "int4"):
        packed = many_features(woq_weight(32, 8192, form, 128), 2048).to("xpu")
        yield (
            f"woq_linear, 1 x 8192 x 65536, {form}",
            lambda packed=packed: ops.woq_linear(large, packed, 65536),
            65536.0 * 8192 / (2 if form == "int4" else 1),
            0,
        )
    for form in ("int8", "int4", "fp8_e4m3"):
        packed = woq_weight(11008, 4096, form, 128).to("xpu")
        moved = 11008.0 * 4096 / (2 if form == "int4" else 1)
        for count in (1, sequences):
            yield (
                f"woq_linear, {count} x 4096 x 11008, {form}",
                lambda packed=packed, count=count: ops.woq_linear(rows[:count], packed, 11008),
                moved,
                0,
            )


def many_features(packed: torch.Tensor, times: int) -> torch.Tensor:
    """Return a packed weight with the 32 features of one again and again, which takes no time to pack."""
    head, strips = packed[:64].clone(), packed[64:]
    head[16:24] = torch.tensor(list((32 * times).to_bytes(8, "little")), dtype=torch.uint8)
    return torch.cat([head, strips.repeat(times)])


def decoding_cases(
    dtype: torch.dtype, sequences: int
) -> Iterator[tuple[str, Callable[[], Any], float, float]]:
    """Yield attention of one query for each sequence to paged caches."""
    context, block, heads, shared, width = 4096, 32, 32, 8, 128
    blocks = sequences * context // block
    table = torch.randperm(blocks).view(sequences, -1).int().to("xpu")
    lengths = torch.full((sequences,), context, dtype=torch.int32, device="xpu")
    query = torch.randn(sequences, heads, width, device="xpu", dtype=dtype)
    out = torch.empty_like(query)
    for stored in (dtype, torch.int8):
        shape = (blocks, shared, block, width)
        if stored == torch.int8:
            one = torch.randint(-99, 99, (1, *shape[1:]), dtype=stored)
            caches = [one.repeat(blocks, 1, 1, 1).to("xpu") for _ in range(2)]
        else:
            caches = [torch.randn(shape, device="xpu", dtype=stored) for _ in range(2)]
        name = "own dtype" if stored == dtype else "int8"
        moved = 2.0 * caches[0].numel() * stored.itemsize
        scale = 1.0 if stored == dtype else 0.01
        yield (
            f"decoding, {sequences} x 4096 keys of 8 heads of 128, {name}",
            lambda caches=caches, scale=scale: torch.ops.ipex.single_query_cached_kv_attention(
                *(out, query, *caches, None, 0.1, table, lengths, block, context, None),
                *(-1, scale, scale),
            ),
            moved,
            0,
        )


def seconds(call: Callable[[], Any], synchronize: Callable[[], None]) -> float:
    """Return the seconds of one call, from as many in a row as take some 50 ms."""
    call()
    synchronize()
    start = time.perf_counter()
    call()
    synchronize()
    count = max(3, min(2000, int(0.05 / max(time.perf_counter() - start, 1e-6))))
    start = time.perf_counter()
    for _ in range(count):
        call()
    synchronize()
    return (time.perf_counter() - start) / count


def kernels_us(call: Callable[[], Any]) -> float:
    """Return the microseconds of the kernels of one call, the median of five."""
    import ipex_xpu_kernels

    found = []
    for _ in range(5):
        with ipex_xpu_kernels.kernel_times() as times:
            call()
        found.append(sum(time for _, time in times.totals().values()))
    return statistics.median(found)


def measure(device: str) -> list[dict[str, Any]]:
    """Return a row for each op and dtype."""
    if device == "xpu":
        import ipex_xpu_kernels

        ipex_xpu_kernels.activate()
    synchronize = getattr(torch, device).synchronize
    source = torch.empty(256 << 20, device=device, dtype=torch.uint8)
    target = torch.empty_like(source)
    copy = 2 * source.numel() / seconds(lambda: target.copy_(source), synchronize)
    rows = []
    with torch.no_grad():
        for dtype in (torch.float32, torch.bfloat16):
            for name, call, moved, operations in cases(device, dtype):
                time_ = seconds(call, synchronize)
                row = {
                    "op": name,
                    "dtype": str(dtype).removeprefix("torch."),
                    "us": time_ * 1e6,
                    "kernels_us": kernels_us(call) if device == "xpu" else 0.0,
                    "of_copy": moved / time_ / copy,
                    "tflops": operations / time_ / 1e12,
                }
                rows.append(row)
                print(json.dumps(row), flush=True)
    return rows


def compare(files: list[Path]) -> None:
    """Print the medians of the files of both devices beside each other."""
    times: dict[tuple[str, str], dict[str, list[dict[str, Any]]]] = {}
    for file in files:
        found = json.loads(file.read_text(encoding="utf-8"))
        for row in found["rows"]:
            by_device = times.setdefault((row["op"], row["dtype"]), {"xpu": [], "cuda": []})
            by_device[found["device"]].append(row)
    print(
        "| Op | dtype | xpu us | its kernels | of the copy | TFLOP/s | torch.cuda us | xpu's speed of torch.cuda's |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for (op, dtype), both in times.items():
        mine, other = (
            statistics.median(r["us"] for r in both[d]) if both[d] else float("nan")
            for d in ("xpu", "cuda")
        )
        if not both["xpu"]:
            continue
        share = statistics.median(r["of_copy"] for r in both["xpu"])
        flops = statistics.median(r["tflops"] for r in both["xpu"])
        own = statistics.median(r["kernels_us"] for r in both["xpu"])
        print(
            f"| {op} | {dtype} | {mine:.1f} | {own:.1f} | {f'{share:.0%}' if share else ''}"
            f" | {f'{flops:.1f}' if flops else ''}"
            + (f" | {other:.1f} | {other / mine:.0%} |" if both["cuda"] else " | | |")
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=("xpu", "cuda", "compare"))
    parser.add_argument("files", nargs="*", type=Path, help="of compare")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    options = parser.parse_args()
    if options.what == "compare":
        return compare(options.files)
    rows = measure(options.what)
    if options.json:
        options.json.write_text(json.dumps({"device": options.what, "rows": rows}), "utf-8")
    return None


if __name__ == "__main__":
    main()
