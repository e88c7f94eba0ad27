# SPDX-License-Identifier: Apache-2.0
"""The short causal convolution of state space models: over whole sequences, and step by step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ipex_core.errors import OpArgumentError
from ipex_core.library.checks import (
    acc,
    check_device,
    check_kind,
    check_shape,
    check_tensor,
    dtype_name,
    randn,
)
from ipex_core.library.kernels import register_op
from ipex_core.library.spec import Arguments, BenchCase, Sample
from ipex_core.ops.state_space import (
    check_activation,
    check_shaped,
    check_writable,
    fake_sequence,
)

#: Most taps of a filter.
MAX_TAPS = 64


def _convolve(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """Return the outputs of ``x [B, D, W - 1 + L]``, whose first W - 1 steps are history."""
    wide = None if bias is None else acc(bias)
    y = F.conv1d(acc(x), acc(weight).unsqueeze(1), wide, groups=x.shape[1])
    return (F.silu(y) if activation == "silu" else y).to(x.dtype)


def _causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    activation: str = "silu",
) -> tuple[Tensor, Tensor]:
    """Convolve each channel with its own short filter, looking back only, and apply an activation.

    ``y[l] = activation(bias + sum(weight[w] * x[l - (W - 1) + w] for w in range(W)))``, where the steps before the
    first one come from ``initial_states``.

    Args:
        x: ``[B, D, L]``, float32, bfloat16 or float16. Any strides; ``[B, L, D]`` transposed is read in place.
        weight: ``[D, W]``, 1 to 64 taps, in the dtype of ``x`` or float32.
        bias: ``[D]``, in the dtype of ``x`` or float32, or None.
        initial_states: ``[B, D, W - 1]`` in the dtype of ``x``: the steps before the first, for a sequence that comes
            in pieces. None means zeros.
        activation: ``"silu"`` or ``"none"``.

    Returns:
        The output, like ``x`` and dense in its order of dimensions, and the last W - 1 steps of the input,
        ``[B, D, W - 1]``: the ``initial_states`` of the next piece.

    Raises:
        RuntimeError: For wrong dtypes, shapes, devices or activation.

    Source: Gu and Dao, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces", 2023.
    """
    before = weight.shape[1] - 1
    if initial_states is None:
        initial_states = x.new_zeros(x.shape[0], x.shape[1], before)
    whole = torch.cat([initial_states, x], -1)
    if x.numel() == 0:
        return torch.zeros_like(x), whole[..., x.shape[2] :].clone()
    return _convolve(whole, weight, bias, activation), whole[..., x.shape[2] :].clone()


def _check_filter(a: Arguments) -> None:
    check_kind(a.op, "weight", a.weight, a.x, or_float32=True)
    channels, shape = a.x.shape[1], list(a.weight.shape)
    fits = len(shape) == 2 and shape[0] == channels and 1 <= shape[1] <= MAX_TAPS
    a.require(fits, "weight", f"have shape [{channels}, W] with W from 1 to {MAX_TAPS}", shape)
    check_shaped(a.op, "bias", a.bias, [channels], a.x, "x", or_float32=True)


def _fn_check(a: Arguments) -> None:
    check_tensor(a.op, "x", a.x)
    a.require(a.x.dim() == 3, "x", "be 3-D [B, D, L]", f"{a.x.dim()}-D")
    _check_filter(a)
    shape = [a.x.shape[0], a.x.shape[1], a.weight.shape[1] - 1]
    check_shaped(a.op, "initial_states", a.initial_states, shape, a.x, "x")
    check_activation(a.op, a.activation)


def _fn_fake(a: Arguments) -> tuple[Tensor, Tensor]:
    return fake_sequence(a.x), a.x.new_empty(a.x.shape[0], a.x.shape[1], a.weight.shape[1] - 1)


def _causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str = "none",
    cache_seqlens: Tensor | None = None,
) -> Tensor:
    """Convolve new steps with their history, and put them into it.

    Without ``cache_seqlens``, ``conv_state`` holds the last S steps, the newest last; the new ones push out the oldest.
    With it, ``conv_state`` is a circular buffer: step number ``n`` of a sequence lies at place ``n % S``, and
    ``cache_seqlens`` says how many steps each sequence has had. Of more than S new steps, the last S stay.

    Args:
        x: ``[B, D]``, or ``[B, D, T]`` for T new steps; float32, bfloat16 or float16.
        conv_state: ``[B, D, S]`` in the dtype of ``x``, with S at least W - 1 (and at least 1). Overwritten.
        weight: ``[D, W]``, 1 to 64 taps, in the dtype of ``x`` or float32.
        bias: ``[D]``, in the dtype of ``x`` or float32, or None.
        activation: ``"silu"`` or ``"none"``.
        cache_seqlens: ``[B]``, int32 or int64, not negative, or None.

    Returns:
        The output like ``x``: ``[B, D]`` contiguous, ``[B, D, T]`` dense in the order of its dimensions.

    Raises:
        RuntimeError: For wrong dtypes, shapes, devices or activation, a negative length, or a ``conv_state`` with a
            broadcast dimension.

    Source: Gu and Dao, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces", 2023.
    """
    steps = x if x.dim() == 3 else x.unsqueeze(-1)
    before, size, length = weight.shape[1] - 1, conv_state.shape[2], steps.shape[2]
    if cache_seqlens is None:
        whole = torch.cat([conv_state, steps], -1)
        history = conv_state[..., size - before :]
        new_state = whole[..., length:]
    else:
        _check_lengths(cache_seqlens)
        lengths = cache_seqlens.long()
        places = (lengths[:, None] + torch.arange(-before, 0, device=x.device)) % size
        history = conv_state.gather(2, places[:, None].expand(-1, x.shape[1], -1))
        new_state = conv_state.clone()
        rows = torch.arange(x.shape[0], device=x.device)
        for step in range(length):
            new_state[rows, :, (lengths + step) % size] = steps[..., step]
    if x.numel() == 0:
        y = torch.zeros_like(steps)
    else:
        y = _convolve(torch.cat([history, steps], -1), weight, bias, activation)
    conv_state.copy_(new_state)
    return y if x.dim() == 3 else y.squeeze(-1)


def _check_lengths(cache_seqlens: Tensor) -> None:
    if cache_seqlens.numel() and int(cache_seqlens.min()) < 0:
        first = int(cache_seqlens[cache_seqlens < 0][0])
        raise OpArgumentError(
            f"causal_conv1d_update: cache_seqlens must not be negative, got {first}"
        )


def _update_check(a: Arguments) -> None:
    check_tensor(a.op, "x", a.x)
    a.require(a.x.dim() in (2, 3), "x", "be 2-D [B, D] or 3-D [B, D, T]", f"{a.x.dim()}-D")
    _check_filter(a)
    check_kind(a.op, "conv_state", a.conv_state, a.x)
    batch, dim = a.x.shape[:2]
    least = max(1, a.weight.shape[1] - 1)
    a.require(
        a.conv_state.dim() == 3
        and list(a.conv_state.shape[:2]) == [batch, dim]
        and a.conv_state.shape[2] >= least,
        "conv_state",
        f"have shape [{batch}, {dim}, S] with S at least {least}",
        list(a.conv_state.shape),
    )
    check_writable(a.op, "conv_state", a.conv_state)
    check_activation(a.op, a.activation)
    if a.cache_seqlens is not None:
        check_device(a.op, "cache_seqlens", a.cache_seqlens, a.x)
        fits = a.cache_seqlens.dtype in (torch.int32, torch.int64)
        text = "have dtype int32 or int64"
        a.require(fits, "cache_seqlens", text, dtype_name(a.cache_seqlens.dtype))
        check_shape(a.op, "cache_seqlens", a.cache_seqlens, [batch])


def _filter(dtype: torch.dtype, dim: int, width: int) -> tuple[Tensor, Tensor]:
    return randn(dim, width, dtype=dtype, seed=81, scale=0.5), randn(dim, dtype=dtype, seed=82)


def _last(x: Tensor) -> Tensor:
    """Return the same numbers with channels side by side."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _fn_samples(dtype: torch.dtype) -> Iterator[Sample]:
    for batch, dim, length, width in (
        (1, 1, 1, 1),
        (2, 5, 7, 4),
        (2, 33, 40, 4),
        (1, 16, 130, 3),
        (1, 70, 65, 2),
        (2, 9, 2, 4),
        (1, 3, 100, 21),
    ):
        x = randn(batch, dim, length, dtype=dtype, seed=80)
        state = randn(batch, dim, width - 1, dtype=dtype, seed=83)
        name = f"{batch}x{dim}x{length}-{width}"
        yield Sample((x, *_filter(dtype, dim, width)), id=name)
        yield Sample((_last(x), *_filter(dtype, dim, width), state), id=f"{name}-channels_last")
    x = randn(2, 24, 50, dtype=dtype, seed=84)
    weight, bias = _filter(dtype, 24, 4)
    state = randn(2, 24, 3, dtype=dtype, seed=85)
    yield Sample((x, weight, None, state, "none"), id="no_bias")
    yield Sample((x, weight.float(), bias.float(), None), id="float32_filter")
    yield Sample((_last(x)[:, 3:20], weight[3:20], bias[3:20], _last(state)[:, 3:20]), id="slice")
    yield Sample((torch.stack([x, x], -1)[..., 0], weight, bias), id="noncontiguous")
    special = x.clone()
    special[0, 3, 4] = float("nan")
    special[0, 5, 6] = float("inf")
    special[1, 7, 20] = -float("inf")
    yield Sample((special, weight, bias), id="special_values")
    yield Sample((_last(special), weight, bias, state), id="special_values-channels_last")
    yield Sample((x[..., :0], weight, bias, state), id="no_steps")
    yield Sample((x[:0], weight, bias), id="no_batch")
    yield Sample((x[:, :0], weight[:0], bias[:0]), id="no_channels")


