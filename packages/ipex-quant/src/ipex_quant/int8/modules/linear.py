# SPDX-License-Identifier: Apache-2.0
"""Layers that compute on 8-bit integers, as `ipex.quantization.convert` puts them into a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.ao.nn.quantized import dynamic

import ipex_core.ops  # noqa: F401  (registers torch.ops.ipex)
from ipex_core.errors import OpArgumentError
from ipex_core.ops.linear import ACTIVATIONS
from ipex_quant.int8.boundary import Codes, Early, Scale, Scaled, plain, take
from ipex_quant.int8.modules import conv as _int8_conv
from ipex_quant.int8.modules import group as _int8_group
from ipex_quant.int8.modules.conv import int8_conv, int8_conv_sum_
from ipex_quant.int8.modules.group import InputGroup
from ipex_quant.util.modules import WholeModule
from ipex_quant.weight.tensor import ShowsFloatWeight

__all__ = ["DynamicInt8Linear", "Int8Conv", "Int8Linear"]

Tensor = torch.Tensor


_SCALES = ("input", "output", "residual")


def _result_dtype(x: Any) -> torch.dtype:
    """Return the dtype of a float result: as stock layers have it."""
    if torch.is_autocast_enabled("cpu"):
        return torch.get_autocast_dtype("cpu")
    dtype: torch.dtype = x.dtype
    return dtype if dtype.is_floating_point else torch.float32


def _codes_or_float(x: Any, scale: Scale) -> Tensor:
    """Return the uint8 codes of a scale if an argument has them, and its numbers otherwise."""
    if type(x) is Codes:
        return x.get(scale)
    x = plain(x)
    # Integers without a scale are numbers.
    return x if x.is_floating_point() else x.float()  # type: ignore[no-any-return]


class _Int8Layer(ShowsFloatWeight, WholeModule):
    """What both kinds share: the scales, and staying 8-bit when the model is cast.

    A state dict has the integers, their scales, the bias and, as one tensor of the layer's extra state, the scales of
    activations.
    """

    #: What `activation` can be.
    activations: tuple[str, ...] = tuple(_int8_conv.ACTIVATIONS)
    activation: str = "none"
    name: str = ""
    input: Scale = Scale()
    output: Scale = Scale()
    residual: Scale = Scale()
    residual_position: int | None = None
    place: str = ""
    after: tuple[str, ...] = ()
    #: Whether float results lie in contiguous order, not channels-last as oneDNN gives them.
    contiguous: bool = False

    def __prepare_scriptable__(self) -> nn.Module:
        """What ``torch.jit.script`` calls first."""
        raise TypeError(
            f"torch.jit.script: INT8 layers cannot be compiled from their source, got {type(self).__name__}:"
            " use torch.jit.trace, whose program serves other shapes, too"
        )

    def get_extra_state(self) -> Tensor:
        """Return the scales and zero points of input, output and residual."""
        scales = (self.input, self.output, self.residual)
        return torch.tensor(
            [number for it in scales for number in (it.scale, it.zero)], dtype=torch.float64
        )

    def set_extra_state(self, state: Tensor) -> None:
        """Take them over."""
        values = [float(number) for number in state]
        pairs = zip(values[::2], values[1::2], strict=True)
        self.input, self.output, self.residual = (Scale(s, round(z)) for s, z in pairs)

    def saved(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return what a file needs to make this layer again: numbers and strings, and plain tensors."""
        about: dict[str, Any] = {
            "layer": self.name,
            "activation": self.activation,
            **{k: [s.scale, s.zero] for k in _SCALES if (s := getattr(self, k))},
        }
        if self.residual_position is not None:
            about["residual_position"] = self.residual_position
            about["place"] = self.place
        if self.after:
            about["after"] = list(self.after)
        if self.contiguous:
            about["contiguous"] = True
        tensors = {"weight": self.int_weight(), "weight_scale": self._buffers["weight_scale"]}
        extra = {name: self._buffers.get(name) for name in ("bias", "smooth")}
        return about, {k: v for k, v in (*tensors.items(), *extra.items()) if v is not None}

    def weight_shape(self) -> torch.Size:
        """Return the shape of the float weight."""
        return self._buffers["weight"].shape  # type: ignore[union-attr]

    def int_weight(self) -> Tensor:
        """Return the plain int8 weight."""
        raise NotImplementedError

    def dequantize(self) -> Tensor:
        """Return the float weight that the integers stand for."""
        codes, scale = self.int_weight(), self._buffers["weight_scale"]
        assert scale is not None
        return (codes * scale.view(-1, *[1] * (codes.dim() - 1))).to(self.float_dtype)

    def set_input(self, value: Scale) -> None:
        """Set the scale of the activation."""
        self.input = value

    def _restore(self, about: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Take over what `saved` returned, except what the constructor takes."""
        self.name, self.activation = str(about["layer"]), str(about["activation"])
        if self.activation not in self.activations:
            known = ", ".join(self.activations)
            raise ValueError(f"activation must be one of {known}, got {self.activation}")
        found = {k: Scale(float(about[k][0]), int(about[k][1])) for k in _SCALES if k in about}
        self.output = found.get("output", Scale())
        self.residual = found.get("residual", Scale())
        if "input" in found:
            self.set_input(found["input"])
        self.residual_position = about.get("residual_position")
        self.place, self.after = str(about.get("place", "")), tuple(about.get("after", ()))
        self.contiguous = bool(about.get("contiguous", False))
        if "smooth" in tensors:
            self._buffers["smooth"] = tensors["smooth"].clone()

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> nn.Module:
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        self.float_dtype = fn(torch.empty(0, dtype=self.float_dtype)).dtype
        for name, old in before.items():
            new = self._buffers[name]
            if old is not None and new is not None and new.dtype != old.dtype:
                self._buffers[name] = old.to(new.device)  # codes and scales have one dtype only
        return self

    def _operands(self, *args: Any) -> tuple[Any, Any]:
        """Return input and residual of a call, which come in the order of the sum that was fused."""
        if self.residual_position is None:
            (x,) = args
            return x, None
        first, second = args
        x, residual = (second, first) if self.residual_position == 0 else (first, second)
        taken = take(x, self.place)
        if taken is None:
            raise OpArgumentError(
                f"{self.place}: this sum is fused into {self.name}, so one operand must be the output of {self.name},"
                " got a tensor that took a path that prepare did not record."
                f" Exclude the layer: qconfig_mapping.set_module_name({self.name!r}, None)"
            )
        return taken, residual

    def _give(self, y: Tensor, like: torch.dtype) -> Any:
        """Return a result: codes, and whatever other modules have to pass on, in what says so."""
        if self.contiguous and not self.output:
            y = y.contiguous()
        result: Any = Codes(y, self.output, like) if self.output else y
        return Early(result, self.after, self.name) if self.after else result

    def _extras(self) -> str:
        parts = [f"activation={self.activation}"] if self.activation != "none" else []
        parts += ["adds its other input"] if self.residual_position is not None else []
        parts += [f"output={self.output.scale:.4g}*(uint8-{self.output.zero})"] * bool(self.output)
        return "".join(f", {part}" for part in parts)


class Int8Linear(_Int8Layer):
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

    smooth: Tensor | None
    group: InputGroup | None = None
    norm: str = ""

    def __init__(self, weight: Tensor, weight_scale: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self._buffers["weight"] = torch.ops.ipex.pack_int8_weight(weight)
        self.register_buffer("weight_scale", weight_scale.float())
        self.register_buffer("bias", None if bias is None else bias.detach().float().clone())
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
        """Return what a file needs to make this layer again: numbers and strings, and plain tensors."""
        about, tensors = super().saved()
        if self.group is not None:
            about["group"] = list(self.group.members)
        if self.norm:
            about["norm"] = self.norm
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

    def forward(self, *args: Any) -> Any:
        """Return the layer's output."""
        x, residual = self._operands(*args)
        if self.smooth is not None:
            x = self._smoothed(x)
        like = _result_dtype(x)
        dtype = torch.uint8 if self.output else like
        x = _codes_or_float(x, self.input)
        if residual is not None:
            residual = plain(residual).to(torch.float32 if dtype == torch.uint8 else dtype)
        if self.group is not None and x.dtype != torch.uint8 and _int8_group.worth(x):
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

    @classmethod
    def from_saved(cls, about: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Int8Linear:
        """Return the layer that `saved` described."""
        made = cls(tensors["weight"], tensors["weight_scale"], tensors.get("bias"))
        made._restore(about, tensors)
        made.norm = str(about.get("norm", ""))
        return made.eval()

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


_GEOMETRY = ("stride", "padding", "dilation", "groups")


class Int8Conv(_Int8Layer):
    """A convolution of one, two or three dimensions on int8 weights, with activations of static scale.

    Takes float or uint8 codes of its own scale; gives float, or uint8 codes where the next layer takes them.

    Attributes:
        weight: The float weight ``[out_channels, in_channels / groups, ...]``; a state dict has the int8 one.
        weight_scale: float32 ``[out_channels]``.
        bias: float32 ``[out_channels]``, or None.
        residual_free: Whether the residual is not read after this layer, so that it may be overwritten.
    """

    residual_free: bool = False

    def __init__(self, conv: Any, weight: Tensor, weight_scale: Tensor) -> None:
        super().__init__()
        self.stride, self.dilation, self.groups = (
            list(conv.stride),
            list(conv.dilation),
            conv.groups,
        )
        self.padding = _padding(conv)
        self._buffers["weight"] = weight
        self.register_buffer("weight_scale", weight_scale.float())
        bias = conv.bias
        self.register_buffer("bias", None if bias is None else bias.detach().float().clone())

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

    def int_weight(self) -> Tensor:
        """Return the plain int8 weight."""
        return self._buffers["weight"]  # type: ignore[return-value]

    def saved(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return what a file needs to make this layer again: numbers and strings, and plain tensors."""
        about, tensors = super().saved()
        if self.residual_free:
            about["residual_free"] = True
        return {**about, **{name: getattr(self, name) for name in _GEOMETRY}}, tensors

    @classmethod
    def from_saved(cls, about: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Int8Conv:
        """Return the layer that `saved` described."""
        conv = SimpleNamespace(bias=tensors.get("bias"), **{k: about[k] for k in _GEOMETRY})
        made = cls(conv, tensors["weight"].clone(), tensors["weight_scale"].clone())
        made._restore(about, tensors)
        made.residual_free = bool(about.get("residual_free", False))
        return made.eval()

    def forward(self, *args: Any) -> Any:
        """Return the convolution's output."""
        x, residual = self._operands(*args)
        wanted = _result_dtype(x)
        # oneDNN gives float32, bfloat16 or codes.
        dtype = wanted if wanted in (torch.float32, torch.bfloat16) else torch.float32
        x = _codes_or_float(x, self.input)
        run = int8_conv
        if residual is not None:
            kept, residual = residual, _codes_or_float(residual, self.residual)
            if self.residual_free and residual.dtype == torch.uint8 and kept.overwrite(self.name):
                run = int8_conv_sum_
        y = run(
            x,
            self._buffers["weight"],
            self.weight_scale,
            self.input.scale,
            self.input.zero,
            self.bias,
            self.stride,
            self.padding,
            self.dilation,
            self.groups,
            self.activation,
            torch.uint8 if self.output else dtype,
            self.output.scale or 1.0,
            self.output.zero,
            residual,
            self.residual.scale or 1.0,
            self.residual.zero,
        )
        return self._give(y if self.output or dtype == wanted else y.to(wanted), wanted)

    def extra_repr(self) -> str:
        """Return sizes and scales."""
        out_channels, in_channels, *kernel = self.weight_shape()
        geometry = f"kernel_size={tuple(kernel)}, stride={tuple(self.stride)}"
        head = f"{in_channels * self.groups}, {out_channels}, {geometry}"
        return f"{head}, scale={self.input.scale:.4g}{self._extras()}"


def _padding(conv: Any) -> list[int]:
    """Return the padding as numbers; what cannot be said in these is an error of the caller."""
    if conv.padding == "valid":
        return [0] * len(conv.stride)
    if conv.padding == "same":
        totals = [d * (k - 1) for d, k in zip(conv.dilation, conv.kernel_size, strict=True)]
        return [total // 2 for total in totals]
    return list(conv.padding)
