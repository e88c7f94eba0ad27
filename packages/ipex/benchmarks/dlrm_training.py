# SPDX-License-Identifier: Apache-2.0
"""One training step of a DLRM-shaped model: stock float32 with sparse gradients against ipex with split bfloat16.

26 tables of 100k rows of 128 numbers, a batch of 2048 samples with one lookup per table. Both sides take turns in one
process; needs 3 GB of memory.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

import ipex
from ipex.nn.functional import interaction
from ipex.nn.modules import MergedEmbeddingBagWithSGD

Tensor = torch.Tensor

TABLES, DIM, BATCH = 26, 128, 2048
Step = Callable[[int], list[float]]


def mlp(*sizes: int, last: bool) -> nn.Sequential:
    """Return linear layers with ReLU; ``last`` is False if there is none behind the last."""
    layers: list[nn.Module] = []
    for i, (before, after) in enumerate(itertools.pairwise(sizes)):
        layers.append(nn.Linear(before, after))
        if last or i + 2 < len(sizes):
            layers.append(nn.ReLU())
    return nn.Sequential(*layers)


class Dense(nn.Module):
    """The linear layers and the interaction."""

    def __init__(self, ours: bool) -> None:
        super().__init__()
        self.ours = ours
        self.bottom = mlp(13, 512, 256, DIM, last=True)
        self.top = mlp(DIM + (TABLES + 1) * TABLES // 2, 1024, 1024, 512, 256, 1, last=False)
        self.pairs = torch.tril_indices(TABLES + 1, TABLES + 1, -1)

    def forward(self, x: Tensor, bags: list[Tensor]) -> Tensor:
        """Return logits."""
        x = self.bottom(x)
        if self.ours:
            return self.top(interaction(x, *bags))[:, 0]
        vectors = torch.stack([x, *bags], 1)
        products = torch.bmm(vectors, vectors.mT)[:, self.pairs[0], self.pairs[1]]
        return self.top(torch.cat([x, products], 1))[:, 0]


def tables(rows: int, sparse: bool) -> list[nn.EmbeddingBag]:
    """Return equal tables at each call."""
    block = torch.randn(1000, DIM, generator=torch.Generator().manual_seed(0)) * 0.01
    weight = block.repeat(-(-rows // 1000), 1)[:rows]
    return [
        nn.EmbeddingBag(rows, DIM, mode="sum", sparse=sparse, _weight=weight.clone())
        for _ in range(TABLES)
    ]


def timed(*parts: Callable[[], None]) -> list[float]:
    """Run the parts of a step; return the time of each."""
    times = [time.perf_counter()]
    for part in parts:
        part()
        times.append(time.perf_counter())
    return [b - a for a, b in itertools.pairwise(times)]


def step_of(ours: bool, rows: int) -> Step:
    """Return a function that takes a step and returns the times of tables, forward, backward and optimizer."""
    chance = torch.Generator().manual_seed(1)
    batches = [
        (
            [torch.randint(rows, (BATCH,), generator=chance) for _ in range(TABLES)],
            torch.randn(BATCH, 13, generator=chance),
            torch.randint(2, (BATCH,), generator=chance).float(),
        )
        for _ in range(3)
    ]
    starts = [torch.arange(BATCH)] * TABLES
    torch.manual_seed(0)
    dense = Dense(ours).train()
    if ours:
        merged = MergedEmbeddingBagWithSGD.from_embeddingbag_list(tables(rows, False), lr=0.01)
        merged.to_bfloat16_train()
        merged.use_huge_pages()
        optimizer = torch.optim.SGD(dense.parameters(), lr=0.01)
        dense, optimizer = ipex.optimize(
            dense, optimizer=optimizer, dtype=torch.bfloat16, inplace=True
        )
    else:
        bags_of = nn.ModuleList(tables(rows, True))
        optimizer = torch.optim.SGD([*dense.parameters(), *bags_of.parameters()], lr=0.01)
    results: dict[str, object] = {}

    def step(number: int) -> list[float]:
        indices, x, labels = batches[number % 3]

        def look_up() -> None:
            optimizer.zero_grad()
            results["bags"] = (
                merged(indices, starts)
                if ours
                else [t(i, s) for t, i, s in zip(bags_of, indices, starts, strict=True)]
            )

        def forward() -> None:
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=ours):
                logits = dense(x, results["bags"]).float()
            results["loss"] = nn.functional.binary_cross_entropy_with_logits(logits, labels)

        return timed(look_up, forward, lambda: results["loss"].backward(), optimizer.step)

    return step


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rows", type=int, default=100_000)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    steps = {
        "stock float32": step_of(False, options.rows),
        "ipex bfloat16": step_of(True, options.rows),
    }
    times: dict[str, list[list[float]]] = {name: [] for name in steps}
    for number in range(options.steps + 2):
        for name, step in steps.items():
            found = step(number)
            if number > 1:
                times[name].append(found)
    for name, rows in times.items():
        parts = [statistics.median(column) * 1e3 for column in zip(*rows, strict=True)]
        words = ("tables", "forward", "backward", "optimizer")
        text = ", ".join(f"{w} {p:.1f}" for w, p in zip(words, parts, strict=True))
        print(f"{name}: {statistics.median(map(sum, rows)) * 1e3:.1f} ms ({text})")
    first, second = times.values()
    ratios = sorted(sum(a) / sum(b) for a, b in zip(first, second, strict=True))
    print(f"ratio {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})")


if __name__ == "__main__":
    main()
