# SPDX-License-Identifier: Apache-2.0
"""Convolutions and transposed convolutions on 8-bit integers.

Output position ``q * stride + r`` of a transposed convolution is a sum over the inputs ``q - j`` with the weights
``r + j * stride``. So one convolution with kernel ``ceil(kernel / stride)`` and ``stride`` times as many channels for
each dimension gives all outputs, which then only have to be put in order. No product with an inserted zero is computed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ipex_quant.int8.modules import Int8Layer, codes_or_float, result_dtype
from ipex_quant.int8.ops import ACTIVATIONS, int8_conv, int8_conv_sum_

#: Beyond any stride or padding.
_LARGEST = 1 << 31


def _padding(conv: Any) -> list[int]:
    """Return the padding as numbers; what cannot be said in these is an error of the caller."""
    if conv.padding == "valid":
        return [0] * len(conv.stride)
    if conv.padding == "same":
        totals = [d * (k - 1) for d, k in zip(conv.dilation, conv.kernel_size, strict=True)]
        return [total // 2 for total in totals]
    return list(conv.padding)


def _check_geometry(geometry: Mapping[str, Any], weight: Tensor) -> None:
    """Check the geometry that a file has: oneDNN divides by these numbers.

    Raises:
        ValueError: No convolution has it with this weight ``[out_channels, in_channels / groups, ...]``.
    """
    if not 3 <= weight.dim() <= 5:
        raise ValueError(f"weight must be 3-D to 5-D, got {list(weight.shape)}")
    for name, value in geometry.items():
        least = 0 if "padding" in name else 1
        if name == "groups":
            fits = type(value) is int and value > 0 and weight.shape[0] % value == 0
            wanted = f"be a divisor of {weight.shape[0]} channels"
        else:
            count = weight.dim() - 2
            fits = isinstance(value, list) and len(value) == count
            fits = fits and all(type(it) is int and least <= it < _LARGEST for it in value)
            wanted = f"be {count} integers of at least {least}"
        if not fits:
            raise ValueError(f"{name} must {wanted}, got {value}")


class _Convolution(Int8Layer):
    """What ordinary and transposed convolutions share."""

    activations = tuple(ACTIVATIONS)
    #: Attributes that a folder has, as `torch.nn` names them.
    geometry: ClassVar[tuple[str, ...]]
    stride: list[int]
    kernel_size: Any
    in_channels: Any
    out_channels: Any
    groups: int

    def __init__(self, conv: Any, weight: Tensor, weight_scale: Tensor) -> None:
        super().__init__(weight, weight_scale, conv.bias)

    def saved(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return what a file needs to make this layer again: numbers and texts, and plain tensors."""
        about, tensors = super().saved()
        return {**about, **{name: getattr(self, name) for name in self.geometry}}, tensors

    @classmethod
    def _of_parts(cls, about: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Int8Layer:
        geometry = {k: about[k] for k in cls.geometry}
        _check_geometry(geometry, tensors["weight"])
        conv = SimpleNamespace(bias=tensors.get("bias"), **geometry)
        return cls(conv, tensors["weight"].clone(), tensors["weight_scale"].clone())

    def _convolve(
        self,
        x: Tensor,
        wanted: torch.dtype,
        window: tuple[list[int], list[int], list[int]],
        residual: Tensor | None = None,
        free: bool = False,
    ) -> Tensor:
        """Return codes or floats.

        Args:
            x: Codes or floats.
            wanted: Dtype of a float result.
            window: Stride, padding and dilation.
            residual: What is added, codes or floats.
            free: Whether the residual may be overwritten.
        """
        # oneDNN gives float32, bfloat16 or codes.
        dtype = wanted if wanted in (torch.float32, torch.bfloat16) else torch.float32
        run = int8_conv_sum_ if free else int8_conv
        y: Tensor = run(
            x,
            self._buffers["weight"],
            self.weight_scale,
            self.input.scale,
            self.input.zero,
            self.bias,
            *window,
            self.groups,
            self.activation,
            torch.uint8 if self.output else dtype,
            self.output.scale or 1.0,
            self.output.zero,
            residual,
            self.residual.scale or 1.0,
            self.residual.zero,
        )
        return y if self.output or dtype == wanted else y.to(wanted)

    def extra_repr(self) -> str:
        """Return sizes and scales."""
        geometry = f"kernel_size={tuple(self.kernel_size)}, stride={tuple(self.stride)}"
        head = f"{self.in_channels}, {self.out_channels}, {geometry}"
        return f"{head}, scale={self.input.scale:.4g}{self._extras()}"


class Int8Conv(_Convolution):
    """A convolution of one, two or three dimensions on int8 weights, with activations of static scale.

    Takes float or uint8 codes of its own scale; gives float, or uint8 codes where the next layer takes them.

    Attributes:
        weight: The float weight ``[out_channels, in_channels / groups, ...]``; a state dict has the int8 one.
        weight_scale: float32 ``[out_channels]``.
        bias: float32 ``[out_channels]``, or None.
        residual_free: Whether the residual is not read after this layer, so that it may be overwritten.
    """

    geometry = ("stride", "padding", "dilation", "groups")
    extras: ClassVar = {**Int8Layer.extras, "residual_free": bool}
    residual_free: bool = False

    def __init__(self, conv: Any, weight: Tensor, weight_scale: Tensor) -> None:
        super().__init__(conv, weight, weight_scale)
        self.stride, self.dilation = list(conv.stride), list(conv.dilation)
        self.groups, self.padding = conv.groups, _padding(conv)

    # Models read the geometry of their layers, as MobileNetV2 of transformers does to pad.

    @property
    def kernel_size(self) -> tuple[int, ...]:
        """Sizes of the kernel."""
        return tuple(self.weight_shape()[2:])

    @property
    def in_channels(self) -> int:
        """Channels that it reads."""
        return self.weight_shape()[1] * self.groups

    @property
    def out_channels(self) -> int:
        """Channels that it gives."""
        return self.weight_shape()[0]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the convolution's output."""
        x, residual = self._operands(*args, **kwargs)
        wanted = result_dtype(x)
        x, free = codes_or_float(x, self.input), False
        if residual is not None:
            kept, residual = residual, codes_or_float(residual, self.residual)
            free = (
                self.residual_free and residual.dtype == torch.uint8 and kept.overwrite(self.name)
            )
        y = self._convolve(x, wanted, (self.stride, self.padding, self.dilation), residual, free)
        return self._give(y, wanted)


class Int8ConvTranspose(_Convolution):
    """A transposed convolution of one, two or three dimensions on int8 weights, with activations of static scale.

    Takes float or uint8 codes of its own scale; gives float, or uint8 codes where the next layer takes them.

    Attributes:
        weight: The float weight ``[in_channels, out_channels / groups, ...]``. A state dict has the int8 one of the
            ordinary convolution, ``[groups * prod(stride) * out_channels / groups, in_channels / groups, ...]``.
        weight_scale: float32, one for each row of that.
        bias: float32, one for each row of that, or None.
    """

    geometry = ("stride", "padding", "output_padding", "groups")

    def __init__(self, conv: Any, weight: Tensor, weight_scale: Tensor) -> None:
        super().__init__(conv, weight, weight_scale)
        self.stride, self.padding = list(conv.stride), list(conv.padding)
        self.output_padding, self.groups = list(conv.output_padding), int(conv.groups)
        self.kernel_size = list(weight.shape[2:])
        self.out_channels = weight.shape[0]
        self._buffers["weight"] = self._spread(weight)
        for name in ("weight_scale", "bias"):
            values = self._buffers[name]
            self._buffers[name] = None if values is None else self._repeat(values)

    @property
    def in_channels(self) -> int:
        """Channels that it reads."""
        return self.weight_shape()[0]

    def _taps(self) -> list[int]:
        """Return the kernel size of the ordinary convolution; output padding can reach beyond the last input."""
        sizes = zip(self.kernel_size, self.stride, self.padding, self.output_padding, strict=True)
        return [-(-max(k, k + extra - pad) // s) for k, s, pad, extra in sizes]

    def _spread(self, weight: Tensor) -> Tensor:
        """Return the weight of the ordinary convolution: rows in the order group, position, channel."""
        dims, taps = len(self.stride), self._taps()
        sizes = list(zip(taps, self.stride, self.kernel_size, strict=True))
        ends = [end for t, s, k in reversed(sizes) for end in (0, t * s - k)]
        padded = nn.functional.pad(weight, ends)
        rows, inputs = weight.shape[:2]
        split = [size for t, s, _ in sizes for size in (t, s)]
        padded = padded.view(self.groups, rows // self.groups, inputs, *split)
        tap_dims = [3 + 2 * i for i in range(dims)]
        step_dims = [4 + 2 * i for i in range(dims)]
        ordered = padded.flip(tap_dims).permute(0, *step_dims, 1, 2, *tap_dims)
        return ordered.reshape(rows * math.prod(self.stride), inputs, *taps).contiguous()

    def _repeat(self, values: Tensor) -> Tensor:
        """Return numbers of the output channels for each row of the weight."""
        parts = values.view(self.groups, 1, -1)
        return parts.expand(-1, math.prod(self.stride), -1).reshape(-1).clone()

    def _once(self, values: Tensor) -> Tensor:
        parts = values.view(self.groups, math.prod(self.stride), -1)
        return parts[:, 0].reshape(-1).clone()

    def int_weight(self) -> Tensor:
        """Return the plain int8 weight ``[out_channels, in_channels / groups, ...]``."""
        dims, taps = len(self.stride), self._taps()
        spread: Any = self._buffers["weight"]
        inputs, per_group = spread.shape[1], self.out_channels // self.groups
        parts = spread.view(self.groups, *self.stride, per_group, inputs, *taps)
        steps, last = range(1, 1 + dims), 3 + dims
        both = [d for i, s in enumerate(steps) for d in (last + i, s)]
        plain = parts.flip(list(range(last, last + dims))).permute(0, 1 + dims, 2 + dims, *both)
        sizes = [t * s for t, s in zip(taps, self.stride, strict=True)]
        plain = plain.reshape(self.out_channels, inputs, *sizes)
        for i, size in enumerate(self.kernel_size):
            plain = plain.narrow(2 + i, 0, size)
        return plain.contiguous()

    def weight_shape(self) -> torch.Size:
        """Return the shape of the float weight."""
        inputs = self._buffers["weight"].shape[1]  # type: ignore[union-attr]
        sizes = (inputs * self.groups, self.out_channels // self.groups, *self.kernel_size)
        return torch.Size(sizes)

    def dequantize(self) -> Tensor:
        """Return the float weight that the integers stand for."""
        repeated = self._buffers["weight_scale"]
        assert repeated is not None
        rows = self._times(self._once(repeated))
        parts = rows.view(self.groups, -1, *rows.shape[1:]).transpose(1, 2)
        return parts.reshape(self.weight_shape())

    def saved(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return what a file needs to make this layer again: numbers and texts, and plain tensors."""
        about, tensors = super().saved()
        once = {k: self._once(v) for k, v in tensors.items() if k in ("weight_scale", "bias")}
        return about, {**tensors, **once}

    def forward(self, input: Any) -> Any:
        """Return the transposed convolution's output."""
        wanted = result_dtype(input)
        codes = codes_or_float(input, self.input)
        if input.dim() == len(self.stride) + 1:
            return self._give(self._compute(codes.unsqueeze(0), wanted).squeeze(0), wanted)
        return self._give(self._compute(codes, wanted), wanted)

    def _compute(self, x: Tensor, wanted: torch.dtype) -> Tensor:
        """Return the result for a batch."""
        ones = [1] * len(self.stride)
        y = self._convolve(x, wanted, (ones, [tap - 1 for tap in self._taps()], ones))
        return self._order(y, list(x.shape[2:]))

    def _order(self, y: Tensor, sizes: list[int]) -> Tensor:
        """Put positions that came as channels into their places."""
        dims = len(self.stride)
        places = list(y.shape[2:])
        last = y.permute(0, *range(2, 2 + dims), 1)  # as it lies in memory
        each = self.out_channels // self.groups
        last = last.reshape(y.shape[0], *places, self.groups, *self.stride, each)
        pairs = [d for i in range(dims) for d in (1 + i, 2 + dims + i)]
        last = last.permute(0, *pairs, 1 + dims, 2 + 2 * dims)
        full = [p * s for p, s in zip(places, self.stride, strict=True)]
        last = last.reshape(y.shape[0], *full, self.out_channels)
        result = last.permute(0, 1 + dims, *range(1, 1 + dims))
        for i, size in enumerate(sizes):
            end = (size - 1) * self.stride[i] - 2 * self.padding[i] + self.kernel_size[i]
            result = result.narrow(2 + i, self.padding[i], end + self.output_padding[i])
        return result
