# SPDX-License-Identifier: Apache-2.0
"""One step of the selective state space recurrence: the decoding step of Mamba and Mamba-2."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn import functional as F

from ipex_core.library.arguments import Arguments
from ipex_core.library.checks import (
    acc,
    check_device,
    check_dtype,
    check_shape,
    check_tensor,
    fake_like,
    randn,
)
from ipex_core.library.kernels import register
from ipex_core.library.spec import BenchCase, OpSpec, Sample
from ipex_core.ops.state_space._common import check_shaped, check_writable

Tensor = torch.Tensor


def _selective_state_update(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
) -> Tensor:
    """Advance the state of a selective state space model by one step, in place, and return the output.

    With ``dt' = softplus(dt + dt_bias)``, or without what is not given::

        state = exp(dt' * A) * state + dt' * B * x
        y = (sum(C * state) + D * x) * silu(z)

    Args:
        state: ``[B, D, N]``, or ``[B, H, D, N]`` with heads as in Mamba-2; float32 or the dtype of ``x``. Overwritten.
        x: ``[B, D]`` or ``[B, H, D]``, float32, bfloat16 or float16.
        dt: Like ``x``, or float32.
        A: ``[D, N]`` or ``[H, D, N]``. An A expanded from one number per channel or head costs one exponential for it.
        B: ``[B, N]``, or ``[B, G, N]`` where G groups of heads share a row.
        C: As ``B``.
        D: ``[D]`` or ``[H, D]``, or None.
        z: Gate like ``x``, or None.
        dt_bias: ``[D]`` or ``[H, D]``, or None.
        dt_softplus: Apply softplus to dt.

    Everything but ``x`` may be float32 instead of the dtype of ``x``.

    Returns:
        The output, contiguous, like ``x``; computed in float32.

    Raises:
        RuntimeError: For wrong dtypes, shapes or devices, or a ``state`` with a broadcast dimension.

    Source: Gu and Dao, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces", 2023; Dao and Gu,
    "Transformers are SSMs", 2024.
    """
    h = _with_head(state, 4, 1)
    rows, steps = _with_head(x, 3, 1), _with_head(dt, 3, 1)
    if dt_bias is not None:
        steps = steps + _with_head(dt_bias, 2, 0)
    if dt_softplus:
        steps = F.softplus(steps)
    heads = h.shape[1]
    b, c = (_with_head(m, 3, 1) for m in (B, C))
    b, c = (m.repeat_interleave(heads // m.shape[1], 1).unsqueeze(2) for m in (b, c))
    decay = torch.exp(steps.unsqueeze(-1) * _with_head(A, 3, 0))
    h = decay * h + (steps * rows).unsqueeze(-1) * b
    y = (h * c).sum(-1)
    if D is not None:
        y = y + rows * _with_head(D, 2, 0)
    if z is not None:
        y = y * F.silu(_with_head(z, 3, 1))
    state.copy_(h.reshape(state.shape))
    return y.reshape(x.shape).to(x.dtype)


def _with_head(value: Tensor, dims: int, at: int) -> Tensor:
    """Return ``value`` in the type to compute in, with a dimension for one head if it has none."""
    wide = acc(value)
    return wide if wide.dim() == dims else wide.unsqueeze(at)


def _check(a: Arguments) -> None:
    check_tensor(a.op, "x", a.x)
    a.require(
        a.state.dim() in (3, 4),
        "state",
        "be 3-D [B, D, N] or 4-D [B, H, D, N]",
        f"{a.state.dim()}-D",
    )
    check_device(a.op, "state", a.state, a.x)
    check_dtype(a.op, "state", a.state, a.x, or_float32=True)
    shape = list(a.state.shape)
    a.require(shape[-1] > 0, "state", "have a last dimension that is not empty", shape)
    check_writable(a.op, "state", a.state)
    check_shape(a.op, "x", a.x, shape[:-1])
    check_shaped(a.op, "dt", a.dt, shape[:-1], a.x, "x", or_float32=True)
    check_shaped(a.op, "A", a.A, shape[1:], a.x, "x", or_float32=True)
    heads = shape[1] if len(shape) == 4 else 1
    batch, size = shape[0], shape[-1]
    for name, value in (("B", a.B), ("C", a.C)):
        check_device(a.op, name, value, a.x)
        check_dtype(a.op, name, value, a.x, or_float32=True)
        got = list(value.shape)
        grouped = value.dim() == 3 and got[1] > 0 and heads % got[1] == 0
        a.require(
            got == [batch, size] or (grouped and got == [batch, got[1], size]),
            name,
            f"have shape [{batch}, {size}] or [{batch}, G, {size}] where G divides {heads}",
            got,
        )
    check_shaped(a.op, "D", a.D, shape[1:-1], a.x, "x", or_float32=True)
    check_shaped(a.op, "z", a.z, shape[:-1], a.x, "x", or_float32=True)
    check_shaped(a.op, "dt_bias", a.dt_bias, shape[1:-1], a.x, "x", or_float32=True)


def _fake(a: Arguments) -> Tensor:
    return fake_like(a.x)


def _inputs(
    dtype: torch.dtype, *shape: int, groups: int = 0, state_dtype: torch.dtype = torch.float32
) -> tuple[Tensor | bool, ...]:
    """Return all arguments for a state of this shape; with groups, B and C have them."""
    batch, size = shape[0], shape[-1]
    rows = (batch, groups, size) if groups else (batch, size)
    return (
        randn(*shape, dtype=state_dtype, seed=61),
        randn(*shape[:-1], dtype=dtype, seed=62),
        randn(*shape[:-1], dtype=dtype, seed=63, scale=0.5),
        -torch.exp(randn(*shape[1:], seed=64, scale=0.5)),
        randn(*rows, dtype=dtype, seed=65),
        randn(*rows, dtype=dtype, seed=66),
        randn(*shape[1:-1], seed=67),
        randn(*shape[:-1], dtype=dtype, seed=68),
        randn(*shape[1:-1], seed=69),
        True,
    )


def _samples(dtype: torch.dtype) -> Iterator[Sample]:
    for shape in ((1, 1, 1), (2, 5, 4), (3, 70, 16), (1, 129, 17), (2, 64, 64), (1, 33, 100)):
        name = "x".join(map(str, shape))
        yield Sample(_inputs(dtype, *shape), id=name)
    yield Sample(_inputs(dtype, 2, 4, 24, 16, groups=2), id="heads-2x4x24x16")
    yield Sample(_inputs(dtype, 2, 3, 64, 128), id="heads-2x3x64x128")
    yield Sample(_inputs(dtype, 3, 40, 16, groups=1, state_dtype=dtype), id="state_in_dtype")
    args = _inputs(dtype, 2, 70, 16)
    yield Sample((*args[:2], args[2].abs(), *args[3:6]), id="plain")  # type: ignore[union-attr]
    yield Sample((*args[:6], None, None, args[8], True), id="no_gate")
    # Mamba-2 has one number per head; models expand it.
    state, x, _, _, b, c, _, z, _, _ = _inputs(dtype, 2, 4, 24, 16, groups=1)
    head = randn(4, seed=70)
    yield Sample(
        (
            state,
            x,
            randn(2, 4, dtype=dtype, seed=71)[:, :, None].expand(2, 4, 24),
            -head.abs()[:, None, None].expand(4, 24, 16),
            b,
            c,
            head.to(dtype)[:, None].expand(4, 24),
            z,
            head[:, None].expand(4, 24),
            True,
        ),
        id="expanded_per_head",
    )
    wide = randn(2, 40, 9, 16, seed=72)
    yield Sample((wide[:, :, 3], *_inputs(dtype, 2, 40, 16)[1:]), id="state_rows_strided")
    yield Sample(
        (randn(2, 16, 40, seed=73).transpose(1, 2), *_inputs(dtype, 2, 40, 16)[1:]),
        id="state_transposed",
    )
    special = _inputs(dtype, 2, 40, 16)
    special[1][0, 3] = float("nan")  # type: ignore[index]
    special[1][0, 4] = float("inf")  # type: ignore[index]
    special[2][1, 5] = float("nan")  # type: ignore[index]
    special[2][1, 6] = float("inf")  # type: ignore[index]
    yield Sample(special, id="special_values")
    yield Sample(_inputs(dtype, 0, 8, 4), id="no_batch")
    yield Sample(_inputs(dtype, 2, 0, 4), id="no_channels")


def _stock(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    z: Tensor,
    dt_bias: Tensor,
    dt_softplus: bool = True,
) -> Tensor:
    dt = F.softplus(dt.float() + dt_bias)
    added = (dt * x).unsqueeze(-1) * B.float().unsqueeze(1)
    state.copy_(torch.exp(dt.unsqueeze(-1) * A) * state + added)
    y = torch.matmul(state, C.float().unsqueeze(-1))[..., 0] + x * D
    return (y * F.silu(z)).to(x.dtype)


def _bench() -> Iterator[BenchCase]:
    for batch, dim, size in ((1, 1536, 16), (1, 5120, 16), (16, 5120, 16), (4, 4096, 128)):
        yield BenchCase(
            f"{batch}x{dim}-state{size}",
            lambda dtype, b=batch, d=dim, s=size: _inputs(dtype, b, d, s),
            lambda dtype, b=batch, d=dim, s=size: (
                4 * (2 * b * d * s + d * s + 2 * d) + (4 * b * d + 2 * b * s) * dtype.itemsize
            ),
            flops=7 * batch * dim * size,
        )


register(
    OpSpec(
        name="selective_state_update",
        schema=(
            "(Tensor(a!) state, Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D=None,"
            " Tensor? z=None, Tensor? dt_bias=None, bool dt_softplus=False) -> Tensor"
        ),
        reference=_selective_state_update,
        check=_check,
        fake=_fake,
        samples=_samples,
        stock=_stock,
        backward=None,
        tolerance={
            torch.float32: (1e-4, 1e-4),
            torch.bfloat16: (1.6e-2, 1e-2),
            torch.float16: (2e-3, 1e-3),
        },
        bench=_bench,
        summary="One step of the selective scan: the decoding step of Mamba",
    )
)
