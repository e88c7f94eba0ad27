# SPDX-License-Identifier: Apache-2.0
"""Recurrent layers with states in a cache: bad input, texts in pieces, rows of the states that are not theirs."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import refusals
import torch

import ipex_core  # noqa: F401

ops = torch.ops.ipex


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


#: Two texts of 3 and 2 rows: where they begin, what they have had, their rows of the state.
TEXTS = int32(0, 3, 5), int32(3, 7), int32(2, 0)
X, FILTER, HISTORY = torch.randn(5, 6), torch.randn(4, 6), torch.randn(3, 3, 6)
Q, V, GATES, HEADS = torch.randn(5, 2, 8), torch.randn(5, 4, 6), torch.randn(5, 4), torch.randn(4)
STATE = torch.randn(3, 4, 8, 6)


def delta(**changes: Any) -> tuple[Any, ...]:
    values = {"q": Q, "k": Q, "v": V, "a": GATES, "b": GATES, "A": -HEADS.exp(), "bias": HEADS}
    values |= {"state": STATE, **dict(zip(("starts", "lengths", "slots"), TEXTS, strict=True))}
    return (*(values | changes).values(), 0.5)


def scan(**changes: Any) -> tuple[Any, ...]:
    values = {"x": V, "dt": GATES, "A": -HEADS.exp(), "B": Q, "C": Q, "D": HEADS, "bias": HEADS}
    values |= {"state": STATE, **dict(zip(("starts", "lengths", "slots"), TEXTS, strict=True))}
    return tuple((values | changes).values())


def select(**changes: Any) -> tuple[Any, ...]:
    numbers = torch.randn(6)
    values = {"x": X, "dt": X, "A": -torch.rand(8, 6), "B": Q[:, 0], "C": Q[:, 1], "D": numbers}
    values |= {"bias": numbers, "state": STATE[:, 0]}
    values["state"] = values["state"].contiguous()
    values |= dict(zip(("starts", "lengths", "slots"), TEXTS, strict=True))
    return tuple((values | changes).values())


def means(**changes: Any) -> tuple[Any, ...]:
    values = {"x": X, "k": X, "decay": -torch.rand(6), "first": torch.rand(6)}
    values |= {"state": torch.rand(3, 3, 6)}
    values |= dict(zip(("starts", "lengths", "slots"), TEXTS, strict=True))
    return tuple((values | changes).values())


def bad_calls():
    wkv = "wkv_scan"
    yield wkv, means(x=X[0]), r"x must be 2-D \[T, E\], got 1-D"
    yield wkv, means(k=X[:, :5]), r"k must have shape \[5, 6\], got \[5, 5\]"
    yield wkv, means(decay=torch.rand(5)), r"decay must have shape \[6\], got \[5\]"
    yield wkv, means(first=torch.rand(6).half()), "first must have dtype float32, got float16"
    yield wkv, means(state=torch.rand(3, 2, 6)), r"state must have shape \[3, 3, 6\], got"
    yield wkv, means(slots=int32(0, 3)), r"slots must be in \[0, 3\), got \[0, 3\]"
    conv, rule, ssd = "causal_conv1d_varlen", "gated_delta_rule", "ssd_scan"
    one = "selective_scan_varlen"
    yield one, select(x=X[0]), r"x must be 2-D \[T, E\], got 1-D"
    yield one, select(dt=X[:, :5]), r"dt must have shape \[5, 6\], got \[5, 5\]"
    yield one, select(B=Q[:4, 0]), r"B must have shape \[5, N\], got \[4, 8\]"
    yield one, select(C=Q[:, 1, :7]), r"C must have shape \[5, 8\], got \[5, 7\]"
    yield one, select(A=-torch.rand(6, 8)), r"A must have shape \[8, 6\], got \[6, 8\]"
    yield one, select(A=torch.rand(8, 6).half()), "A must have dtype float32, got float16"
    yield one, select(D=torch.rand(5)), r"D must have shape \[6\], got \[5\]"
    yield one, select(state=STATE), r"state must have shape \[0, 8, 6\], got \[3, 4, 8, 6\]"
    yield one, select(state=STATE[:, 0]), "state must be contiguous, got strides"
    yield one, select(slots=int32(0, 3)), r"slots must be in \[0, 3\), got \[0, 3\]"
    rest = (None, "silu", *TEXTS)
    yield conv, (X[0], HISTORY, FILTER, *rest), r"x must be 2-D \[T, D\], got 1-D"
    yield conv, (X, HISTORY, FILTER.half(), *rest), "weight must have the dtype of x = float32 or"
    yield conv, (X, HISTORY, FILTER[:, :5], *rest), r"weight must have shape \[W, 6\] with W from"
    yield conv, (X, HISTORY.half(), FILTER, *rest), "conv_state must have the dtype of x = float32"
    yield conv, (X, HISTORY[:, 1:], FILTER, *rest), r"conv_state must have shape \[3, 3, 6\], got"
    wide = torch.randn(3, 6, 3).transpose(1, 2)
    yield conv, (X, wide, FILTER, *rest), r"conv_state must be contiguous, got strides \[18, 1, 3\]"
    yield conv, (X, HISTORY, FILTER, FILTER, *rest[1:]), r"bias must have shape \[6\]"
    yield conv, (X, HISTORY, FILTER, None, "relu", *TEXTS), "activation must be 'none' or 'silu'"
    yield rule, delta(v=V[0]), r"v must be 3-D \[T, H, width\], got 2-D"
    yield (
        rule,
        delta(q=torch.randn(5, 3, 8)),
        r"q must have shape \[5, G, width\] where G divides 4",
    )
    yield rule, delta(k=Q[..., :7]), r"k must have shape \[5, 2, 8\], got \[5, 2, 7\]"
    yield rule, delta(a=GATES[:4]), r"a must have shape \[5, 4\], got \[4, 4\]"
    yield rule, delta(a=torch.randn(5, 4, 7)), r"a must have shape \[5, 4, 8\], got \[5, 4, 7\]"
    yield rule, delta(a=torch.randn(5, 4, 8)), r"dt_bias must have shape \[4, 8\], got \[4\]"
    yield rule, (*delta(), True, 0.5), "lowest must be at most 0, got 0.5"
    yield rule, delta(A=HEADS.half()), "A must have dtype float32, got float16"
    yield rule, delta(state=STATE[..., :5]), r"state must have shape \[3, 4, 8, 6\], got"
    yield rule, delta(state=STATE.half()), "state must have dtype float32, got float16"
    yield rule, delta(starts=int32(0, 3, 4)), r"query_starts must rise from 0 to 5, got \[0, 3, 4\]"
    yield rule, delta(starts=int32(0, 5)), r"query_starts must have shape \[3\], got \[2\]"
    yield rule, delta(lengths=TEXTS[1].long()), "lengths must have dtype int32, got int64"
    yield rule, delta(lengths=int32(3, 1)), r"lengths must count the new rows, got \[3, 1\]"
    yield rule, delta(slots=int32(0, 3)), r"slots must be in \[0, 3\), got \[0, 3\]"
    yield ssd, scan(dt=GATES[:, :3]), r"dt must have shape \[5, 4\], got \[5, 3\]"
    yield ssd, scan(C=Q[:4]), r"C must have shape \[5, G, width\] where G divides 4, got"
    yield ssd, scan(D=HEADS[:3]), r"D must have shape \[4\], got \[3\]"
    yield ssd, (*scan(), 2.5, 1.5), "dt_min must be from 0 to dt_max = 1.5, got 2.5"


@refusals.each(bad_calls())
def test_bad_input(op: str, args: tuple[Any, ...], text: str) -> None:
    refusals.assert_refused(op, args, text)


def pieces(total: int, cuts: list[int]) -> list[tuple[int, int]]:
    edges = [0, *cuts, total]
    return [(a, b) for a, b in itertools.pairwise(edges) if b > a]


@pytest.mark.parametrize("cuts", [[1], [7, 8, 9], [16], list(range(1, 20))], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pieces_are_the_whole(cuts: list[int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    rows, heads, width, size = 20, 4, 24, 40
    x = torch.randn(rows, 48, dtype=dtype)
    q = torch.randn(rows, 2, width, dtype=dtype)
    v, gate = torch.randn(rows, heads, size, dtype=dtype), torch.randn(rows, heads, dtype=dtype)
    vectors = -torch.rand(heads), torch.randn(heads)
    steps, biases = torch.randn(rows, heads, width, dtype=dtype), torch.randn(heads, width)
    lowest = -3.0 if len(cuts) > 1 else 0.0

    def run(op: str, first: int, last: int, state: torch.Tensor) -> torch.Tensor:
        texts = int32(0, last - first), int32(last), int32(1)
        part = slice(first, last)
        if op == "conv":
            weight = torch.linspace(-1, 1, 4 * 48).view(4, 48)
            return ops.causal_conv1d_varlen(x[part], state, weight, None, "silu", *texts)
        if op == "select":
            key, numbers = q[part, 0], torch.linspace(-1, 1, 48)
            rates = -torch.linspace(0.1, 2, width * 48).view(width, 48)
            rest = (rates, key, key, numbers, numbers, state, *texts)
            return ops.selective_scan_varlen(x[part], x[part], *rest)
        if op == "rule":
            rest = (gate[part], gate[part], *vectors, state, *texts, 0.3)
            return ops.gated_delta_rule(q[part], q[part], v[part], *rest)
        if op == "each":
            rest = (gate[part], vectors[0], biases, state, *texts, 0.3, True, lowest)
            return ops.gated_delta_rule(q[part], q[part], v[part], steps[part], *rest)
        rest = (q[part], q[part], vectors[1], vectors[1], state, *texts)
        return ops.ssd_scan(v[part], gate[part], vectors[0], *rest)

    for op, shape in (
        ("conv", (3, 48)),
        ("rule", (heads, width, size)),
        ("each", (heads, width, size)),
        ("scan", (heads, width, size)),
        ("select", (width, 48)),
    ):
        kind = dtype if op == "conv" else torch.float32
        # What is in the row before is not read: the text begins.
        states = [torch.full((3, *shape), float("nan"), dtype=kind) for _ in range(2)]
        want = run(op, 0, rows, states[0])
        got = torch.cat([run(op, a, b, states[1]) for a, b in pieces(rows, cuts)])
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4 if kind == dtype else 2e-2)
        torch.testing.assert_close(states[1][1], states[0][1], rtol=1e-4, atol=1e-4)
        assert got.isfinite().all() and states[1][[0, 2]].isnan().all()


def test_the_selective_scan_is_that_of_whole_batches() -> None:
    torch.manual_seed(1)
    rows, channels, width = 11, 70, 16
    u, dt, b, c = (torch.randn(2, n, rows) for n in (channels, channels, width, width))
    rates, skip, bias = -torch.rand(channels, width), torch.randn(channels), torch.randn(channels)
    want, last = ops.selective_scan_fn(u, dt, rates, b, c, skip, None, bias, True)
    flat = [t.transpose(1, 2).reshape(2 * rows, -1).contiguous() for t in (u, dt, b, c)]
    state = torch.zeros(2, width, channels)
    texts = int32(0, rows, 2 * rows), int32(rows, rows), int32(1, 0)
    rest = (skip, bias, state, *texts)
    y = ops.selective_scan_varlen(*flat[:2], rates.t().contiguous(), *flat[2:], *rest)
    torch.testing.assert_close(y.view(2, rows, -1).transpose(1, 2), want, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(state[[1, 0]].transpose(1, 2), last, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("lowest", [0.0, -3.0])
def test_equal_steps_of_all_keys_are_one_step(lowest: float) -> None:
    torch.manual_seed(2)
    wide = GATES.unsqueeze(-1).expand(-1, -1, 8), HEADS.unsqueeze(-1).expand(-1, 8)
    states = [STATE.clone() for _ in range(2)]
    one = ops.gated_delta_rule(*delta(state=states[0]), True, lowest)
    each = ops.gated_delta_rule(*delta(a=wide[0], bias=wide[1], state=states[1]), True, lowest)
    torch.testing.assert_close(each, one, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(states[1], states[0], rtol=1e-5, atol=1e-5)
    other = wide[0] + torch.linspace(-2, 2, 8)
    moved = ops.gated_delta_rule(*delta(a=other, bias=wide[1], state=STATE.clone()), True, lowest)
    assert not torch.allclose(moved, one, atol=1e-3)
