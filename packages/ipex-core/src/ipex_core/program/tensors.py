# SPDX-License-Identifier: Apache-2.0
"""Built-ins that a graph of stock ops needs: views, layouts, concatenation, images and reductions.

For each function ``f`` there may be ``check_f``: what can be checked without tensors. Sizes that a run gives are not
numbers there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ipex_core.library.checks import check_dtype, check_tensor, dtype_name
from ipex_core.library.spec import check
from ipex_core.ops.conv import MOST
from ipex_core.ops.conv import channels_last as is_channels_last
from ipex_core.ops.linear import activate, check_activation


def _known(*values: Any) -> bool:
    """Return whether all values are known before the run."""
    return all(isinstance(value, (int, float)) for value in values)


def check_dim(op: str, name: str, dim: int, count: int) -> None:
    """Check that ``x``, of ``count`` dimensions, has a dimension."""
    check(-count <= dim < count, op, name, f"be a dimension of x ({count}-D)", dim)


# --- views ----------------------------------------------------------------------------------------------------------


def permute(x: torch.Tensor, dims: list[int]) -> torch.Tensor:
    """Return ``x`` with its dimensions in the order ``dims``, a view."""
    each = sorted(dim + x.dim() if dim < 0 else dim for dim in dims) == list(range(x.dim()))
    check(each, "permute", "dims", f"have each dimension of x ({x.dim()}-D) once", dims)
    return x.permute(dims)


def check_permute(x: Any, dims: Sequence[Any]) -> None:
    """Check the arguments of `permute`."""
    if _known(*dims):
        each = sorted(dim % len(dims) for dim in dims) == list(range(len(dims)))
        wanted = f"have each dimension of x ({len(dims)}-D) once"
        check(each, "permute", "dims", wanted, list(dims))


def expand(x: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    """Return ``x`` repeated to the shape ``sizes``, a view; -1 keeps a size, new dimensions come first."""
    extra = len(sizes) - x.dim()
    wanted = f"be a shape that x of shape {list(x.shape)} broadcasts to"
    fits = extra >= 0 and all(
        size >= 0 if i < extra else size in (-1, x.shape[i - extra]) or x.shape[i - extra] == 1
        for i, size in enumerate(sizes)
    )
    check(fits and min(sizes, default=0) >= -1, "expand", "sizes", wanted, sizes)
    return x.expand(sizes)


def unsqueeze(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Return ``x`` with a dimension of size 1 before ``dim``, a view."""
    wanted = f"be a place in {x.dim() + 1} dimensions"
    check(-x.dim() - 1 <= dim <= x.dim(), "unsqueeze", "dim", wanted, dim)
    return x.unsqueeze(dim)


