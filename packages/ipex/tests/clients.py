# SPDX-License-Identifier: Apache-2.0
"""What the tests of IPEX's clients share: tiny models, and a paged cache with the attention that is right.

A test stands for one project. What it calls was listed from the project's last release that used IPEX, in that order
and with that spelling of arguments; the test is ours. The shapes are small.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

Tensor = torch.Tensor

needs_llm = pytest.mark.skipif(
    importlib.util.find_spec("ipex_llm") is None, reason="ipex-llm is not installed"
)
needs_quant = pytest.mark.skipif(
    importlib.util.find_spec("ipex_quant") is None, reason="ipex-quant is not installed"
)
needs_runtime = pytest.mark.skipif(
    importlib.util.find_spec("ipex_runtime") is None, reason="ipex-runtime is not installed"
)


def mlp() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))


def conv() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU(), torch.nn.Dropout(0.1)
    )


def trains(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    x, target = torch.randn(8, 16), torch.randn(8, 4)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = torch.nn.functional.mse_loss(model(x).float(), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


class Paged:
    """Two sequences of 5 and 3 tokens in a paged cache, and their attention from stock operations."""

    heads, kv_heads, size, block = 4, 2, 8, 16
    lengths = (5, 3)

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(1)
        tokens = sum(self.lengths)
        self.query = torch.randn(tokens, self.heads, self.size, dtype=dtype)
        self.key = torch.randn(tokens, self.kv_heads, self.size, dtype=dtype)
        self.value = torch.randn_like(self.key)
        self.key_cache = torch.zeros(4, self.kv_heads, self.block, self.size, dtype=dtype)
        self.value_cache = torch.zeros_like(self.key_cache)
        self.tables = torch.tensor([[2], [0]], dtype=torch.int32)
        self.slots = torch.tensor([2 * 16 + i for i in range(5)] + list(range(3)))
        self.starts = torch.tensor([0, 5, 8], dtype=torch.int32)
        self.context = torch.tensor(self.lengths, dtype=torch.int32)
        self.head_mapping = (
            torch.arange(0, self.kv_heads, dtype=torch.int32)
            .view(self.kv_heads, 1)
            .repeat_interleave(self.heads // self.kv_heads)
            .flatten()
        )
        self.scale = 1 / math.sqrt(self.size)
        self.last = torch.tensor([4, 7])

    def new(self, out: Tensor) -> tuple[Any, ...]:
        """Return what varlen attention begins with, without a cache."""
        return self.query, self.key, self.value, out, self.starts, self.starts

    def cached(self, out: Tensor) -> tuple[Any, ...]:
        """Return what varlen attention over the cache begins with."""
        return out, self.query, self.key_cache, self.value_cache, self.starts, self.starts

    def step(self, out: Tensor, mapping: Any) -> tuple[Any, ...]:
        """Return what attention of the last tokens begins with; `mapping` says which heads share keys."""
        caches = (self.key_cache, self.value_cache)
        return out, self.query[self.last], *caches, mapping, self.scale, self.tables, self.context

    def check(self, call: Callable[[Tensor], object]) -> None:
        """Check what a call writes for all tokens."""
        out = torch.empty_like(self.query)
        call(out)
        torch.testing.assert_close(out, self.expected())

    def check_step(self, call: Callable[[Tensor], object]) -> None:
        """Check what a call writes for the last tokens."""
        out = torch.empty_like(self.query[self.last])
        call(out)
        torch.testing.assert_close(out, self.expected()[self.last])

    def expected(self) -> Tensor:
        parts = [x.split(self.lengths) for x in (self.query, self.key, self.value)]
        found = []
        for q, k, v in zip(*parts, strict=True):
            k, v = (x.repeat_interleave(self.heads // self.kv_heads, 1) for x in (k, v))
            out = torch.nn.functional.scaled_dot_product_attention(
                q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), is_causal=True
            )
            found.append(out.transpose(0, 1))
        return torch.cat(found)


def experts() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(2)
    w13, w2 = torch.randn(4, 64, 32) / 8, torch.randn(4, 32, 32) / 8
    return w13, w2, torch.randn(3, 32), torch.randn(3, 4)


def gptq(group: int = 32) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return qweight, scales, qzeros and g_idx of a layer [64 -> 16], and its weight."""
    torch.manual_seed(3)
    codes = torch.randint(0, 16, (64, 16), dtype=torch.int32)
    scales = torch.rand(64 // group, 16) / 16
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    qweight = (codes.view(8, 8, 16) << shifts.view(1, 8, 1)).sum(1, dtype=torch.int32)
    zeros = torch.full((64 // group, 16), 7, dtype=torch.int32)  # stored minus one
    qzeros = (zeros.view(-1, 2, 8) << shifts).sum(-1, dtype=torch.int32)
    g_idx = torch.arange(64, dtype=torch.int32) // group
    weight = (codes - 8) * scales[g_idx.long()]
    return qweight, scales, qzeros, g_idx, weight.T.contiguous()
