# SPDX-License-Identifier: Apache-2.0
"""The selective scan of Mamba over whole sequences, and one step of its recurrence, as of Mamba-2."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from ipex_core.library.checks import (
    acc,
    check_device,
    check_dtype_in,
    check_kind,
    check_like,
    check_shape,
    check_tensor,
    fake_like,
    randn,
)
from ipex_core.library.kernels import register_op
from ipex_core.library.spec import Arguments, BenchCase, Sample, check

ACTIVATIONS = ("none", "silu")


def check_shaped(
    op: str,
    name: str,
    value: Tensor | None,
    shape: Sequence[int],
    x: Tensor,
    of: str,
    *,
    or_float32: bool = False,
) -> None:
    """Check device, dtype and shape of an argument that may be None."""
    if value is None:
        return
    check_kind(op, name, value, x, of, or_float32=or_float32)
    check_shape(op, name, value, shape)


def check_float32(
    op: str, name: str, value: Tensor, shape: Sequence[int], x: Tensor, of: str
) -> None:
    """Check that an argument is float32 and has this shape."""
    check_device(op, name, value, x, of)
    check_dtype_in(op, name, value, torch.float32)
    check_shape(op, name, value, shape)


def check_writable(op: str, name: str, value: Tensor) -> None:
    """Check that no two elements of an argument that is written to share memory by broadcasting."""
    check(
        all(
            stride != 0 or size <= 1
            for size, stride in zip(value.shape, value.stride(), strict=True)
        ),
        op,
        name,
        "have no broadcast dimension",
        f"strides {list(value.stride())}",
    )


def check_activation(op: str, activation: str) -> None:
    """Check the name of an activation."""
    check(activation in ACTIVATIONS, op, "activation", "be 'none' or 'silu'", repr(activation))


def channels_last(x: Tensor) -> bool:
    """Return whether ``x [B, D, L]`` is stored with its channels side by side, as a projection leaves it."""
    return x.stride(1) == 1 and x.stride(2) != 1


def fake_sequence(x: Tensor) -> Tensor:
    """Return a new tensor like ``x [B, D, L]``, dense in the order of ``x``."""
    batch, dim, length = x.shape
    if channels_last(x):
        return x.new_empty(batch, length, dim).transpose(1, 2)
    return x.new_empty(batch, dim, length)


# --- whole sequences --------------------------------------------------------------------------------------------------


def _per_channel(matrix: Tensor, batch: int, dim: int, length: int) -> Tensor:
    """Return B or C as ``[B or 1, D, N, L or 1]``."""
    if matrix.dim() == 2:
        return matrix[None, :, :, None]
    if matrix.dim() == 3:
        return matrix.unsqueeze(1).expand(batch, dim, -1, length)
    return matrix.repeat_interleave(dim // matrix.shape[1], 1)


def _selective_scan_fn(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    initial_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Run the selective state space recurrence of Mamba.

    For each batch and channel, with a state ``h`` of N numbers and ``dt = softplus(delta + delta_bias)``::

        h[l] = exp(dt[l] * A) * h[l - 1] + dt[l] * u[l] * B[l]
        y[l] = (sum(C[l] * h[l]) + D * u[l]) * silu(z[l])

    Without ``delta_softplus``, ``dt = delta + delta_bias``; what is None is left out.

    Args:
        u: ``[B, D, L]``, float32, bfloat16 or float16. Any strides; ``[B, L, D]`` transposed is read in place.
        delta: Like ``u``.
        A: ``[D, N]``, real, float32 or the dtype of ``u``.
        B: ``[B, N, L]``, ``[B, G, N, L]`` where G groups of channels share a matrix, or ``[D, N]`` where it does not
            depend on the input; float32 or the dtype of ``u``.
        C: As ``B``; the forms need not be the same.
        D: ``[D]``, or None.
        z: Gate like ``u``, or None.
        delta_bias: ``[D]``, or None.
        delta_softplus: Apply softplus to delta.
        initial_state: ``[B, D, N]`` float32: the state before the first step, for a sequence that comes in pieces.
            None means zeros.

    Returns:
        The output, like ``u`` and dense in its order of dimensions, and the last state ``[B, D, N]`` in float32. The
        state is float32 throughout.

    Raises:
        RuntimeError: For wrong dtypes, shapes or devices.

    Source: Gu and Dao, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces", 2023.
    """
    batch, dim, length = u.shape
    x = acc(u)
    dt = acc(delta)
    if delta_bias is not None:
        dt = dt + acc(delta_bias)[:, None]
    if delta_softplus:
        dt = F.softplus(dt)
    b = _per_channel(acc(B), batch, dim, length)
    c = _per_channel(acc(C), batch, dim, length)
    decay = torch.exp(dt.unsqueeze(2) * acc(A)[:, :, None])  # [B, D, N, L]
    added = (dt * x).unsqueeze(2) * b
    state = x.new_zeros(batch, dim, A.shape[1]) if initial_state is None else acc(initial_state)
    steps = []
    for i in range(length):
        state = decay[..., i] * state + added[..., i]
        steps.append((state * c[..., i if c.shape[-1] > 1 else 0]).sum(-1))
    y = torch.stack(steps, -1) if steps else torch.zeros_like(x)
    if D is not None:
        y = y + x * acc(D)[:, None]
    if z is not None:
        y = y * F.silu(acc(z))
    return y.to(u.dtype), state.clone() if state is initial_state else state


