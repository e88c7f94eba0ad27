# SPDX-License-Identifier: Apache-2.0
"""Ops with dropout and gradients of transformer blocks: wrong arguments, statistics, gradients."""

from __future__ import annotations

from typing import Any

import pytest
import refusals
import torch

import ipex_core  # noqa: F401
from ipex_core.library.kernels import specs

ops = torch.ops.ipex
X = torch.ones(3, 8)
W = torch.ones(8)
SEED = torch.tensor(1)

BAD: list[tuple[str, tuple[Any, ...], str]] = [
    ("dropout", (X.int(), 0.1, SEED), "x must have dtype"),
    ("dropout", (X, 1.0, SEED), r"p must be in \[0, 1\), got 1"),
    ("dropout", (X, -0.5, SEED), r"p must be in \[0, 1\), got -0.5"),
    ("dropout", (X, float("nan"), SEED), r"p must be in \[0, 1\), got nan"),
    ("dropout", (X, 0.1, SEED.int()), "seed must have dtype int64, got int32"),
    ("dropout", (X, 0.1, torch.ones(2).long()), "seed must have one element, got 2"),
    ("dropout", (X, 0.1, SEED, -1), r"stream must be in \[0, 2\^31\), got -1"),
    ("dropout", (X, 0.1, SEED, 1 << 31), "stream must be in"),
    ("dropout_add_layer_norm", (X, X[:2], W, W, 0.1, SEED), "residual must have the shape"),
    ("dropout_add_layer_norm", (X, X, W[:3], W, 0.1, SEED), "weight must be 1-D of size"),
    ("dropout_add_layer_norm", (X, X, W, W.half(), 0.1, SEED), "bias must have the dtype"),
    (
        "dropout_add_layer_norm_backward",
        (X, X[:2], W, 0.1, SEED),
        "sum must have the shape of grad",
    ),
    ("dropout_add_layer_norm_backward", (X, X, W, 2.0, SEED), "p must be in"),
    ("gelu_backward", (X, X.half()), "x must have the dtype of grad = float32, got float16"),
    ("gelu_backward", (X, X, "erf"), "approximate must be 'none' or 'tanh', got 'erf'"),
    ("softmax_dropout_backward", (X, X[:1], 1.0, 0.1, SEED), "probs must have the shape of grad"),
    ("softmax_dropout_backward", (X, X, 1.0, 1.5, SEED), "p must be in"),
]


@refusals.each(BAD)
def test_bad_input(op: str, args: tuple[Any, ...], text: str) -> None:
    refusals.assert_refused(op, args, text)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_share_of_dropped_elements(dtype: torch.dtype) -> None:
    x = torch.ones(400, 250, dtype=dtype)
    y = ops.dropout(x, 0.25, SEED).float()
    dropped = y == 0
    torch.testing.assert_close(y[~dropped], torch.full_like(y[~dropped], 4 / 3), rtol=4e-3, atol=0)
    # Standard deviations of the shares: 0.0014 of all, 0.022 of a column, 0.027 of a row.
    assert abs(dropped.double().mean() - 0.25) < 0.007
    assert (dropped.double().mean(0) - 0.25).abs().max() < 0.11
    assert (dropped.double().mean(1) - 0.25).abs().max() < 0.14
    others = [ops.dropout(x, 0.25, torch.tensor(2)), ops.dropout(x, 0.25, SEED, 1)]
    for other in others:  # independent: both dropped with probability 1/16
        both = dropped & (other == 0)
        assert abs(both.double().mean() - 0.0625) < 0.005


def test_gradients() -> None:
    x, r = torch.randn(5, 40), torch.randn(5, 40)
    w, b = torch.randn(40), torch.randn(40)
    spec = specs()["dropout_add_layer_norm"]
    grads = [torch.randn(5, 40), torch.randn(5, 40)]
    results = []
    for function in (spec.op, spec.reference):
        leaves = [t.clone().requires_grad_() for t in (x, r, w, b)]
        out = function(*leaves, 0.3, SEED, 2, 1e-5)
        results.append(torch.autograd.grad(out, leaves, grads))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    leaf = x.clone().requires_grad_()
    (got,) = torch.autograd.grad(ops.dropout(leaf, 0.3, SEED), leaf, grads[0])
    torch.testing.assert_close(got, ops.dropout(grads[0], 0.3, SEED))


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu_backward_in_float32(approximate: str) -> None:
    """The tolerance of the specification is that of sums in 16-bit types."""
    x = torch.linspace(-12, 12, 4096).reshape(64, 64)
    grad = torch.randn(64, 64)
    dx, columns = ops.gelu_backward(grad, x, approximate)
    want = torch.ops.aten.gelu_backward(grad.double(), x.double(), approximate=approximate)
    torch.testing.assert_close(dx.double(), want, rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(columns.double(), want.sum(0), rtol=1e-5, atol=2e-5)
