# SPDX-License-Identifier: Apache-2.0
"""Train a recommendation model (DLRM) on a file in the format of the Criteo data sets.

Without --data a small file is generated. The tables take their steps in the backward pass and are split in bfloat16;
the linear layers are prepared by ipex.optimize.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import criteo
import torch
from session import DTYPES, Session, parser, positive
from torch import nn

import ipex
from ipex.nn.functional import interaction
from ipex.nn.modules import MergedEmbeddingBagWithSGD
from ipex_core.metrics import roc_auc_score

Tensor = torch.Tensor


def mlp(*sizes: int, last: bool) -> nn.Sequential:
    """Return linear layers with ReLU; ``last`` is False if there is none behind the last."""
    layers: list[nn.Module] = []
    for i, (before, after) in enumerate(itertools.pairwise(sizes)):
        layers.append(nn.Linear(before, after))
        if last or i + 2 < len(sizes):
            layers.append(nn.ReLU())
    return nn.Sequential(*layers)


class Dense(nn.Module):
    """The two stacks of linear layers and the interaction between them."""

    def __init__(self, dim: int, bottom: list[int], top: list[int]) -> None:
        super().__init__()
        vectors = criteo.CATEGORIES + 1
        self.bottom = mlp(criteo.INTEGERS, *bottom, dim, last=True)
        self.top = mlp(dim + vectors * (vectors - 1) // 2, *top, 1, last=False)

    def forward(self, x: Tensor, bags: tuple[Tensor, ...]) -> Tensor:
        """Return logits ``[B]`` of integers ``[B, 13]`` and of the bags of 26 tables."""
        x = self.bottom(x)
        return self.top(interaction(x, *(bag.to(x.dtype) for bag in bags)))[:, 0]


def main() -> None:
    """Run the example."""
    options = parser(__doc__)
    options.add_argument("--data", type=Path, help="file of tab-separated values, may be .gz")
    options.add_argument("--rows", type=positive, default=1000, help="rows of each table")
    options.add_argument("--dim", type=positive, default=16, help="numbers in a row")
    options.add_argument("--lr", type=float, default=0.05)
    args = options.parse_args()
    torch.manual_seed(args.seed)
    if args.rows < 2:
        options.error(f"--rows must be 2 or more, got {args.rows}")
    if args.data is None:
        args.data = args.out / "criteo.tsv"
        if not args.data.exists():
            criteo.generate(args.data, max(4000, 4 * args.batch))

    tables = MergedEmbeddingBagWithSGD.from_embeddingbag_list(
        [nn.EmbeddingBag(args.rows, args.dim, mode="sum") for _ in range(criteo.CATEGORIES)],
        lr=args.lr,
    )
    for weight in tables.weights:
        nn.init.uniform_(weight, -(args.rows**-0.5), args.rows**-0.5)
    dense = Dense(args.dim, [64, 32], [64, 32]).train()
    optimizer = torch.optim.SGD(dense.parameters(), lr=args.lr)
    dtype = DTYPES[args.dtype]
    dense, optimizer = ipex.optimize(dense, optimizer=optimizer, dtype=dtype, inplace=True)
    if dtype is not None:
        tables.to_bfloat16_train()

    session = Session(args, {"dense": dense, "tables": tables, "optimizer": optimizer}, "dlrm")
    source = criteo.batches(args.data, args.batch, args.rows, start=len(session.losses))
    starts = [torch.arange(args.batch)] * criteo.CATEGORIES
    seen: list[tuple[Tensor, Tensor]] = []
    empty = [(torch.empty(0), torch.empty(0))]

    def step(_: int) -> float:
        batch = next(source)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype is not None):
            logits = dense(batch.dense, tables(list(batch.rows), starts)).float()
        loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)
        loss.backward()  # the tables have taken their step
        optimizer.step()
        seen.append((batch.labels, logits.detach()))  # before the step: nothing was trained on
        return float(loss.detach())

    losses = session.run(step)
    labels, logits = (torch.cat([pair[i] for pair in seen[-20:] or empty]) for i in range(2))
    both = labels.unique().numel() == 2
    session.report(
        steps=len(losses),
        loss=losses[-1],
        auc_of_last_steps=roc_auc_score(labels, logits) if both else None,
    )


if __name__ == "__main__":
    main()
