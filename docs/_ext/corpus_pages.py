# SPDX-License-Identifier: Apache-2.0
"""The results of ``ipex bench corpus``: for each machine a summary, a picture of each op, and what is slower."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from pathlib import Path

from ipex_bench import corpus
from performance_charts import Dot, scatter

__all__ = ["page"]

NOTHING = "This tree has no results of it.\n"
#: What the sizes of the pictures are.
SIZES = {
    "linear": "rows x in x out",
    "bmm": "batch x m x k x n",
    "attention": "batch x heads x queries x keys x head size",
    "convolution": "products of two numbers",
    "optimizer": "parameters",
    "embedding_bag": "bags x lookups x row size",
    "embedding_update": "tables x bags x lookups x row size",
}


def page(files: Iterable[Path]) -> str:
    """Return the part of the page with all machines."""
    return "\n".join(_machine(*corpus.read(file)) for file in files) or NOTHING


def _machine(facts: dict[str, object], results: list[corpus.Measured]) -> str:
    threads = sorted({result.threads for result in results})
    counts = " and ".join(map(str, threads))
    lines = [
        f"### {facts['cpu']}",
        "",
        f"Level `{facts['level']}`, {facts['cpus']} CPUs, torch {facts['torch']}, {counts} threads,"
        f" measured {str(facts['time'])[:10]}; {len(results)} cases.",
        "",
        "| Op | Dtype | Threads | Cases | Median | Least | Against oneDNN, least | Below 0.97 |",
        "|---|---|---|---|---|---|---|---|",
    ]
    groups: dict[tuple[str, str, int], list[corpus.Measured]] = {}
    for result in results:
        groups.setdefault((result.op, result.dtype, result.threads), []).append(result)
    for (op, dtype, count), group in sorted(groups.items()):
        ratios = [result.ratio[0] for result in group]
        onednn = [result.onednn[0] for result in group if result.onednn is not None]
        cells = [f"`{op}`", dtype, count, len(group), f"{statistics.median(ratios):.2f}"]
        cells += [f"{min(ratios):.2f}", f"{min(onednn):.2f}" if onednn else "-"]
        cells.append(sum(result.slower for result in group))
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    lines += ["", *_pictures(results), *_slower(results)]
    return "\n".join(lines) + "\n"


def _pictures(results: list[corpus.Measured]) -> list[str]:
    lines = []
    for op in dict.fromkeys(result.op for result in results):
        dots = [
            Dot(
                corpus.amount(result.op, result.sizes),
                result.ratio[0],
                f"{result.sizes}, {result.dtype}, {result.threads} threads: {result.ratio[0]:.2f}",
                ours=result.threads == 1,
            )
            for result in results
            if result.op == op
        ]
        what = SIZES.get(op, "elements")
        text = f"{op}: times as fast as stock PyTorch over {what}; blue: one thread, gray: all threads."
        lines += [f"**`{op}`**", "", scatter(dots, text), ""]
    return lines


def _slower(results: list[corpus.Measured]) -> list[str]:
    rows = [result for result in results if result.slower]
    if not rows:
        return ["No case is below 0.97 of stock PyTorch or oneDNN beyond its spread.", ""]
    lines = [
        "Cases below 0.97 beyond their spread:",
        "",
        "| Op | Sizes | Dtype | Threads | Of stock | Of oneDNN |",
        "|---|---|---|---|---|---|",
    ]
    for r in sorted(rows, key=lambda one: one.worst):
        cells = [f"`{r.op}`", r.sizes, r.dtype, str(r.threads), _ratio(r.ratio), _ratio(r.onednn)]
        lines.append("| " + " | ".join(cells) + " |")
    return [*lines, ""]


def _ratio(found: tuple[float, float, float] | None) -> str:
    return "-" if found is None else f"{found[0]:.2f} ({found[1]:.2f}-{found[2]:.2f})"
