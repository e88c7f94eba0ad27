# SPDX-License-Identifier: Apache-2.0
"""Pooling on uint8 codes, so that what passes between two INT8 convolutions stays in 8 bits."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ipex_quant.int8.boundary import Codes, Scale, plain
from ipex_quant.int8.modules import (
    Int8Module,
    ScaledModule,
    codes_or_float,
    read_scale,
    result_dtype,
)
from ipex_quant.int8.ops import int8_conv

_F = nn.functional
_MAX: dict[type[nn.Module], int] = {nn.MaxPool1d: 1, nn.MaxPool2d: 2, nn.MaxPool3d: 3}
_AVG: dict[type[nn.Module], int] = {nn.AvgPool1d: 1, nn.AvgPool2d: 2}
_ADAPTIVE: dict[type[nn.Module], int] = {
    nn.AdaptiveAvgPool1d: 1,
    nn.AdaptiveAvgPool2d: 2,
    nn.AdaptiveAvgPool3d: 3,
}


class Mean(nn.Module):
    """``x.mean(dims, keepdim)`` as a module; stands in a forward that was rewritten, so that it can take codes."""

    def __init__(self, dims: tuple[int, ...], keepdim: bool) -> None:
        super().__init__()
        self.dims, self.keepdim = dims, keepdim

    def forward(self, x: Tensor) -> Tensor:
        """Return the mean."""
        return x.mean(self.dims, self.keepdim)

    def extra_repr(self) -> str:
        """Return the dimensions."""
        return f"{self.dims}, keepdim={self.keepdim}"


def role_of_pool(pool: Any) -> str:
    """Return ``"same_codes"`` or ``"mean"`` for a module that has a form for codes, or an empty string."""
    kind = type(pool)
    if kind in _MAX:
        dilated = any(d != 1 for d in _sizes(pool.dilation, _MAX[kind]))
        return "" if dilated or pool.ceil_mode or pool.return_indices else "same_codes"
    if kind in _AVG:
        padded = any(_sizes(pool.padding, _AVG[kind]))
        plain = not pool.ceil_mode and getattr(pool, "divisor_override", None) is None
        return "same_codes" if plain and (pool.count_include_pad or not padded) else ""
    if kind is Mean:
        return "mean"
    if kind in _ADAPTIVE and set(_sizes(pool.output_size, 1)) == {1}:
        return "mean"
    return ""


def pool_for(pool: Any, channels: int, scale: Scale) -> nn.Module:
    """Return the form of a pooling module for codes of a scale."""
    kind = type(pool)
    if kind is Mean:
        return Int8Mean(pool.dims, pool.keepdim, scale)
    if kind in _ADAPTIVE:
        return Int8Mean(tuple(range(-_ADAPTIVE[kind], 0)), True, scale)
    dims = {**_MAX, **_AVG}[kind]
    kernel, stride, padding = (
        _sizes(it, dims) for it in (pool.kernel_size, pool.stride, pool.padding)
    )
    if kind in _MAX:
        return Int8MaxPool(kernel, stride, padding)
    return Int8AvgPool(kernel, stride, padding, channels, scale)


def _sizes(value: Any, dims: int) -> list[int]:
    return [value] * dims if isinstance(value, int) else list(value)


class _Pool(Int8Module):
    """Kernel size, stride and padding, each a number for each dimension."""

    arguments: ClassVar = {"kernel_size": list, "stride": list, "padding": list}

    def __init__(self, kernel_size: list[int], stride: list[int], padding: list[int]) -> None:
        super().__init__()
        self.kernel_size, self.stride, self.padding = kernel_size, stride, padding

    def _stock(self, name: str, x: Tensor) -> Tensor:
        """Compute on floats, which come from layers that stayed float."""
        result: Tensor = getattr(_F, f"{name}{len(self.stride)}d")(
            x, self.kernel_size, self.stride, self.padding
        )
        return result

    def extra_repr(self) -> str:
        """Return the window."""
        window = ("kernel_size", "stride", "padding")
        return ", ".join(f"{name}={tuple(getattr(self, name))}" for name in window)


class Int8MaxPool(_Pool):
    """Maximum pooling of one to three dimensions that takes uint8 codes too, of any size, which stock does not."""

    def forward(self, input: Any) -> Any:
        """Return the maxima."""
        codes = input.get(input.scale) if type(input) is Codes else plain(input)
        if codes.dtype != torch.uint8 or type(input) is not Codes:
            return self._stock("max_pool", codes)
        return input.like(self._maxima(codes))

    def _maxima(self, x: Tensor) -> Tensor:
        dims = len(self.stride)
        # Where a graph is compiled the stock op states a layout that it does not give.
        if x.dim() == dims + 2 and dims < 3 and not torch.compiler.is_compiling():
            one = [1] * (2 - dims)
            window = (
                [*one, *self.kernel_size],
                [*one, *self.stride],
                [*(0 for _ in one), *self.padding],
            )
            wide = x.unsqueeze(2) if one else x
            y: Tensor = torch.ops.quantized.max_pool2d(wide, *window, [1, 1], False)
            return y.squeeze(2) if one else y
        if any(self.padding):
            both = [pad for pad in reversed(self.padding) for _ in range(2)]
            x = _F.pad(x, both)  # 0 is the least code
        for i, (kernel, stride) in enumerate(zip(self.kernel_size, self.stride, strict=True)):
            x = _maxima(x, i - len(self.stride), kernel, stride)
        return x


def _maxima(x: Tensor, dim: int, kernel: int, stride: int) -> Tensor:
    """Return the maximum of each window along one dimension."""
    count = (x.shape[dim] - kernel) // stride + 1
    size = stride * (count - 1) + 1
    result = x.narrow(dim, 0, size)
    index: list[Any] = [slice(None)] * x.dim()
    index[dim] = slice(None, None, stride)
    result = result[tuple(index)]
    for start in range(1, kernel):
        result = torch.maximum(result, x.narrow(dim, start, size)[tuple(index)])
    return result


class Int8AvgPool(_Pool, ScaledModule):
    """Average pooling of one or two dimensions that takes uint8 codes too, and gives codes of the same scale.

    On codes it is a convolution of each channel with a constant: nothing is converted to float in between.
    """

    arguments: ClassVar = {**_Pool.arguments, "channels": int, "scale": read_scale}
    scale: Scale
    weight: Tensor
    weight_scale: Tensor

    def __init__(
        self,
        kernel_size: list[int],
        stride: list[int],
        padding: list[int],
        channels: int,
        scale: Scale,
    ) -> None:
        super().__init__(kernel_size, stride, padding)
        self.channels, self.scale = channels, scale
        weight = torch.full((channels, 1, *kernel_size), 127, dtype=torch.int8)
        step = torch.full((channels,), 1.0 / (127 * weight[0].numel()))
        self.register_buffer("weight", weight, persistent=False)
        self.register_buffer("weight_scale", step, persistent=False)

    def _apply(self, fn: Any, recurse: bool = True) -> nn.Module:
        return self  # the constants have one dtype only

    def forward(self, input: Any) -> Any:
        """Return the averages."""
        codes = codes_or_float(input, self.scale)
        if codes.dtype != torch.uint8:
            return self._stock("avg_pool", codes)
        scale, zero = self.scale.scale, self.scale.zero
        ones = [1] * len(self.stride)
        head = (codes, self.weight, self.weight_scale, scale, zero, None)
        window = (self.stride, self.padding, ones, self.channels)
        y = int8_conv(*head, *window, "none", torch.uint8, scale, zero, None, 1.0, 0)
        return input.like(y)


class Int8Mean(ScaledModule):
    """Mean over dimensions that takes uint8 codes too; gives float, since a mean varies less than what it is of."""

    arguments: ClassVar = {"dims": tuple, "keepdim": bool, "scale": read_scale}
    scale: Scale

    def __init__(self, dims: tuple[int, ...], keepdim: bool, scale: Scale) -> None:
        super().__init__()
        self.dims, self.keepdim, self.scale = dims, keepdim, scale

    def forward(self, input: Any) -> Tensor:
        """Return the mean."""
        wanted = result_dtype(input)
        x = codes_or_float(input, self.scale)
        if x.dtype != torch.uint8:
            return x.mean(self.dims, self.keepdim)  # type: ignore[no-any-return]
        total = x.sum(self.dims, self.keepdim, dtype=torch.int32)
        count = 1
        for dim in self.dims:
            count = count * x.shape[dim]
        mean = (total.float() / count - self.scale.zero) * self.scale.scale
        return mean.to(wanted)  # type: ignore[no-any-return]

    def extra_repr(self) -> str:
        """Return the dimensions."""
        return f"{self.dims}, keepdim={self.keepdim}"