def _update_samples(dtype: torch.dtype) -> Iterator[Sample]:
    def call(
        batch: int, dim: int, steps: int, width: int, size: int, *more: Any
    ) -> tuple[Any, ...]:
        shape = (batch, dim, steps) if steps else (batch, dim)
        state = randn(batch, dim, size, dtype=dtype, seed=87)
        return (randn(*shape, dtype=dtype, seed=86), state, *_filter(dtype, dim, width), *more)

    for batch, dim, steps, width, size in (
        (1, 1, 0, 1, 1),
        (2, 5, 0, 4, 3),
        (3, 70, 0, 4, 4),
        (2, 33, 0, 2, 7),
        (1, 16, 1, 3, 2),
        (2, 40, 3, 4, 4),
        (1, 20, 9, 4, 5),
    ):
        name = f"{batch}x{dim}x{steps}-{width}-{size}"
        lengths = torch.arange(batch, dtype=torch.int32) * 5 + 2
        yield Sample(call(batch, dim, steps, width, size, "silu"), id=name)
        yield Sample(call(batch, dim, steps, width, size, "none", lengths), id=f"{name}-circular")
    x, state, weight, bias = call(2, 40, 0, 4, 4)
    yield Sample((x, state, weight.float(), None), id="float32_weight")
    yield Sample((x, _last(state), weight, bias, "silu"), id="state_channels_last")
    yield Sample(
        (x, _last(state), weight, bias, "silu", torch.tensor([0, 1001])),
        id="state_channels_last-circular",
    )
    wide = randn(2, 40, 4, 3, dtype=dtype, seed=88)
    yield Sample((wide[:, :, 0, 0], wide[..., 1], weight, bias), id="strided")
    steps3 = _last(randn(2, 40, 6, dtype=dtype, seed=89))
    yield Sample((steps3, wide[..., 1], weight, bias), id="strided-steps")
    yield Sample((steps3[..., :0], state, weight, bias), id="no_steps")
    yield Sample((x[:0], state[:0], weight, bias), id="no_batch")