def _check(a: Arguments) -> None:
    check_tensor(a.op, "u", a.u)
    a.require(a.u.dim() == 3, "u", "be 3-D [B, D, L]", f"{a.u.dim()}-D")
    check_like(a.op, "delta", a.delta, a.u, "u")
    check_kind(a.op, "A", a.A, a.u, "u", or_float32=True)
    batch, dim, length = a.u.shape
    fits = a.A.dim() == 2 and a.A.shape[0] == dim and a.A.shape[1] > 0
    a.require(fits, "A", f"have shape [{dim}, N]", list(a.A.shape))
    size = a.A.shape[1]
    for name, value in (("B", a.B), ("C", a.C)):
        check_kind(a.op, name, value, a.u, "u", or_float32=True)
        shape = list(value.shape)
        grouped = value.dim() == 4 and shape[1] > 0 and dim % shape[1] == 0
        a.require(
            shape in ([dim, size], [batch, size, length])
            or (grouped and shape == [batch, shape[1], size, length]),
            name,
            f"have shape [{dim}, {size}], [{batch}, {size}, {length}] or [{batch}, G, {size}, {length}]"
            f" where G divides {dim}",
            shape,
        )
    check_shaped(a.op, "D", a.D, [dim], a.u, "u", or_float32=True)
    if a.z is not None:
        check_like(a.op, "z", a.z, a.u, "u")
    check_shaped(a.op, "delta_bias", a.delta_bias, [dim], a.u, "u", or_float32=True)
    if a.initial_state is not None:
        check_float32(a.op, "initial_state", a.initial_state, [batch, dim, size], a.u, "u")


def _fake(a: Arguments) -> tuple[Tensor, Tensor]:
    state = a.u.new_empty(a.u.shape[0], a.u.shape[1], a.A.shape[1], dtype=torch.float32)
    return fake_sequence(a.u), state


