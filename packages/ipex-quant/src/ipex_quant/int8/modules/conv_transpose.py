# SPDX-License-Identifier: Apache-2.0
"""Transposed convolutions on codes, as ordinary ones.

Output position ``q * stride + r`` of a transposed convolution is a sum over the inputs ``q - j`` with the weights
``r + j * stride``. So one convolution with kernel ``ceil(kernel / stride)`` and ``stride`` times as many channels for
each dimension gives all outputs, which then only have to be put in order. No product with an inserted zero is computed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from ipex_quant.int8.modules.conv import int8_conv
from ipex_quant.int8.modules.linear import _codes_or_float, _Int8Layer, _result_dtype

__all__ = ["Int8ConvTranspose", "output_rows"]

Tensor = torch.Tensor
_GEOMETRY = ("stride", "padding", "output_padding", "groups")


def output_rows(module: Any) -> Tensor:
    """Return the float weight of a layer with the output channels first."""
    weight: Tensor = module.weight.detach()
    if not getattr(module, "transposed", False):
        return weight
    inputs, outputs, *kernel = weight.shape
    groups = module.groups
    parts = weight.view(groups, inputs // groups, outputs, *kernel).transpose(1, 2)
    return parts.reshape(groups * outputs, inputs // groups, *kernel)


class Int8ConvTranspose(_Int8Layer):
    """A transposed convolution of one, two or three dimensions on int8 weights, with activations of static scale.

    Takes float or uint8 codes of its own scale; gives float, or uint8 codes where the next layer takes them.

    Attributes:
        weight: The float weight ``[in_channels, out_channels / groups, ...]``. A state dict has the int8 one of the
            ordinary convolution, ``[groups * prod(stride) * out_channels / groups, in_channels / groups, ...]``.
        weight_scale: float32, one for each row of that.
        bias: float32, one for each row of that, or None.
    """

    def __init__(self, conv: Any, weight: Tensor, weight_scale: Tensor) -> None:
        super().__init__()
        self.stride, self.padding = list(conv.stride), list(conv.padding)
        self.output_padding, self.groups = list(conv.output_padding), int(conv.groups)
        self.kernel_size = list(weight.shape[2:])
        self.out_channels = weight.shape[0]
        self._buffers["weight"] = self._spread(weight)
        self.register_buffer("weight_scale", self._repeat(weight_scale.float()))
        bias = conv.bias
        row = None if bias is None else self._repeat(bias.detach().float())
        self.register_buffer("bias", row)

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
        codes, repeated = self.int_weight(), self._buffers["weight_scale"]
        assert repeated is not None
        scale = self._once(repeated)
        rows = (codes * scale.view(-1, *[1] * (codes.dim() - 1))).to(self.float_dtype)
        parts = rows.view(self.groups, -1, *codes.shape[1:]).transpose(1, 2)
        return parts.reshape(self.weight_shape())

    def saved(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return what a file needs to make this layer again: numbers and strings, and plain tensors."""
        about, tensors = super().saved()
        once = {k: self._once(v) for k, v in tensors.items() if k in ("weight_scale", "bias")}
        return {**about, **{name: getattr(self, name) for name in _GEOMETRY}}, {**tensors, **once}

    @classmethod
    def from_saved(
        cls, about: Mapping[str, Any], tensors: Mapping[str, Tensor]
    ) -> Int8ConvTranspose:
        """Return the layer that `saved` described."""
        conv = SimpleNamespace(bias=tensors.get("bias"), **{k: about[k] for k in _GEOMETRY})
        made = cls(conv, tensors["weight"], tensors["weight_scale"])
        made._restore(about, tensors)
        return made.eval()

    def forward(self, x: Any) -> Any:
        """Return the transposed convolution's output."""
        wanted = _result_dtype(x)
        codes = _codes_or_float(x, self.input)
        if x.dim() == len(self.stride) + 1:
            return self._give(self._compute(codes.unsqueeze(0), wanted).squeeze(0), wanted)
        return self._give(self._compute(codes, wanted), wanted)

    def _compute(self, x: Tensor, wanted: torch.dtype) -> Tensor:
        """Return the result for a batch."""
        dims = len(self.stride)
        dtype = wanted if wanted in (torch.float32, torch.bfloat16) else torch.float32
        ones = [1] * dims
        rest = (self.output.scale or 1.0, self.output.zero, None, 1.0, 0)
        y = int8_conv(
            x,
            self._buffers["weight"],
            self.weight_scale,
            self.input.scale,
            self.input.zero,
            self.bias,
            ones,
            [tap - 1 for tap in self._taps()],
            ones,
            self.groups,
            self.activation,
            torch.uint8 if self.output else dtype,
            *rest,
        )
        y = self._order(y, list(x.shape[2:]))
        return y if self.output or dtype == wanted else y.to(wanted)

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

    def extra_repr(self) -> str:
        """Return sizes and scales."""
        geometry = f"kernel_size={tuple(self.kernel_size)}, stride={tuple(self.stride)}"
        head = f"{self.weight_shape()[0]}, {self.out_channels}, {geometry}"
        return f"{head}, scale={self.input.scale:.4g}{self._extras()}"