def _fn_stock(
    x: Tensor, weight: Tensor, bias: Tensor, initial_states: None = None, activation: str = "silu"
) -> tuple[Tensor, Tensor]:
    width = weight.shape[1]
    y = F.conv1d(x, weight.unsqueeze(1), bias, padding=width - 1, groups=x.shape[1])
    return F.silu(y[..., : x.shape[2]]), F.pad(x, (width - 1 - x.shape[2], 0))


def _update_stock(
    x: Tensor, conv_state: Tensor, weight: Tensor, bias: Tensor, activation: str = "silu"
) -> Tensor:
    window = torch.cat([conv_state, x.unsqueeze(-1)], -1)
    conv_state.copy_(window[..., 1:])
    y = (window[..., -weight.shape[1] :] * weight).sum(-1) + bias
    return F.silu(y)


def _fn_bench() -> Iterator[BenchCase]:
    for batch, dim, length, last in (
        (1, 1536, 512, False),
        (1, 5120, 2048, False),
        (1, 5120, 2048, True),
    ):
        yield BenchCase(
            f"{batch}x{dim}x{length}" + ("-channels_last" if last else ""),
            lambda dtype, b=batch, d=dim, n=length, last=last: (
                (_last if last else Tensor.contiguous)(randn(b, d, n, dtype=dtype)),
                *_filter(dtype, d, 4),
            ),
            lambda dtype, n=2 * batch * dim * length: n * dtype.itemsize,
        )


def _update_bench() -> Iterator[BenchCase]:
    for batch, dim in ((1, 1536), (1, 5120), (16, 5120)):
        yield BenchCase(
            f"{batch}x{dim}",
            lambda dtype, b=batch, d=dim: (
                randn(b, d, dtype=dtype),
                randn(b, d, 4, dtype=dtype),
                *_filter(dtype, d, 4),
                "silu",
            ),
            lambda dtype, b=batch, d=dim: (10 * b * d + 5 * d) * dtype.itemsize,
        )


register_op(
    reference=_causal_conv1d_fn,
    check=_fn_check,
    fake=_fn_fake,
    autocast="lower_precision",
    samples=_fn_samples,
    stock=_fn_stock,
    bench=_fn_bench,
    summary="Short causal convolution of each channel, with activation",
)

register_op(
    mutates=("conv_state",),
    reference=_causal_conv1d_update,
    check=_update_check,
    fake=lambda a: fake_sequence(a.x) if a.x.dim() == 3 else a.x.new_empty(a.x.shape),
    samples=_update_samples,
    stock=_update_stock,
    backward=None,
    bench=_update_bench,
    summary="New steps of the short causal convolution, with their history",
)
