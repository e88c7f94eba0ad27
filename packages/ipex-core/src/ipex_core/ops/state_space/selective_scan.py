# SPDX-License-Identifier: Apache-2.0
"""The selective scan of Mamba over whole sequences."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn import functional as F

from ipex_core.library.arguments import Arguments
from ipex_core.library.checks import acc, check_device, check_dtype, check_like, check_tensor, randn
from ipex_core.library.kernels import register
from ipex_core.library.spec import BenchCase, OpSpec, Sample
from ipex_core.ops.state_space._common import check_float32, check_shaped, fake_sequence

Tensor = torch.Tensor


def _per_channel(matrix: Tensor, batch: int, dim: int, length: int) -> Tensor:
    """Return B or C as ``[B or 1, D, N, L or 1]``."""
    if matrix.dim() == 2:
        return matrix[None, :, :, None]
    if matrix.dim() == 3:
        return matrix.unsqueeze(1).expand(batch, dim, -1, length)
    return matrix.repeat_interleave(dim // matrix.shape[1], 1)


def _selective_scan(
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
    check_device(a.op, "A", a.A, a.u, "u")
    check_dtype(a.op, "A", a.A, a.u, "u", or_float32=True)
    batch, dim, length = a.u.shape
    a.require(
        a.A.dim() == 2 and a.A.shape[0] == dim and a.A.shape[1] > 0,
        "A",
        f"have shape [{dim}, N]",
        list(a.A.shape),
    )
    size = a.A.shape[1]
    for name, value in (("B", a.B), ("C", a.C)):
        check_device(a.op, name, value, a.u, "u")
        check_dtype(a.op, name, value, a.u, "u", or_float32=True)
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


register(
    OpSpec(
        name="selective_scan_fn",
        schema=(
            "(Tensor u, Tensor delta, Tensor A, Tensor B, Tensor C, Tensor? D=None, Tensor? z=None,"
            " Tensor? delta_bias=None, bool delta_softplus=False, Tensor? initial_state=None)"
            " -> (Tensor, Tensor)"
        ),
        reference=_selective_scan,
        check=_check,
        fake=_fake,
        samples=_samples,
        stock=_stock,
        tolerance={
            torch.float32: (1e-4, 1e-4),
            torch.bfloat16: (1.6e-2, 1e-2),
            torch.float16: (2e-3, 1e-3),
        },
        bench=_bench,
        summary="Selective scan of Mamba over whole sequences",
    )
)