def _inputs(
    dtype: torch.dtype, batch: int, dim: int, length: int, size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return u, delta, A, B, C."""
    return (
        randn(batch, dim, length, dtype=dtype, seed=31),
        randn(batch, dim, length, dtype=dtype, seed=32, scale=0.5),
        -torch.exp(randn(dim, size, seed=33, scale=0.5)),
        randn(batch, size, length, dtype=dtype, seed=34),
        randn(batch, size, length, dtype=dtype, seed=35),
    )


def _extras(
    dtype: torch.dtype, batch: int, dim: int, length: int
) -> tuple[Tensor, Tensor, Tensor, bool]:
    """Return D, z, delta_bias, delta_softplus."""
    return (
        randn(dim, seed=36),
        randn(batch, dim, length, dtype=dtype, seed=37),
        randn(dim, seed=38),
        True,
    )


def _samples(dtype: torch.dtype) -> Iterator[Sample]:
    for shape in (
        (1, 1, 1, 1),
        (2, 3, 5, 4),
        (1, 16, 7, 16),
        (2, 37, 19, 16),
        (1, 64, 130, 16),
        (1, 20, 33, 64),
        (2, 18, 9, 5),
        (1, 33, 66, 27),
    ):
        name = "x".join(map(str, shape))
        yield Sample((*_inputs(dtype, *shape), *_extras(dtype, *shape[:3])), id=name)
    u, delta, A, B, C = _inputs(dtype, 2, 24, 21, 16)
    D, z, bias, _ = _extras(dtype, 2, 24, 21)
    yield Sample((u, delta.abs(), A, B, C), id="plain")
    yield Sample(
        (u, delta, A, B, C, D.to(dtype), None, bias.to(dtype), True), id="vectors_in_dtype"
    )
    yield Sample((u, delta.abs(), A.to(dtype), B.float(), C.float(), None, z), id="matrices")
    fixed = randn(24, 16, seed=39)
    yield Sample((u, delta, A, fixed, C, D, z, bias, True), id="fixed_B")
    yield Sample((u, delta, A, B, fixed, D, z, bias, True), id="fixed_C")
    yield Sample((u, delta, A, fixed, fixed.to(dtype), D, z, bias, True), id="fixed_both")
    grouped = randn(2, 3, 16, 21, dtype=dtype, seed=40)
    yield Sample((u, delta, A, grouped, grouped[:, :1], D, z, bias, True), id="grouped")
    last = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (u, delta, B, C, z)]
    yield Sample((*last[:2], A, *last[2:4], D, last[4], bias, True), id="channels_last")
    halves = torch.cat([u, z], 1).transpose(1, 2).contiguous().transpose(1, 2)
    yield Sample(
        (halves[:, :24], delta, A.t().contiguous().t(), last[2], C, D, halves[:, 24:], bias, True),
        id="halves_of_a_projection",
    )
    wide = torch.stack([u, u], -1)[..., 0]
    yield Sample((wide, delta, A, B, C, D, wide, bias, True), id="noncontiguous")
    state = randn(2, 24, 16, seed=41)
    yield Sample((u, delta, A, B, C, D, z, bias, True, state), id="initial_state")
    yield Sample((u, delta * 0.2, A.abs(), B, C), id="growing")
    special = u.clone()
    special[0, 3, 4] = float("nan")
    special[0, 5, 6] = float("inf")
    steps = delta.clone()
    steps[1, 7, 8] = float("nan")
    steps[1, 9, 10] = float("inf")
    yield Sample((special, steps, A, B, C, D, None, bias, True), id="special_values")
    yield Sample(
        (u[..., :0], delta[..., :0], A, B[..., :0], C[..., :0], D, None, None, False, state),
        id="no_steps",
    )
    yield Sample((u[:0], delta[:0], A, B[:0], C[:0]), id="no_batch")
    yield Sample((u[:, :0], delta[:, :0], A[:0], B, C), id="no_channels")


def _stock(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    z: Tensor,
    delta_bias: Tensor,
    delta_softplus: bool = True,
) -> tuple[Tensor, Tensor]:
    """Compute what a model without a kernel does: all that is no recurrence at once, then step by step."""
    dt = F.softplus(delta.float() + delta_bias[:, None])
    decay = torch.exp(A[None, :, None, :] * dt[:, :, :, None])  # [B, D, L, N]
    added = (dt * u)[:, :, :, None] * B.float().transpose(1, 2)[:, None]
    state = torch.zeros_like(decay[:, :, 0])
    steps = []
    for i in range(u.shape[2]):
        state = decay[:, :, i] * state + added[:, :, i]
        steps.append(torch.matmul(state, C[:, :, i].float().unsqueeze(-1))[..., 0])
    y = torch.stack(steps, -1) + u * D[:, None]
    return (y * F.silu(z)).to(u.dtype), state


def _bench() -> Iterator[BenchCase]:
    for batch, dim, length, size in ((1, 1536, 64, 16), (4, 1536, 64, 16), (1, 5120, 1024, 16)):
        yield BenchCase(
            f"{batch}x{dim}x{length}-state{size}",
            lambda dtype, b=batch, d=dim, n=length, s=size: (
                *_inputs(dtype, b, d, n, s),
                *_extras(dtype, b, d, n),
            ),
            lambda dtype, n=batch * length * (4 * dim + 2 * size): n * dtype.itemsize,
            # Per step and number of the state: exponential (counted as one), two products with an addition each, and
            # the two factors.
            flops=7 * batch * dim * length * size,
        )


_TOLERANCE = {
    torch.float32: (1e-4, 1e-4),
    torch.bfloat16: (1.6e-2, 1e-2),
    torch.float16: (2e-3, 1e-3),
}

register_op(
    reference=_selective_scan_fn,
    check=_check,
    fake=_fake,
    samples=_samples,
    stock=_stock,
    tolerance=_TOLERANCE,
    bench=_bench,
    summary="Selective scan of Mamba over whole sequences",
)


# --- one step ---------------------------------------------------------------------------------------------------------


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


def _update_check(a: Arguments) -> None:
    check_tensor(a.op, "x", a.x)
    fits = a.state.dim() in (3, 4)
    a.require(fits, "state", "be 3-D [B, D, N] or 4-D [B, H, D, N]", f"{a.state.dim()}-D")
    check_kind(a.op, "state", a.state, a.x, or_float32=True)
    shape = list(a.state.shape)
    a.require(shape[-1] > 0, "state", "have a last dimension that is not empty", shape)
    check_writable(a.op, "state", a.state)
    check_shape(a.op, "x", a.x, shape[:-1])
    check_shaped(a.op, "dt", a.dt, shape[:-1], a.x, "x", or_float32=True)
    check_shaped(a.op, "A", a.A, shape[1:], a.x, "x", or_float32=True)
    heads = shape[1] if len(shape) == 4 else 1
    batch, size = shape[0], shape[-1]
    for name, value in (("B", a.B), ("C", a.C)):
        check_kind(a.op, name, value, a.x, or_float32=True)
        got = list(value.shape)
        grouped = value.dim() == 3 and got[1] > 0 and heads % got[1] == 0
        fits = got == [batch, size] or (grouped and got == [batch, got[1], size])
        text = f"have shape [{batch}, {size}] or [{batch}, G, {size}] where G divides {heads}"
        a.require(fits, name, text, got)
    check_shaped(a.op, "D", a.D, shape[1:-1], a.x, "x", or_float32=True)
    check_shaped(a.op, "z", a.z, shape[:-1], a.x, "x", or_float32=True)
    check_shaped(a.op, "dt_bias", a.dt_bias, shape[1:-1], a.x, "x", or_float32=True)


def _update_inputs(
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


def _update_samples(dtype: torch.dtype) -> Iterator[Sample]:
    for shape in ((1, 1, 1), (2, 5, 4), (3, 70, 16), (1, 129, 17), (2, 64, 64), (1, 33, 100)):
        name = "x".join(map(str, shape))
        yield Sample(_update_inputs(dtype, *shape), id=name)
    yield Sample(_update_inputs(dtype, 2, 4, 24, 16, groups=2), id="heads-2x4x24x16")
    yield Sample(_update_inputs(dtype, 2, 3, 64, 128), id="heads-2x3x64x128")
    yield Sample(_update_inputs(dtype, 3, 40, 16, groups=1, state_dtype=dtype), id="state_in_dtype")
    args = _update_inputs(dtype, 2, 70, 16)
    yield Sample((*args[:2], args[2].abs(), *args[3:6]), id="plain")  # type: ignore[union-attr]
    yield Sample((*args[:6], None, None, args[8], True), id="no_gate")
    # Mamba-2 has one number per head; models expand it.
    state, x, _, _, b, c, _, z, _, _ = _update_inputs(dtype, 2, 4, 24, 16, groups=1)
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
    yield Sample((wide[:, :, 3], *_update_inputs(dtype, 2, 40, 16)[1:]), id="state_rows_strided")
    yield Sample(
        (randn(2, 16, 40, seed=73).transpose(1, 2), *_update_inputs(dtype, 2, 40, 16)[1:]),
        id="state_transposed",
    )
    special = _update_inputs(dtype, 2, 40, 16)
    special[1][0, 3] = float("nan")  # type: ignore[index]
    special[1][0, 4] = float("inf")  # type: ignore[index]
    special[2][1, 5] = float("nan")  # type: ignore[index]
    special[2][1, 6] = float("inf")  # type: ignore[index]
    yield Sample(special, id="special_values")
    yield Sample(_update_inputs(dtype, 0, 8, 4), id="no_batch")
    yield Sample(_update_inputs(dtype, 2, 0, 4), id="no_channels")


def _update_stock(
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


def _update_bench() -> Iterator[BenchCase]:
    for batch, dim, size in ((1, 1536, 16), (1, 5120, 16), (16, 5120, 16), (4, 4096, 128)):
        yield BenchCase(
            f"{batch}x{dim}-state{size}",
            lambda dtype, b=batch, d=dim, s=size: _update_inputs(dtype, b, d, s),
            lambda dtype, b=batch, d=dim, s=size: (
                4 * (2 * b * d * s + d * s + 2 * d) + (4 * b * d + 2 * b * s) * dtype.itemsize
            ),
            flops=7 * batch * dim * size,
        )


register_op(
    mutates=("state",),
    reference=_selective_state_update,
    check=_update_check,
    fake=lambda a: fake_like(a.x),
    samples=_update_samples,
    stock=_update_stock,
    backward=None,
    tolerance=_TOLERANCE,
    bench=_update_bench,
    summary="One step of the selective scan: the decoding step of Mamba",
)
