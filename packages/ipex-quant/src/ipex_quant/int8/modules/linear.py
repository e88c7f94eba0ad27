# SPDX-License-Identifier: Apache-2.0
"""Linear layers on 8-bit integers, and the norms that multiply their input by the channel scales of SmoothQuant."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.ao.nn.quantized import dynamic

import ipex_core.ops  # noqa: F401  (registers torch.ops.ipex)
from ipex_core.ops.linear import ACTIVATIONS
from ipex_quant.int8.boundary import Scale, Scaled, plain
from ipex_quant.int8.modules import (
    Int8Layer,
    Int8Module,
    check_floats,
    codes_or_float,
    result_dtype,
)

__all__ = ["DynamicInt8Linear", "Int8Linear"]

#: Elements of an activation: for smaller ones the kernel quantizes again in less time than another op takes (measured
#: with 2 threads, 3 layers: 0.97x at 98 thousand elements, 1.04x at 786 thousand, 1.06x at 1.6 million).
LEAST = 1 << 19


def _worth(x: Tensor) -> bool:
    """Return whether an activation is large enough; in a traced graph, which has no sizes, the kernels quantize."""
    if not torch.compiler.is_compiling() and torch._C._is_tracing():
        return False
    return x.numel() >= LEAST


class InputGroup:
    """Keeps the codes of an activation from the first layer that reads it to the last.

    They are used for the very tensor that they were made from, unchanged, and by each layer once. In a graph each layer
    quantizes: what they do is the same, so compilers keep one.

    Args:
        members: Names of the layers in the order in which they are called.
    """

    def __init__(self, members: tuple[str, ...]) -> None:
        self.members = members
        # One attribute, so that a thread sees all of an entry or another one: tensor, its version, codes, who had them.
        self._entry: tuple[weakref.ref[Tensor], int, Tensor, frozenset[str]] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave the codes out of copies."""
        return {"members": self.members, "_entry": None}

    def __deepcopy__(self, memo: dict[int, Any]) -> InputGroup:
        copy = InputGroup(self.members)
        memo[id(self)] = copy
        return copy

    def codes(self, member: str, x: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
        """Return the uint8 codes of ``x`` for a layer."""
        if torch.compiler.is_compiling():
            return _quantize(x, scale, zero)
        version = -1 if x.is_inference() else x._version
        entry = self._entry
        if entry is not None and member != self.members[0]:
            source, seen, codes, served = entry
            if source() is x and seen == version and member not in served:
                served |= {member}
                self._entry = (
                    (source, seen, codes, served) if len(served) < len(self.members) else None
                )
                return codes
        codes = _quantize(x, scale, zero)
        self._entry = weakref.ref(x), version, codes, frozenset({member})
        return codes


def _quantize(x: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    codes: Tensor = torch.ops.ipex.quantize_per_tensor(x, scale, zero, False)[0]
    return codes


class Int8Linear(Int8Layer):
    """A linear layer on int8 weights with activations of static scale.

    Takes float32, bfloat16, float16 or uint8 codes of its own scale ``[..., in_features]``; gives float, or uint8
    codes where the next layer takes them.

    Attributes:
        weight: The float weight ``[out_features, in_features]``; a state dict has the int8 one, packed as
            ``torch.ops.ipex.pack_int8_weight`` does.
        weight_scale: float32 ``[out_features]``.
        bias: float32 ``[out_features]``, or None.
        smooth: float32 ``[in_features]`` that the input is multiplied by, or None.
        norm: Path of the norm that has multiplied by them, or an empty string.
        group: The layers that read the same input, or None.
    """

    activations = ACTIVATIONS
    dims = 2
    extras: ClassVar = {**Int8Layer.extras, "norm": str}

    smooth: Tensor | None
    group: InputGroup | None = None
    norm: str = ""

    def __init__(self, weight: Tensor, weight_scale: Tensor, bias: Tensor | None) -> None:
        super().__init__(torch.ops.ipex.pack_int8_weight(weight), weight_scale, bias)
        self.out_features, self.in_features = weight.shape
        self.register_buffer("smooth", None)
        self.register_buffer("x_scale", None)
        self.register_buffer("x_zero", None)

    def set_input(self, value: Scale) -> None:
        """Set the scale of the activation."""
        super().set_input(value)
        self.x_scale = torch.tensor([value.scale], dtype=torch.float32)
        self.x_zero = torch.tensor([value.zero], dtype=torch.int32)

    def set_extra_state(self, state: Tensor) -> None:
        """Take over the scales of a state dict."""
        super().set_extra_state(state)
        if self.input:
            self.set_input(self.input)

    def saved(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return what a file needs to make this layer again: numbers and texts, and plain tensors."""
        about, tensors = super().saved()
        if self.group is not None:
            about["group"] = list(self.group.members)
        return about, tensors

    def int_weight(self) -> Tensor:
        """Return the plain int8 weight, ``[out_features, in_features]``."""
        packed = self._buffers["weight"]
        return torch.ops.ipex.unpack_int8_weight(packed, self.out_features, self.in_features)

    def weight_shape(self) -> torch.Size:
        """Return the shape of the float weight."""
        return torch.Size((self.out_features, self.in_features))

    def dequantize(self) -> Tensor:
        """Return the float weight that the integers stand for, without channel scales of its input."""
        weight = super().dequantize()
        return weight if self.smooth is None else weight * self.smooth.to(weight.dtype)

    def _smoothed(self, x: Any) -> Any:
        """Return the input with its channel scales."""
        done = x.get(self.norm) if type(x) is Scaled else None
        if done is not None:
            return done
        x = plain(x)
        return x if self.smooth is None else x * self.smooth.to(x.dtype)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the layer's output."""
        x, residual = self._operands(*args, **kwargs)
        if self.smooth is not None:
            x = self._smoothed(x)
        like = result_dtype(x)
        dtype = torch.uint8 if self.output else like
        x = codes_or_float(x, self.input)
        if residual is not None:
            residual = plain(residual).to(torch.float32 if dtype == torch.uint8 else dtype)
            residual = residual.expand(*x.shape[:-1], self.out_features)  # one may serve a batch
        if self.group is not None and x.dtype != torch.uint8 and _worth(x):
            x = self.group.codes(self.name, x, self.x_scale, self.x_zero)
        y = torch.ops.ipex.int8_linear(
            x,
            self._buffers["weight"],
            self.out_features,
            self.weight_scale,
            self.x_scale,
            self.x_zero,
            self.bias,
            residual,
            self.activation,
            None,
            None,
            "none",
            "per_token",
            False,
            dtype,
            self.output.scale,
            self.output.zero,
        )
        return self._give(y, like)

    def extra_repr(self) -> str:
        """Return sizes and scales."""
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        kind = "dynamic" if self.x_scale is None else f"scale={self.input.scale:.4g}"
        return f"{sizes}, bias={self.bias is not None}, {kind}{self._extras()}"


def share_input(layers: list[Int8Linear]) -> None:
    """Let layers with the same input and scale quantize it once; in the order of their calls."""
    group = InputGroup(tuple(layer.name for layer in layers))
    for layer in layers:
        layer.group = group
        # The same tensors, so that a compiler sees that the layers do the same.
        layer.x_scale, layer.x_zero = layers[0].x_scale, layers[0].x_zero


class DynamicInt8Linear(Int8Linear):
    """A linear layer on int8 weights whose activations get the scale of each row as they come.

    ``isinstance(layer, torch.ao.nn.quantized.dynamic.Linear)`` is true, which scripts ask; the methods of that class
    are not here: ``weight`` is the float weight, ``int_weight()`` gives its codes.
    """


# A virtual subclass: nothing of it is inherited.
dynamic.Linear.register(DynamicInt8Linear)


class SmoothNorm(Int8Module):
    """A layer norm or RMS norm whose weight has the channel scales of the layers that read it in it.

    Those layers get the product; any other reader gets what the norm gave before.

    Attributes:
        weight: The weight of the norm times the channel scales.
        bias: Its bias times the channel scales, or None.
        factor: float32, the channel scales.
    """

    arguments: ClassVar = {"name": str, "rms": bool, "eps": lambda value: value}
    tensors = ("weight", "bias", "factor")
    weight: Tensor
    bias: Tensor | None
    factor: Tensor

    def __init__(
        self, name: str, rms: bool, eps: float | None, weight: Tensor, bias: Any, factor: Tensor
    ) -> None:
        super().__init__()
        self.name, self.rms, self.eps = name, rms, eps
        self.register_buffer("weight", weight)
        self.register_buffer("bias", bias)
        self.register_buffer("factor", factor)

    @classmethod
    def from_saved(cls, about: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Any:
        """Return the norm that `saved` described."""
        shape = list(tensors["weight"].shape)
        for name in cls.tensors:
            check_floats(name, tensors.get(name), shape)
        return super().from_saved(about, tensors)

    @classmethod
    def of(cls, name: str, norm: Any, factor: Tensor) -> SmoothNorm:
        """Return the form of a norm with channel scales."""
        bias = getattr(norm, "bias", None)
        step = factor.to(norm.weight.dtype)
        weight = norm.weight.detach() * step
        shifted = None if bias is None else bias.detach() * step
        made = cls(name, isinstance(norm, nn.RMSNorm), norm.eps, weight, shifted, factor.clone())
        return made.eval()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the product, for the layers that know it; the two norms name their input differently."""
        (x,) = map(plain, (*args, *kwargs.values()))
        shape = self.weight.shape
        if self.rms:
            y = nn.functional.rms_norm(x, shape, self.weight, self.eps)
        else:
            y = nn.functional.layer_norm(x, shape, self.weight, self.bias, self.eps or 0.0)
        return Scaled(y, self.factor, self.name)

    def extra_repr(self) -> str:
        """Return the sizes."""
        return f"{tuple(self.weight.shape)}, eps={self.eps}, channel scales"
