# SPDX-License-Identifier: Apache-2.0
"""Choice of tokens: wrong arguments, limits of any size, and the distribution of what is drawn."""

from __future__ import annotations

import math

import hypothesis
import pytest
import refusals
import torch
from hypothesis import strategies as st

import ipex_core  # noqa: F401
from ipex_core.library.kernels import specs

ops = torch.ops.ipex
X = torch.zeros(2, 5)
U = torch.tensor([0.1, 0.9])


def bad_calls():
    op = "sample_token"
    yield op, (X.double(), U), "logits must have dtype"
    yield op, (torch.tensor(1.0), U), "logits must have at least 1"
    yield op, (X[:, :0], U), "logits must have between 1 and"
    yield op, (X, U[:1]), "noise must have the shape of logits"
    yield op, (X, U.double()), "noise must have dtype float32"
    yield op, (X, U + 0.1), "noise must be in \\[0, 1\\)"
    yield op, (X, U - 0.2), "noise must be in"
    yield op, (X, U * math.nan), "noise must be in"
    yield op, (X, U, 0.0), "temperature must be in .*, got 0"
    yield op, (X, U, -0.5), "temperature must be in .*, got -0.5"
    yield op, (X, U, math.inf), "temperature must be in .*, got inf"
    yield op, (X, U, 1.0, -1), "top_k must be at least 0, got -1"
    yield op, (X, U, 1.0, 0, 1.5), "top_p must be in \\[0, 1\\], got 1.5"
    yield op, (X, U, 1.0, 0, 1.0, -0.25), "min_p must be in \\[0, 1\\], got -0.25"
    for value in (math.nan, math.inf):
        bad = X.clone()
        bad[1, 2] = value
        yield op, (bad, U), "logits must have a finite maximum .* in row 1"
    yield op, (X - math.inf, U), "logits must have a finite maximum .* in row 0"
    yield "argmax", (X[:, :0],), "x must have a last dimension that is not empty"
    yield "argmax", (X.long(),), "x must have dtype"


@refusals.each(bad_calls())
def test_bad_input(op, args, text):
    refusals.assert_refused(op, args, text)


def kept_tokens(logits, **limits):
    """Return all tokens that some noise draws from one row."""
    noise = torch.linspace(0, 1, 20001)[:-1]
    return set(ops.sample_token(logits.expand(20000, -1), noise, **limits).tolist())


def test_limits_keep_what_they_say(level):
    p = torch.tensor([0.1, 0.4, 0.02, 0.3, 0.18])
    logits = p.log()
    assert kept_tokens(logits) == {0, 1, 2, 3, 4}
    assert kept_tokens(logits, top_k=2) == {1, 3}
    assert kept_tokens(logits, top_k=5) == {0, 1, 2, 3, 4}
    assert kept_tokens(logits, top_p=0.69) == {1, 3}
    assert kept_tokens(logits, top_p=0.71) == {1, 3, 4}
    assert kept_tokens(logits, top_p=0.0) == {1}
    assert kept_tokens(logits, min_p=0.5) == {1, 3}
    assert kept_tokens(logits, min_p=1.0) == {1}
    # top_p counts in what top_k has left: 0.4 / 0.88 < 0.5 <= 0.7 / 0.88.
    assert kept_tokens(logits, top_k=3, top_p=0.5) == {1, 3}
    assert kept_tokens(logits, top_k=3, top_p=0.45) == {1}
    assert kept_tokens(torch.tensor([1.0, 3.0, 3.0, 0.0]), top_k=1) == {1, 2}  # a tie


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("limits", [{}, {"top_k": 30}, {"top_p": 0.9}, {"min_p": 0.05}], ids=str)
def test_distribution(limits, dtype, level):
    """Chi-square against the probabilities of the limited softmax."""
    logits = (torch.randn(1300, generator=torch.Generator().manual_seed(1)) * 2).to(dtype)
    draws = 20000
    noise = torch.rand(draws, generator=torch.Generator().manual_seed(2))
    rows = logits.expand(draws, -1)
    tokens = torch.cat(
        [
            ops.sample_token(r, u, 0.8, **limits)
            for r, u in zip(rows.split(2000), noise.split(2000), strict=True)
        ]
    )
    scores = logits.double() / 0.8
    order = scores.sort(descending=True)
    keep = torch.ones(1300, dtype=torch.bool)
    if "top_k" in limits:
        keep = scores >= order.values[29]
    if "top_p" in limits:
        mass = order.values.softmax(-1)
        keep = scores >= order.values[(mass.cumsum(0) - mass) < 0.9].min()
    if "min_p" in limits:
        keep = (scores - scores.max()).exp() >= 0.05
    expected = torch.where(keep, scores, -torch.inf).softmax(-1) * draws
    counts = torch.bincount(tokens, minlength=1300).double()
    assert not counts[~keep].any()
    # Cells with few expected draws are put together.
    big = expected >= 10
    cells = torch.stack([expected[big], counts[big]])
    rest = torch.tensor([[expected[~big].sum()], [counts[~big].sum()]])
    cells = torch.cat([cells, rest], 1) if rest[0] > 0 else cells
    chi2 = float(((cells[1] - cells[0]) ** 2 / cells[0]).sum())
    freedom = cells.shape[1] - 1
    assert chi2 < freedom + 5 * math.sqrt(2 * freedom)


@hypothesis.given(
    seed=st.integers(0, 10**6),
    columns=st.integers(1, 1500),
    top_k=st.integers(0, 2000),
    top_p=st.sampled_from([0.0, 0.1, 0.5, 0.93, 1.0]),
    min_p=st.sampled_from([0.0, 0.003, 0.3]),
    scale=st.sampled_from([0.1, 1.0, 10.0]),
)
@hypothesis.settings(max_examples=80, deadline=None)
def test_any_limits(seed, columns, top_k, top_p, min_p, scale):
    """The token of the reference, or where noise meets the border of two tokens a neighbor of it."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(4, columns, generator=generator) * scale
    noise = torch.rand(4, generator=generator)
    got = ops.sample_token(logits, noise, 0.9, top_k, top_p, min_p)
    reference = specs()["sample_token"].reference
    near = [
        reference(
            logits.double(), (noise.double() + d).clamp(0, 1 - 1e-9), 0.9, top_k, top_p, min_p
        )
        for d in (-2e-6, 0.0, 2e-6)
    ]
    assert all(bool(((got >= low) & (got <= high)).all()) for low, high in [(near[0], near[2])])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_whole_vocabulary(dtype, level):
    logits = (torch.randn(3, 128256, generator=torch.Generator().manual_seed(5)) * 3).to(dtype)
    noise = torch.tensor([0.0, 0.37, 0.999])
    for limits in (
        (1.0,),
        (0.7, 50),
        (0.7, 0, 0.9),
        (3, 0, 0.95),
        (0.7, 300, 0.9, 0.01),
        (0.7, 5000),
    ):
        got = ops.sample_token(logits, noise, *limits)
        low, high = (
            specs()["sample_token"].reference(
                logits.double(), (noise.double() + d).clamp(0, 1 - 1e-9), *limits
            )
            for d in (-1e-5, 1e-5)
        )
        assert bool(((got >= low) & (got <= high)).all())
    assert torch.equal(ops.argmax(logits), logits.argmax(-1))
