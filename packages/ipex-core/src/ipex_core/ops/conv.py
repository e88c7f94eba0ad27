# SPDX-License-Identifier: Apache-2.0
"""Convolutions of images with packed weights and fused operands, and batch normalization with fixed statistics."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ipex_core.config.isa_levels import LEVEL_FEATURES
from ipex_core.kernels.providers import cpu_level
from ipex_core.library.checks import (
    PRODUCT_TOLERANCE,
    acc,
    check_device,
    check_kind,
    check_tensor,
    fake_like,
    randn,
)
from ipex_core.library.kernels import register_op
from ipex_core.library.spec import Arguments, BenchCase, Sample, check
from ipex_core.ops.linear import activate, check_activation, stored_dtype
from ipex_core.ops.state_space import check_shaped
from ipex_core.packing import dense
from ipex_core.packing.dense import check_packed

#: Limit of sizes that are given as numbers.
MOST = 4096


#: Columns of a panel of a packed weight: each group of channels begins with one.
_PANEL = 32


#: Winograd's transforms F(2x2, 3x3) of a window, there and back: ``T @ window @ T.T``.
_THERE = ((1.0, 0.0, 0.0), (0.5, 0.5, 0.5), (0.5, -0.5, 0.5), (0.0, 0.0, 1.0))
_BACK = ((1.0, 0.0, 0.0, 0.0), (0.0, 1.0, -1.0, 0.0), (0.0, 0.0, 0.0, 1.0))


def pack_convolution(weight: Tensor, groups: int = 1, winograd: bool = False) -> Tensor:
    """Pack the weight of a convolution.

    Args:
        weight: ``[O, C / groups, KH, KW]``, float32, bfloat16 or float16.
        groups: Groups of channels.
        winograd: Transform a weight ``[O, C, 3, 3]`` for minimal filtering, see `winograd_pays`.

    Returns:
        `pack_linear_weight` of the weight as ``[O, KH * KW * C / groups]``. With groups, the ``O / groups`` rows of
        each are followed by rows of zeros up to a multiple of 32. A transformed one is float32
        ``[O, 16 * C]``, and its header has a format of its own.

    Example:
        >>> pack_convolution(torch.zeros(32, 3, 5, 5)).numel() == 64 + 32 * 3 * 5 * 5 * 4
        True
    """
    windows = weight.flatten(2)
    if winograd:
        windows = _transformed(windows, _THERE).float()
    rows = _in_panels(windows.transpose(1, 2).flatten(1), groups)
    packed: Tensor = torch.ops.ipex.pack_linear_weight(rows.contiguous())
    return _named(packed, rows) if winograd else packed


def _named(packed: Tensor, rows: Tensor) -> Tensor:
    """Give a packed weight that was transformed the header of one."""
    packed[: dense.HEADER_BYTES] = dense.header(dense.WINOGRAD, *rows.shape)
    return packed


def _transformed(windows: Tensor, matrix: Sequence[Sequence[float]]) -> Tensor:
    """Return ``[O, C, places]`` in float64 for square windows ``[O, C, places]``."""
    m = torch.tensor(matrix, dtype=torch.float64, device=windows.device)
    return windows.double() @ torch.kron(m, m).T


def winograd_pays(
    x_shape: Sequence[int],
    weight: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> bool:
    """Return whether a convolution takes less time by minimal filtering, F(2x2, 3x3), and can be computed so.

    It has 16 products in float32 where the window has 36, on a weight of 16/9 of the size. Zen 3, one and two threads:
    0.5 to 0.9 of the time within these limits; 1.05 for 16 channels that give 16, up to 1.0 where few pixels meet a
    weight that comes from memory. Not where instructions multiply bfloat16. Sums are shorter, so that errors are a
    third; infinities and NaN reach blocks of 2 x 2 pixels.
    """
    out, channels, *window = weight.shape
    if window != [3, 3] or groups != 1:
        return False
    if weight.dtype == torch.bfloat16 and "avx512_bf16" in LEVEL_FEATURES.get(
        cpu_level() or "", ()
    ):
        return False
    if any(v != 1 for v in (*stride, *dilation)):
        return False
    blocks = x_shape[0]
    for size, beside in zip(x_shape[2:], padding, strict=True):
        blocks *= max(0, size + 2 * beside - 1) // 2
    wide = min(out, channels) >= 16 and out * channels >= 512
    return wide and blocks >= (4 if out * channels <= 2**14 else 32)


def _in_panels(rows: Tensor, groups: int) -> Tensor:
    """Return the rows of a weight as they are packed."""
    if groups == 1:
        return rows
    each = rows.view(groups, -1, rows.shape[1])
    behind = _packed_rows(rows.shape[0], groups) // groups - each.shape[1]
    return functional.pad(each, (0, 0, 0, behind)).flatten(0, 1)


def _packed_rows(out_channels: int, groups: int) -> int:
    """Return how many rows the packed weight has."""
    if groups == 1:
        return out_channels
    return groups * -(-(out_channels // groups) // _PANEL) * _PANEL


def _depth(x: Tensor, kernel_size: Sequence[int], groups: int) -> int:
    return x.shape[1] // groups * kernel_size[0] * kernel_size[1]


def _is_winograd(
    x: Tensor, packed_weight: Tensor, out_channels: int, kernel_size: Sequence[int], groups: int
) -> bool:
    """Return whether a weight was transformed; of one without data (of a fake tensor), the size tells."""
    depth = 16 * x.shape[1]
    size = dense.packed_bytes(out_channels, depth, torch.float32)
    if list(kernel_size) != [3, 3] or groups != 1:
        return False
    if packed_weight.dtype != torch.uint8 or list(packed_weight.shape) != [size]:
        return False
    if type(packed_weight) is not Tensor or packed_weight.is_meta:
        return True
    return dense.read_header(packed_weight) == (dense.WINOGRAD, out_channels, depth)


def _plain(
    x: Tensor, packed_weight: Tensor, out_channels: int, kernel_size: list[int], groups: int
) -> Tensor:
    """Return the weight as ``[out_channels, C / groups, KH, KW]``."""
    if _is_winograd(x, packed_weight, out_channels, kernel_size, groups):
        depth = 16 * x.shape[1]
        rows = dense.unpack(packed_weight, out_channels, depth, torch.float32)
        windows = _transformed(rows.view(out_channels, 16, -1).transpose(1, 2), _BACK)
        return windows.unflatten(2, (3, 3)).to(x.dtype)
    stored, depth = stored_dtype(x, packed_weight), _depth(x, kernel_size, groups)
    rows = dense.unpack(packed_weight, _packed_rows(out_channels, groups), depth, stored)
    rows = rows.view(groups, -1, depth)[:, : out_channels // groups]
    channels = x.shape[1] // groups
    return rows.reshape(out_channels, *kernel_size, channels).permute(0, 3, 1, 2)


def _convolution(
    x: Tensor,
    packed_weight: Tensor,
    out_channels: int,
    kernel_size: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str = "none",
    groups: int = 1,
) -> Tensor:
    """Compute ``activation(conv2d(x, weight) + bias + residual)`` with a packed weight.

    Products are accumulated in float32 and the result is rounded once. Pairs of numbers are for height and width.

    Args:
        x: ``[N, C, H, W]``, float32, bfloat16 or float16; copied unless it is channels-last.
        packed_weight: Result of `pack_linear_weight` for the weight ``[out_channels, KH * KW * C / groups]`` in the
            dtype of ``x``: the weight of a stock convolution, with channels as the last dimension. With groups, the
            ``out_channels / groups`` rows of each are followed by rows of zeros up to a multiple of 32. Or the result
            of ``ipex_core.ops.conv.pack_convolution(weight, winograd=True)`` for a window of 3 x 3 with strides and
            dilations of 1: then infinities and NaN reach blocks of 2 x 2 pixels.
        out_channels: The number of output channels.
        kernel_size: ``[KH, KW]``.
        stride: Steps of the window.
        padding: Zeros on each side.
        dilation: Distance of the places of the window.
        bias: ``[out_channels]`` in the dtype of ``x`` or float32, or None.
        residual: In shape and dtype of the result, or None; copied unless it is channels-last.
        activation: ``"none"``, ``"relu"``, ``"gelu"`` (erf), ``"gelu_tanh"`` or ``"silu"``, of the sum.
        groups: Groups of channels, which divide ``C`` and ``out_channels``.

    Returns:
        ``[N, out_channels, OH, OW]`` in the dtype of ``x``, channels-last.

    Raises:
        RuntimeError: For wrong dtypes, shapes or devices.
    """
    if not _is_winograd(x, packed_weight, out_channels, kernel_size, groups):
        stored = stored_dtype(x, packed_weight)
        depth, rows = _depth(x, kernel_size, groups), _packed_rows(out_channels, groups)
        dense.check_header("convolution", "packed_weight", packed_weight, rows, depth, stored)
    wide = acc(x)
    weight = _plain(x, packed_weight, out_channels, kernel_size, groups).to(wide.dtype)
    y = functional.conv2d(wide, weight, None, stride, padding, dilation, groups)
    if bias is not None:
        y = y + bias.to(y.dtype).view(-1, 1, 1)
    if residual is not None:
        y = y + acc(residual)
    return activate(y, activation).to(x.dtype).contiguous(memory_format=torch.channels_last)


def _check_pair(name: str, value: Sequence[int], least: int) -> None:
    fine = len(value) == 2 and all(least <= v <= MOST for v in value)
    check(fine, "convolution", name, f"be 2 numbers from {least} to {MOST}", list(value))


def _out_size(
    x: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> list[int]:
    """Return height and width of the result; 0 or less where the window does not fit."""
    return [
        (x.shape[2 + i] + 2 * padding[i] - dilation[i] * (kernel_size[i] - 1) - 1) // stride[i] + 1
        for i in (0, 1)
    ]


def _check(a: Arguments) -> None:
    check_tensor(a.op, "x", a.x)
    shape = f"shape {list(a.x.shape)}"
    a.require(a.x.dim() == 4 and a.x.shape[1] > 0, "x", "be 4-D [N, C, H, W] with C > 0", shape)
    check_device(a.op, "packed_weight", a.packed_weight, a.x)
    a.require(a.out_channels > 0, "out_channels", "be positive")
    whole = a.groups > 0 and a.x.shape[1] % a.groups == 0 and a.out_channels % a.groups == 0
    of = f"divide the {a.x.shape[1]} channels of x and out_channels = {a.out_channels}"
    a.require(whole, "groups", of)
    for name, value, least in (
        ("kernel_size", a.kernel_size, 1),
        ("stride", a.stride, 1),
        ("padding", a.padding, 0),
        ("dilation", a.dilation, 1),
    ):
        _check_pair(name, value, least)
    check_activation(a.op, a.activation)
    size = _out_size(a.x, a.kernel_size, a.stride, a.padding, a.dilation)
    fits = size[0] > 0 and size[1] > 0
    a.require(fits, "x", "have at least the size of the window with its padding", shape)
    steps = {*a.stride, *a.dilation}
    weight = (a.x, a.packed_weight, a.out_channels, a.kernel_size, a.groups)
    if steps != {1} or not _is_winograd(*weight):
        check_packed(
            a.op,
            "packed_weight",
            a.packed_weight,
            _packed_rows(a.out_channels, a.groups),
            _depth(a.x, a.kernel_size, a.groups),
            a.x.dtype,
        )
    for name, tensor, wanted in (
        ("bias", a.bias, [a.out_channels]),
        ("residual", a.residual, [a.x.shape[0], a.out_channels, *size]),
    ):
        if tensor is not None:
            check_kind(a.op, name, tensor, a.x, or_float32=name == "bias")
            right = list(tensor.shape) == wanted
            a.require(right, name, f"have shape {wanted}", list(tensor.shape))


def _fake(a: Arguments) -> Tensor:
    size = _out_size(a.x, a.kernel_size, a.stride, a.padding, a.dilation)
    # Not new_empty().to(): of one pixel, that keeps the strides of the other format.
    return torch.empty(
        a.x.shape[0],
        a.out_channels,
        *size,
        dtype=a.x.dtype,
        device=a.x.device,
        memory_format=torch.channels_last,
    )


_Args = tuple[Tensor, Tensor, int, list[int], list[int], list[int], list[int], Tensor]


def _case(
    dtype: torch.dtype,
    sizes: tuple[int, int, int, int, int],
    kernel: int | list[int] = 1,
    stride: int | list[int] = 1,
    padding: int | list[int] = 0,
    dilation: int | list[int] = 1,
    seed: int = 0,
) -> _Args:
    """Return arguments for ``sizes`` = N, C, H, W and output channels, ``x`` channels-last."""
    n, c, h, w, out = sizes
    taps, *rest = ([v, v] if isinstance(v, int) else v for v in (kernel, stride, padding, dilation))
    x = randn(n, h, w, c, dtype=dtype, seed=seed).permute(0, 3, 1, 2)
    depth = c * taps[0] * taps[1]
    rows = randn(out, depth, dtype=dtype, seed=seed + 1, scale=depth**-0.5)
    bias = randn(out, dtype=dtype, seed=seed + 2)
    return x, dense.pack(rows), out, taps, rest[0], rest[1], rest[2], bias


def _samples(dtype: torch.dtype) -> Iterator[Sample]:
    cases = {
        "1x1": _case(dtype, (2, 32, 7, 5, 64)),
        "1x1-odd": _case(dtype, (1, 7, 3, 3, 5)),
        "1x1-stride": _case(dtype, (2, 16, 9, 8, 40), 1, 2),
        "1x1-padding": _case(dtype, (1, 16, 3, 4, 33), 1, 1, 1),
        "3x3": _case(dtype, (2, 32, 11, 10, 96), 3, 1, 1),
        "3x3-valid": _case(dtype, (1, 5, 8, 9, 33), 3),
        "3x3-stride": _case(dtype, (1, 24, 9, 14, 48), 3, 2, 1),
        "3x3-dilation": _case(dtype, (1, 8, 12, 11, 20), 3, 1, 2, 2),
        "3x3-one_pixel": _case(dtype, (3, 16, 1, 1, 32), 3, 1, 1),
        "3x3-deep": _case(dtype, (1, 300, 4, 5, 70), 3, 1, 1),
        "1x1-deep": _case(dtype, (1, 900, 3, 5, 70)),
        "3x3-three_channels": _case(dtype, (2, 3, 17, 23, 33), 3, 1, 1),  # parts of several images
        "7x7-three_channels": _case(dtype, (1, 3, 21, 23, 64), 7, 2, 3),
        "1x5": _case(dtype, (1, 12, 6, 9, 32), [1, 5], [1, 2], [0, 2], [1, 2]),
        # Many pixels and whole groups of 32 channels.
        "3x3-lines": _case(dtype, (2, 96, 7, 9, 40), 3, 1, 1),
        "1x1-stride-lines": _case(dtype, (1, 64, 17, 18, 32), 1, 2),
        "3x2-lines": _case(dtype, (2, 32, 21, 19, 33), [3, 2], [2, 1], [3, 0], [2, 3]),
        "wide_padding": _case(dtype, (1, 4, 2, 3, 8), 2, 3, 5),
        "single": _case(dtype, (1, 1, 1, 1, 1)),
    }
    for name, args in cases.items():
        yield Sample(args, id=name)
    for name in ("1x1", "3x3", "3x3-stride", "3x3-deep", "3x3-lines", "1x1-deep"):
        x, _, out, taps, stride, padding, dilation, bias = cases[name]
        height, width = _out_size(x, taps, stride, padding, dilation)
        residual = randn(x.shape[0], height, width, out, dtype=dtype, seed=5).permute(0, 3, 1, 2)
        first = cases[name][:7]
        yield Sample((*first, bias, residual, "relu"), id=f"{name}-residual-relu")
        yield Sample((*first, None, residual), id=f"{name}-residual")
    x, bias, rest = cases["3x3-valid"][0], cases["3x3-valid"][7], cases["3x3-valid"][1:7]
    for activation in ("relu", "gelu", "gelu_tanh", "silu"):
        yield Sample((x, *rest, bias, None, activation), id=activation)
    yield Sample((x, *rest), id="no_bias")
    yield Sample((x, *rest, bias.float()), id="float32_bias")
    plain = randn(1, 33, 6, 7, dtype=dtype, seed=6)
    yield Sample((x.contiguous(), *rest, bias, plain, "silu"), id="not_channels_last")
    yield Sample((x[:0], *rest, bias), id="no_images")
    special = x.clone()
    special[0, 0, 0, 0], special[0, 1, 5, 5] = float("nan"), float("inf")
    yield Sample((special, *rest, bias, None, "relu"), id="special_values")
    yield from _grouped(dtype)
    yield from _winograd(dtype)


def _winograd(dtype: torch.dtype) -> Iterator[Sample]:
    cases: Any = (
        ("whole", (2, 32, 12, 10, 96), 1),
        ("edges", (1, 5, 9, 11, 33), 0),
        ("many", (2, 64, 19, 21, 70), 1),
        ("deep", (1, 300, 4, 5, 70), 1),
        ("one_pixel", (3, 16, 1, 1, 32), 1),
        ("wide_padding", (1, 4, 2, 3, 8), [5, 3]),
        ("single", (1, 1, 1, 1, 1), 1),
        ("no_images", (0, 8, 5, 5, 8), 1),
    )
    for name, sizes, padding in cases:
        case: Any = _case(dtype, sizes, 3, 1, padding)
        x, bias, rest = case[0], case[7], case[2:7]
        depth = sizes[1] * 9
        windows = randn(sizes[4], sizes[1], 9, dtype=dtype, seed=7, scale=depth**-0.5)
        rows = _transformed(windows, _THERE).float().transpose(1, 2).flatten(1)
        packed = _named(dense.pack(rows), rows)
        yield Sample((x, packed, *rest, bias), id=f"winograd-{name}")
        size = _out_size(x, *rest[1:])
        residual = randn(sizes[0], *size, sizes[4], dtype=dtype, seed=9).permute(0, 3, 1, 2)
        for kind in ("relu", "gelu"):
            yield Sample(
                (x, packed, *rest, None, residual, kind), id=f"winograd-{name}-residual-{kind}"
            )


def _grouped(dtype: torch.dtype) -> Iterator[Sample]:
    for name, groups, sizes, window in (
        ("1x1", 3, (2, 24, 7, 5, 96), ()),
        ("1x1-stride", 4, (1, 64, 9, 8, 64), (1, 2)),
        ("3x3-narrow", 8, (1, 32, 9, 10, 32), (3, 1, 1)),
        ("3x3-odd", 5, (2, 15, 6, 7, 35), (3, 1, 1)),
        ("3x3-stride", 2, (1, 48, 11, 10, 80), (3, 2, 1)),
        ("3x3-dilation", 4, (1, 64, 12, 11, 128), (3, 1, 2, 2)),
        ("3x3-wide", 2, (1, 128, 9, 9, 192), (3, 1, 1)),
        ("1x7", 16, (1, 48, 3, 40, 48), ([1, 7], 1, [0, 3])),
        ("single", 6, (1, 6, 5, 5, 12), (3, 1, 1)),
    ):
        case: Any = _case(dtype, sizes, *window)
        x, bias, rest = case[0], case[7], case[2:7]
        depth = _depth(x, rest[1], groups)
        weight = randn(rest[0], depth, dtype=dtype, seed=8, scale=depth**-0.5)
        packed = dense.pack(_in_panels(weight, groups))
        yield Sample((x, packed, *rest, bias, None, "none", groups), id=f"groups-{name}")
        size = _out_size(x, *rest[1:])
        residual = randn(sizes[0], *size, sizes[4], dtype=dtype, seed=9).permute(0, 3, 1, 2)
        for kind in ("relu", "gelu"):
            last = (bias.float(), residual, kind, groups)
            yield Sample((x, packed, *rest, *last), id=f"groups-{name}-residual-{kind}")
    x = x.clone()
    x[0, 0, 2, 2] = float("inf")  # which the other groups do not see
    yield Sample((x, packed, *rest, bias, None, "none", groups), id="groups-special_values")


#: Of ResNet-50: channels, pixels a side, output channels, window, stride.
_SHAPES = (
    (64, 56, 256, 1, 1),
    (512, 28, 128, 1, 1),
    (1024, 14, 256, 1, 1),
    (64, 56, 64, 3, 1),
    (128, 28, 128, 3, 1),
    (512, 7, 512, 3, 1),
)


def _bench() -> Iterator[BenchCase]:
    for n in (1, 16):
        for c, pixels, out, taps, stride in _SHAPES:
            sizes = (n, c, pixels, pixels, out)
            options = (taps, stride, taps // 2)
            places = n * (pixels // stride) ** 2
            depth = c * taps * taps
            data = n * c * pixels * pixels + out * depth + places * out
            yield BenchCase(
                f"{n}x{c}x{pixels}x{pixels}-{out}-{taps}x{taps}",
                lambda dtype, sizes=sizes, options=options: _case(dtype, sizes, *options),
                lambda dtype, data=data: data * dtype.itemsize,
                flops=2 * places * depth * out,
            )


def stock_args(
    x: Tensor,
    packed_weight: Tensor,
    out_channels: int,
    kernel_size: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str = "none",
    groups: int = 1,
) -> tuple[Tensor, Tensor, Tensor | None, list[int], list[int], list[int], int]:
    """Return the arguments of stock ``conv2d`` for the arguments of the op, without a residual and an activation."""
    weight = _plain(x, packed_weight, out_channels, kernel_size, groups)
    return x, weight, bias, stride, padding, dilation, groups


register_op(
    reference=_convolution,
    check=_check,
    fake=_fake,
    samples=_samples,
    stock=functional.conv2d,
    stock_args=stock_args,
    tolerance=PRODUCT_TOLERANCE,
    bench=_bench,
    summary="2-D convolution on a packed weight with bias, residual and activation",
)


# --- batch normalization with fixed statistics ------------------------------------------------------------------------


def _frozen_batch_norm(
    x: Tensor, weight: Tensor, bias: Tensor, running_mean: Tensor, running_var: Tensor, eps: float
) -> Tensor:
    """Scale and shift each channel: ``(x - mean) / sqrt(var + eps) * weight + bias``.

    The statistics are constants, so the result equals batch normalization in evaluation mode. Computed in float32
    and rounded once.

    Args:
        x: ``[N, C, ...]``, float32, bfloat16 or float16.
        weight: ``[C]`` in the dtype of ``x`` or float32, like ``bias``, ``running_mean`` and ``running_var``.
        bias: Added to the normalized values.
        running_mean: Mean of each channel.
        running_var: Variance of each channel.
        eps: Added to the variance.

    Returns:
        A tensor like ``x``: channels-last if ``x`` is, else contiguous. Under autograd, gradients reach every tensor
        argument; with one for ``x`` only, they cost one more call of the op.

    Raises:
        RuntimeError: For wrong dtypes, shapes or devices.

    Source: Ioffe and Szegedy, "Batch Normalization", 2015.
    """
    shape = [1, -1, *[1] * (x.dim() - 2)]
    factor = acc(weight) * torch.rsqrt(acc(running_var) + eps)
    y = (acc(x) - acc(running_mean).view(shape)) * factor.view(shape) + acc(bias).view(shape)
    return y.to(x.dtype)


def _backward(grads: tuple[Tensor], *args: Any) -> tuple[Tensor | None, ...]:
    _, weight, bias, mean, var, eps = args
    (grad,) = grads
    if any(value.requires_grad for value in (weight, bias, mean, var)):
        inputs = [value for value in args[:5] if value.requires_grad]
        with torch.enable_grad():
            y = _frozen_batch_norm(*args)
        found = iter(torch.autograd.grad(y, inputs, grad))
        return (*(next(found) if value.requires_grad else None for value in args[:5]), None)
    zeros = torch.zeros_like(weight)
    return (
        torch.ops.ipex.frozen_batch_norm(grad, weight, zeros, zeros, var, eps),
        None,
        None,
        None,
        None,
        None,
    )


def _norm_check(a: Arguments) -> None:
    check_tensor(a.op, "x", a.x, min_dim=2)
    for name, value in (
        ("weight", a.weight),
        ("bias", a.bias),
        ("running_mean", a.running_mean),
        ("running_var", a.running_var),
    ):
        check_shaped(a.op, name, value, [a.x.shape[1]], a.x, "x", or_float32=True)


def channels_last(x: Tensor) -> bool:
    """Return whether a 4-D tensor is stored with its channels side by side and not plainly."""
    return (
        x.dim() == 4
        and not x.is_contiguous()
        and x.is_contiguous(memory_format=torch.channels_last)
    )


def _norm_fake(a: Arguments) -> Tensor:
    if channels_last(a.x):
        return torch.empty_like(a.x, memory_format=torch.channels_last)
    return fake_like(a.x)


def _parameters(channels: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    var = randn(channels, seed=34).square() + 0.2
    return (
        randn(channels, dtype=dtype, seed=31),
        randn(channels, dtype=dtype, seed=32),
        randn(channels, dtype=dtype, seed=33),
        var.to(dtype),
    )


def _norm_samples(dtype: torch.dtype) -> Iterator[Sample]:
    for shape in ((1, 1, 1, 1), (2, 3, 5, 7), (1, 64, 9, 9), (3, 33, 4, 4), (2, 5, 40, 33)):
        x = randn(*shape, dtype=dtype, seed=30)
        name = "x".join(map(str, shape))
        yield Sample((x, *_parameters(shape[1]), 1e-5), id=name)
        last = x.contiguous(memory_format=torch.channels_last)
        yield Sample((last, *_parameters(shape[1]), 1e-5), id=f"{name}-channels_last")
    x = randn(2, 40, 6, 10, dtype=dtype, seed=35)
    yield Sample((x, *_parameters(40, dtype), 1e-3), id="parameters_in_dtype")
    yield Sample((x.transpose(2, 3), *_parameters(40), 1e-5), id="transposed")
    yield Sample((x[:, 3:20], *_parameters(17), 1e-5), id="slice")
    yield Sample((randn(7, 12, dtype=dtype), *_parameters(12), 1e-5), id="2d")
    yield Sample((randn(2, 3, 4, 5, 6, dtype=dtype), *_parameters(3), 1e-5), id="5d")
    yield Sample((x[:0], *_parameters(40), 1e-5), id="no_images")
    yield Sample((x[:, :0], *_parameters(0), 1e-5), id="no_channels")
    special = x.clone()
    special[0, 1, 2, 3] = float("nan")
    special[0, 2, 2, 3] = float("inf")
    special[1, 3, 0, 0] = -float("inf")
    yield Sample((special, *_parameters(40), 1e-5), id="special_values")


def _stock(
    x: Tensor, weight: Tensor, bias: Tensor, running_mean: Tensor, running_var: Tensor, eps: float
) -> Tensor:
    """Return what torchvision's layer of this name computes."""
    scale = weight.view(1, -1, 1, 1) * (running_var.view(1, -1, 1, 1) + eps).rsqrt()
    shift = bias.view(1, -1, 1, 1) - running_mean.view(1, -1, 1, 1) * scale
    return x * scale.to(x.dtype) + shift.to(x.dtype)


def _norm_bench() -> Iterator[BenchCase]:
    for shape in ((1, 64, 200, 200), (1, 256, 100, 100), (4, 512, 28, 28)):
        for last in (False, True):
            fmt = torch.channels_last if last else torch.contiguous_format

            def make(dtype: torch.dtype, shape: Any = shape, fmt: Any = fmt) -> tuple[Any, ...]:
                x = randn(*shape, dtype=dtype).contiguous(memory_format=fmt)
                return (x, *_parameters(shape[1]), 1e-5)

            count = torch.Size(shape).numel()
            yield BenchCase(
                "x".join(map(str, shape)) + ("-channels_last" if last else ""),
                make,
                lambda dtype, n=count: 2 * n * dtype.itemsize,
            )


register_op(
    reference=_frozen_batch_norm,
    check=_norm_check,
    fake=_norm_fake,
    samples=_norm_samples,
    stock=_stock,
    backward=_backward,
    tolerance={
        torch.float32: (1e-5, 1e-4),
        torch.bfloat16: (1.6e-2, 1e-2),
        torch.float16: (2e-3, 2e-3),
    },
    bench=_norm_bench,
    summary="Batch normalization with fixed statistics",
)
