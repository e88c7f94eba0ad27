# SPDX-License-Identifier: Apache-2.0
"""INT8 modules that `convert` puts in place of float ones: what they have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ipex_core.errors import OpArgumentError
from ipex_core.library.spec import FLOATS
from ipex_quant.int8.boundary import Codes, Early, Scale, plain, take
from ipex_quant.util.modules import WholeModule
from ipex_quant.weight.tensor import ShowsFloatWeight


def result_dtype(x: Any) -> torch.dtype:
    """Return the dtype of a float result: as stock layers have it."""
    device = x.device.type
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    dtype: torch.dtype = x.dtype
    return dtype if dtype.is_floating_point else torch.float32


def _input(input: Any) -> Any:
    """Return the argument of a layer of torch, which may be given by its name."""
    return input


def codes_or_float(x: Any, scale: Scale) -> Tensor:
    """Return the uint8 codes of a scale if an argument has them, and its numbers otherwise."""
    if type(x) is Codes:
        return x.get(scale)
    x = plain(x)
    # Integers without a scale are numbers.
    return x if x.is_floating_point() else x.float()  # type: ignore[no-any-return]


def output_rows(module: Any) -> Tensor:
    """Return the float weight of a layer with the output channels first."""
    weight: Tensor = module.weight.detach()
    if not getattr(module, "transposed", False):
        return weight
    inputs, outputs, *kernel = weight.shape
    groups = module.groups
    parts = weight.view(groups, inputs // groups, outputs, *kernel).transpose(1, 2)
    return parts.reshape(groups * outputs, inputs // groups, *kernel)


def read_scale(pair: Any) -> Scale:
    """Return the scale that a folder has as a list of scale and zero point.

    Raises:
        ValueError: It is not finite, or negative, or the zero point is no uint8 code.
    """
    scale, zero = float(pair[0]), int(pair[1])
    if not 0 <= scale <= torch.finfo(torch.float32).max or not 0 <= zero <= 255:
        raise ValueError(f"a scale must be finite with a zero point in 0..255, got {pair}")
    return Scale(scale, zero)


def check_floats(name: str, value: Tensor | None, shape: list[int]) -> None:
    """Check a tensor of a file: kernels read as many numbers as the layer has channels.

    Raises:
        ValueError: It has another shape or dtype, or numbers that are not finite.
    """
    if value is None:
        return
    if value.dtype not in FLOATS or list(value.shape) != shape:
        wanted = f"float32, bfloat16 or float16 of shape {shape}"
        raise ValueError(f"{name} must be {wanted}, got {value.dtype} {list(value.shape)}")
    if not bool(value.isfinite().all()):
        raise ValueError(f"{name} must be finite, got NaN or infinity")


def check_codes(name: str, value: Tensor, dims: int | None = None) -> None:
    """Check the int8 weight of a file.

    Raises:
        ValueError: It has another dtype or number of dimensions, or is empty.
    """
    known = value.dtype == torch.int8 and value.numel() > 0
    if not known or (value.dim() < 2 if dims is None else value.dim() != dims):
        wanted = "int8 and not empty, " + ("2-D or more" if dims is None else f"{dims}-D")
        raise ValueError(f"{name} must be {wanted}, got {value.dtype} {list(value.shape)}")


def _to_json(value: Any) -> Any:
    if isinstance(value, Scale):
        return [value.scale, value.zero]
    return list(value) if isinstance(value, tuple) else value


class Int8Module(nn.Module, WholeModule):
    """A module that a folder keeps as the arguments of its constructor, which are its attributes, too."""

    #: Arguments that become JSON, and what makes each from its value there.
    arguments: ClassVar[dict[str, Callable[[Any], Any]]] = {}
    #: Arguments that are tensors.
    tensors: ClassVar[tuple[str, ...]] = ()
    #: Argument -> its name in a folder, where that is another one.
    keys: ClassVar[dict[str, str]] = {}

    def saved(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return what a file needs to make this module again: numbers and texts, and plain tensors."""
        about = {self.keys.get(it, it): _to_json(getattr(self, it)) for it in self.arguments}
        found = {name: self._buffers[name] for name in self.tensors}
        return about, {name: value for name, value in found.items() if value is not None}

    @classmethod
    def from_saved(cls, about: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Any:
        """Return the module that `saved` described."""
        values: dict[str, Any] = {
            it: read(about[cls.keys.get(it, it)]) for it, read in cls.arguments.items()
        }
        for name in cls.tensors:
            values[name] = tensors[name].clone() if name in tensors else None
        return cls(**values).eval()


class ScaledModule(Int8Module):
    """Has scales of activations, which are one tensor of its extra state in a state dict."""

    #: Attributes that are a `Scale`, in the order of that tensor.
    scaled: ClassVar[tuple[str, ...]] = ("scale",)

    def get_extra_state(self) -> Tensor:
        """Return the scales and zero points."""
        scales = [getattr(self, name) for name in self.scaled]
        numbers = [number for it in scales for number in (it.scale, it.zero)]
        return torch.tensor(numbers, dtype=torch.float64)

    def set_extra_state(self, state: Tensor) -> None:
        """Take them over."""
        values = state.tolist()
        for name, scale, zero in zip(self.scaled, values[::2], values[1::2], strict=True):
            setattr(self, name, Scale(scale, round(zero)))


class Int8Layer(ShowsFloatWeight, ScaledModule):
    """A layer with an int8 weight: its scales, what is fused into it, and staying 8-bit when the model is cast.

    A state dict has the integers, their scales, the bias and, as one tensor of the layer's extra state, the scales of
    activations.
    """

    #: What `activation` can be.
    activations: tuple[str, ...]
    #: Dimensions of the weight, None for several.
    dims: ClassVar[int | None] = None
    scaled = ("input", "output", "residual")
    #: Attributes beside these that a folder has where they are not the default, and what makes each from its value.
    extras: ClassVar[dict[str, Callable[[Any], Any]]] = {"contiguous": bool}
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

    def __init__(self, weight: Tensor, weight_scale: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self._buffers["weight"] = weight
        self.register_buffer("weight_scale", weight_scale.float())
        self.register_buffer("bias", None if bias is None else bias.detach().float().clone())

    def __prepare_scriptable__(self) -> nn.Module:
        """What ``torch.jit.script`` calls first."""
        raise TypeError(
            f"torch.jit.script: INT8 layers cannot be compiled from their source, got {type(self).__name__}:"
            " use torch.jit.trace, whose program serves other shapes, too"
        )

    def saved(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return what a file needs to make this layer again: numbers and texts, and plain tensors."""
        scales = {k: _to_json(s) for k in self.scaled if (s := getattr(self, k))}
        about: dict[str, Any] = {"layer": self.name, "activation": self.activation, **scales}
        if self.residual_position is not None:
            about["residual_position"] = self.residual_position
            about["place"] = self.place
        if self.after:
            about["after"] = list(self.after)
        about |= {name: value for name in self.extras if (value := getattr(self, name))}
        tensors: dict[str, Tensor | None] = {"weight": self.int_weight()}
        tensors |= {k: self._buffers.get(k) for k in ("weight_scale", "bias", "smooth")}
        return about, {k: v for k, v in tensors.items() if v is not None}

    @classmethod
    def from_saved(cls, about: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Any:
        """Return the layer that `saved` described."""
        check_codes("weight", tensors["weight"], cls.dims)
        rows = [tensors["weight"].shape[0]]
        check_floats("weight_scale", tensors["weight_scale"], rows)
        check_floats("bias", tensors.get("bias"), rows)
        check_floats("smooth", tensors.get("smooth"), [tensors["weight"].shape[1]])
        made = cls._of_parts(about, tensors)
        made.name, made.activation = str(about["layer"]), str(about["activation"])
        if made.activation not in cls.activations:
            known = ", ".join(cls.activations)
            raise ValueError(f"activation must be one of {known}, got {made.activation}")
        for name in cls.scaled:
            if name in about:
                setattr(made, name, read_scale(about[name]))
        if made.input:
            made.set_input(made.input)
        made.residual_position = about.get("residual_position")
        made.place, made.after = str(about.get("place", "")), tuple(about.get("after", ()))
        for name, read in cls.extras.items():
            if name in about:
                setattr(made, name, read(about[name]))
        if "smooth" in tensors:
            made._buffers["smooth"] = tensors["smooth"].clone()
        return made.eval()

    @classmethod
    def _of_parts(cls, about: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Int8Layer:
        """Return a layer of the weight, its scale, the bias and the geometry that `saved` described."""
        return cls(tensors["weight"], tensors["weight_scale"], tensors.get("bias"))

    def weight_shape(self) -> torch.Size:
        """Return the shape of the float weight."""
        return self._buffers["weight"].shape  # type: ignore[union-attr]

    def int_weight(self) -> Tensor:
        """Return the plain int8 weight."""
        return self._buffers["weight"]  # type: ignore[return-value]

    def dequantize(self) -> Tensor:
        """Return the float weight that the integers stand for."""
        scale = self._buffers["weight_scale"]
        assert scale is not None
        return self._times(scale)

    def _times(self, scale: Tensor) -> Tensor:
        """Return the integers times a scale for each output channel."""
        codes = self.int_weight()
        return (codes * scale.view(-1, *[1] * (codes.dim() - 1))).to(self.float_dtype)

    def set_input(self, value: Scale) -> None:
        """Set the scale of the activation."""
        self.input = value

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> nn.Module:
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        self.float_dtype = fn(torch.empty(0, dtype=self.float_dtype)).dtype
        for name, old in before.items():
            new = self._buffers[name]
            if old is not None and new is not None and new.dtype != old.dtype:
                self._buffers[name] = old.to(new.device)  # codes and scales have one dtype only
        return self

    def _operands(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Return input and residual of a call, which come in the order of the sum that was fused."""
        if self.residual_position is None:
            return _input(*args, **kwargs), None
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
