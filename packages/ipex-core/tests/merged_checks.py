# SPDX-License-Identifier: Apache-2.0
"""What the tests of merged embedding tables share."""

from __future__ import annotations

import torch

ROWS, DIM, BAGS = (20, 7, 50), 9, 6


def stock_tables(mode="sum", dtype=torch.float32, **options):
    torch.manual_seed(0)
    return [torch.nn.EmbeddingBag(n, DIM, mode=mode, dtype=dtype, **options) for n in ROWS]


def lookups(seed=0, dtype=torch.int64, last=False):
    """Indices, many of them repeated, and offsets, with empty bags."""
    torch.manual_seed(seed)
    indices, offsets = [], []
    for n in ROWS:
        ends = torch.tensor([0, *torch.randint(0, 5, (BAGS,)).tolist()]).cumsum(0)
        indices.append(torch.randint(n, (int(ends[-1]),)).to(dtype))
        offsets.append((ends if last else ends[:-1]).to(dtype))
    return indices, offsets


def loss_of(bags):
    return sum((value.float() * (i + 1)).square().sum() for i, value in enumerate(bags))