def squeeze(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Return ``x`` without the dimension ``dim`` if that has size 1, else ``x``; a view."""
    check_dim("squeeze", "dim", dim, max(x.dim(), 1))
    return x.squeeze(dim)


def slice(x: torch.Tensor, dim: int, start: int, end: int, step: int) -> torch.Tensor:
    """Return each ``step``-th element of ``x`` from ``start`` to before ``end`` along ``dim``, a view.

    Negative bounds count from the end; bounds outside are moved to the ends.
    """
    check_dim("slice", "dim", dim, x.dim())
    check_slice(x, dim, start, end, step)
    return torch.ops.aten.slice.Tensor(x, dim, start, end, step)  # type: ignore[no-any-return]


def check_slice(x: Any, dim: Any, start: Any, end: Any, step: Any) -> None:
    """Check the arguments of `slice`."""
    check(not _known(step) or step > 0, "slice", "step", "be positive", step)


def select(x: torch.Tensor, dim: int, index: int) -> torch.Tensor:
    """Return ``x`` at ``index`` along ``dim``, without that dimension; a view."""
    check_dim("select", "dim", dim, x.dim())
    size = x.shape[dim]
    check(-size <= index < size, "select", "index", f"be in [{-size}, {size})", index)
    return x.select(dim, index)


# --- layouts --------------------------------------------------------------------------------------------------------


def contiguous(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` with its last dimension innermost in memory; ``x`` itself if it is so."""
    return x.contiguous()


def channels_last(x: torch.Tensor) -> torch.Tensor:
    """Return an image ``x`` [N, C, H, W] with its channels innermost in memory; ``x`` itself if it is so."""
    check(x.dim() == 4, "channels_last", "x", "be 4-D", f"{x.dim()}-D")
    return x.contiguous(memory_format=torch.channels_last)


def _format(*inputs: torch.Tensor) -> torch.memory_format:
    """Return the memory format of a result: channels last if all inputs are so, else contiguous."""
    last = all(map(is_channels_last, inputs))
    return torch.channels_last if last else torch.contiguous_format


# --- copies ---------------------------------------------------------------------------------------------------------


def check_cat(tensors: Sequence[Any], dim: Any) -> None:
    """Check the arguments of `cat`."""
    check(len(tensors) > 0, "cat", "tensors", "have at least 1 tensor(s)", 0)


def cat(tensors: list[torch.Tensor], dim: int) -> torch.Tensor:
    """Return tensors of one dtype side by side along ``dim``; channels last if all of them are, else contiguous."""
    check_cat(tensors, dim)
    first = tensors[0]
    check_dim("cat", "dim", dim, first.dim())
    dim %= first.dim()
    for i, one in enumerate(tensors):
        wanted = f"have the dtype of tensor 0 = {dtype_name(first.dtype)}"
        check(one.dtype == first.dtype, "cat", f"tensor {i}", wanted, dtype_name(one.dtype))
        fits = one.dim() == first.dim() and all(
            size == first.shape[d] for d, size in enumerate(one.shape) if d != dim
        )
        wanted = f"have the shape of tensor 0 = {list(first.shape)} except in dimension {dim}"
        check(fits, "cat", f"tensor {i}", wanted, list(one.shape))
    return torch.cat(tensors, dim).contiguous(memory_format=_format(*tensors))


def check_pad(x: Any, padding: Sequence[Any], value: float) -> None:
    """Check the arguments of `pad`."""
    check(len(padding) % 2 == 0, "pad", "padding", "have two numbers for a dimension", len(padding))


def pad(x: torch.Tensor, padding: list[int], value: float) -> torch.Tensor:
    """Return ``x`` with ``value`` added at the ends, or, where ``padding`` is negative, cut off.

    ``padding`` has two numbers for each dimension, from the last one on. The result is channels last if ``x`` is, else
    contiguous.
    """
    check_pad(x, padding, value)
    wanted = f"have at most two numbers for each dimension of x ({x.dim()}-D)"
    check(len(padding) <= 2 * x.dim(), "pad", "padding", wanted, padding)
    for i in range(len(padding) // 2):
        size = x.shape[-1 - i]
        low, high = padding[2 * i : 2 * i + 2]
        fits = min(low, 0) + min(high, 0) >= -size
        text = f"cut off at most {size} in dimension {x.dim() - 1 - i}"
        check(fits, "pad", "padding", text, padding)
    y = torch.nn.functional.pad(x, padding, value=value)
    return y.contiguous(memory_format=_format(x))


# --- pooling --------------------------------------------------------------------------------------------------------


def _check_pair(
    op: str, name: str, values: Sequence[Any], least: int, *, may_be_empty: bool
) -> None:
    counts = "0, 1 or 2" if may_be_empty else "1 or 2"
    fits = len(values) <= 2 and (may_be_empty or len(values) > 0)
    check(fits, op, name, f"have {counts} numbers", len(values))
    for value in values:
        check(not _known(value) or value >= least, op, name, f"be at least {least}", value)


def _check_windows(
    op: str, kernel_size: Sequence[Any], stride: Sequence[Any], padding: Sequence[Any]
) -> None:
    _check_pair(op, "kernel_size", kernel_size, 1, may_be_empty=False)
    _check_pair(op, "stride", stride, 1, may_be_empty=True)
    _check_pair(op, "padding", padding, 0, may_be_empty=False)
    for i in range(2):
        pad, size = padding[i % len(padding)], kernel_size[i % len(kernel_size)]
        fits = not _known(pad, size) or 2 * pad <= size
        check(fits, op, "padding", f"be at most half of kernel_size = {size}", pad)


def check_max_pool2d(
    x: Any,
    kernel_size: Sequence[Any],
    stride: Sequence[Any],
    padding: Sequence[Any],
    dilation: Sequence[Any],
    ceil_mode: bool,
) -> None:
    """Check the arguments of `max_pool2d`."""
    _check_windows("max_pool2d", kernel_size, stride, padding)
    _check_pair("max_pool2d", "dilation", dilation, 1, may_be_empty=False)


def _check_image(
    op: str,
    x: torch.Tensor,
    kernel_size: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    ceil_mode: bool,
) -> None:
    check_tensor(op, "x", x, min_dim=0)
    check(x.dim() == 4, op, "x", "be 4-D", f"{x.dim()}-D")
    steps = stride or kernel_size
    for i in range(2):
        size = x.shape[2 + i]
        window = dilation[i % len(dilation)] * (kernel_size[i % len(kernel_size)] - 1) + 1
        step, pad = steps[i % len(steps)], padding[i % len(padding)]
        room = size + 2 * pad - window + (step - 1 if ceil_mode else 0)
        wanted = f"have room for a window of {window} in dimension {2 + i}"
        check(size > 0 and room >= 0 and x.shape[1] > 0, op, "x", wanted, list(x.shape))


def max_pool2d(
    x: torch.Tensor,
    kernel_size: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    ceil_mode: bool,
) -> torch.Tensor:
    """Return the largest value of each window of images ``x`` [N, C, H, W]; see `torch.nn.MaxPool2d`.

    An empty ``stride`` is ``kernel_size``. The result has the memory format of ``x``.
    """
    check_max_pool2d(x, kernel_size, stride, padding, dilation, ceil_mode)
    _check_image("max_pool2d", x, kernel_size, stride, padding, dilation, ceil_mode)
    y = torch.max_pool2d(x, kernel_size, stride, padding, dilation, ceil_mode)
    return y.contiguous(memory_format=_format(x))


def check_avg_pool2d(
    x: Any,
    kernel_size: Sequence[Any],
    stride: Sequence[Any],
    padding: Sequence[Any],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: Any,
) -> None:
    """Check the arguments of `avg_pool2d`."""
    _check_windows("avg_pool2d", kernel_size, stride, padding)
    fits = divisor_override is None or not _known(divisor_override) or divisor_override != 0
    check(fits, "avg_pool2d", "divisor_override", "not be 0", divisor_override)


def avg_pool2d(
    x: torch.Tensor,
    kernel_size: list[int],
    stride: list[int],
    padding: list[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
) -> torch.Tensor:
    """Return the mean of each window of images ``x`` [N, C, H, W], summed in float32; see `torch.nn.AvgPool2d`.

    An empty ``stride`` is ``kernel_size``. The result has the memory format of ``x``.
    """
    check_avg_pool2d(
        x, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override
    )
    _check_image("avg_pool2d", x, kernel_size, stride, padding, [1], ceil_mode)
    y = torch.nn.functional.avg_pool2d(
        x.float(), kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override
    )
    return y.to(x.dtype).contiguous(memory_format=_format(x))


# --- convolution ----------------------------------------------------------------------------------------------------


def check_window(
    op: str, count: int, stride: Sequence[Any], padding: Sequence[Any], dilation: Sequence[Any]
) -> None:
    """Check how the window of a convolution of ``count`` dimensions moves."""
    for name, values, least in (
        ("stride", stride, 1),
        ("padding", padding, 0),
        ("dilation", dilation, 1),
    ):
        check(len(values) == count, op, name, f"have {count} numbers", len(values))
        for value in values:
            wanted = f"be in [{least}, {MOST}]"
            check(not _known(value) or least <= value <= MOST, op, name, wanted, value)


def check_depthwise_convolution(
    x: Any,
    weight: Any,
    bias: Any,
    stride: Sequence[Any],
    padding: Sequence[Any],
    dilation: Sequence[Any],
    activation: str,
) -> None:
    """Check the arguments of `depthwise_convolution`."""
    check_window("depthwise_convolution", 2, stride, padding, dilation)
    check_activation("depthwise_convolution", activation)


def depthwise_convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    activation: str = "none",
) -> torch.Tensor:
    """Convolve each channel of images ``x`` [N, C, H, W] alone, then add and activate; see `torch.nn.Conv2d`.

    ``weight`` is [KH, KW, C] in the dtype of ``x``, ``bias`` [C] in that dtype or float32, ``activation`` as of
    ``ipex::convolution``. Products are summed in float32 and the result is rounded once. It is channels last.
    """
    op = "depthwise_convolution"
    check_depthwise_convolution(x, weight, bias, stride, padding, dilation, activation)
    check_tensor(op, "x", x, min_dim=0)
    shape = f"shape {list(x.shape)}"
    check(x.dim() == 4 and x.shape[1] > 0, op, "x", "be 4-D [N, C, H, W] with C > 0", shape)
    check_dtype(op, "weight", weight, x)
    channels, sizes = x.shape[1], list(weight.shape)
    wanted = f"be 3-D [KH, KW, C] with KH, KW > 0 and C = {channels}"
    fits = len(sizes) == 3 and min(sizes) > 0 and sizes[2] == channels
    check(fits, op, "weight", wanted, f"shape {sizes}")
    for i in range(2):
        size, window = x.shape[2 + i], dilation[i] * (sizes[i] - 1) + 1
        wanted = f"have room for a window of {window} in dimension {2 + i}"
        check(size > 0 and size + 2 * padding[i] >= window, op, "x", wanted, list(x.shape))
    if bias is not None:
        check_dtype(op, "bias", bias, x, or_float32=True)
        right = list(bias.shape) == [channels]
        check(right, op, "bias", f"have shape {[channels]}", list(bias.shape))
        bias = bias.float()
    plain = weight.float().permute(2, 0, 1).unsqueeze(1)
    y = torch.nn.functional.conv2d(x.float(), plain, bias, stride, padding, dilation, channels)
    return activate(y, activation).to(x.dtype).contiguous(memory_format=torch.channels_last)


# --- normalization ---------------------------------------------------------------------------------------------------


def check_group_norm(x: Any, groups: Any, weight: Any, bias: Any, eps: float) -> None:
    """Check the arguments of `group_norm`."""
    check(not _known(groups) or groups > 0, "group_norm", "groups", "be positive", groups)


def group_norm(
    x: torch.Tensor,
    groups: int,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    """Normalize each of ``groups`` groups of channels of ``x`` [N, C, ...]; see `torch.nn.GroupNorm`.

    ``weight`` and ``bias`` are float32 [C]. The result is computed in float32, rounded once, and has the memory format
    of ``x``.
    """
    op = "group_norm"
    check_group_norm(x, groups, weight, bias, eps)
    check_tensor(op, "x", x, min_dim=2)
    channels = x.shape[1]
    wanted = f"have a multiple of groups = {groups} channels"
    check(channels > 0 and channels % groups == 0, op, "x", wanted, list(x.shape))
    for name, value in (("weight", weight), ("bias", bias)):
        if value is not None:
            wanted = f"be contiguous of shape {[channels]}"
            fits = value.dtype == torch.float32
            check(fits, op, name, "have dtype float32", dtype_name(value.dtype))
            right = list(value.shape) == [channels] and value.is_contiguous()
            check(right, op, name, wanted, list(value.shape))
    y = torch.nn.functional.group_norm(x.float(), groups, weight, bias, eps)
    return y.to(x.dtype).contiguous(memory_format=_format(x))


# --- upsampling -----------------------------------------------------------------------------------------------------


def check_size(op: str, x: Any, height: Any, width: Any, *_: Any) -> None:
    """Check the size of an image that is made."""
    for name, value in (("height", height), ("width", width)):
        check(not _known(value) or value > 0, op, name, "be positive", value)


def _check_upsampled(op: str, x: torch.Tensor) -> None:
    check_tensor(op, "x", x, min_dim=0)
    wanted = "be 4-D [N, C, H, W] with C, H, W > 0"
    check(x.dim() == 4 and min(x.shape[1:]) > 0, op, "x", wanted, f"shape {list(x.shape)}")


def upsample_bilinear2d(
    x: torch.Tensor, height: int, width: int, align_corners: bool, scale_h: float, scale_w: float
) -> torch.Tensor:
    """Return images ``x`` [N, C, H, W] in another size, interpolated; see `torch.nn.Upsample`.

    Scales are factors of the sizes, 0 for what the sizes give. The result is computed in float32, rounded once, and has
    the memory format of ``x``.
    """
    check_size("upsample_bilinear2d", x, height, width)
    _check_upsampled("upsample_bilinear2d", x)
    y: torch.Tensor = torch.ops.aten.upsample_bilinear2d.default(
        x.float(), [height, width], align_corners, scale_h or None, scale_w or None
    )
    return y.to(x.dtype).contiguous(memory_format=_format(x))


def upsample_nearest2d(
    x: torch.Tensor, height: int, width: int, scale_h: float, scale_w: float
) -> torch.Tensor:
    """Return images ``x`` [N, C, H, W] in another size, of the nearest elements; see `torch.nn.Upsample`.

    Scales are factors of the sizes, 0 for what the sizes give. The result has the memory format of ``x``.
    """
    check_size("upsample_nearest2d", x, height, width)
    _check_upsampled("upsample_nearest2d", x)
    y: torch.Tensor = torch.ops.aten.upsample_nearest2d.default(
        x, [height, width], scale_h or None, scale_w or None
    )
    return y.contiguous(memory_format=_format(x))


# --- reductions -----------------------------------------------------------------------------------------------------


def check_dims(op: str, x: Any, dims: Sequence[Any], keepdim: bool) -> None:
    """Check the arguments of a reduction."""
    check(not _known(*dims) or len(set(dims)) == len(dims), op, "dims", "be distinct", list(dims))


def _dims(op: str, x: torch.Tensor, dims: list[int]) -> list[int]:
    """Return the dimensions to reduce, counted from 0; an empty list means all."""
    check_tensor(op, "x", x, min_dim=0)
    for dim in dims:
        check_dim(op, "dims", dim, max(x.dim(), 1))
    plain = [dim % max(x.dim(), 1) for dim in dims]
    check(len(set(plain)) == len(plain), op, "dims", "be distinct", dims)
    return plain or list(range(x.dim()))


def mean(x: torch.Tensor, dims: list[int], keepdim: bool) -> torch.Tensor:
    """Return the mean over the dimensions ``dims`` (all if there are none), summed in float32, contiguous."""
    return x.float().mean(_dims("mean", x, dims), keepdim).to(x.dtype).contiguous()


def sum(x: torch.Tensor, dims: list[int], keepdim: bool) -> torch.Tensor:
    """Return the sum over the dimensions ``dims`` (all if there are none), in float32, contiguous."""
    return x.float().sum(_dims("sum", x, dims), keepdim).to(x.dtype).contiguous()


def amax(x: torch.Tensor, dims: list[int], keepdim: bool) -> torch.Tensor:
    """Return the largest value over the dimensions ``dims`` (all if there are none), contiguous."""
    plain = _dims("amax", x, dims)
    some = all(x.shape[dim] > 0 for dim in plain if x.dim())
    check(some, "amax", "x", "have elements in the dimensions dims", list(x.shape))
    return x.amax(plain, keepdim).contiguous()
