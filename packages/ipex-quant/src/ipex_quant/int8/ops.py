# SPDX-License-Identifier: Apache-2.0
"""The ops of INT8 models, apart from the modules that call them: programs in files need only the ops.

``import ipex`` loads them, so that programs that were saved find them.

``ipex_quant::int8_conv`` and ``int8_conv_sum_`` are a convolution on codes, run by oneDNN. The second one may overwrite
the codes that it adds, where they are not read any more: one copy less. oneDNN wants the weight in a layout of its own,
which cannot be saved, copied or compiled. So the op takes the plain weight and keeps what it made of it as long as the
weight lives.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ipex_core.library.kernels import define
from ipex_core.library.spec import CHANNELS_LAST, FUNCTIONAL, PORTABLE, bind, check, schema_of

_LIBRARY = torch.library.Library("ipex_quant", "FRAGMENT")

#: id of a weight -> the weight, what it was packed for, the packed weight and zeros for its channels.
_packed: dict[int, tuple[weakref.ref[Tensor], tuple[Any, ...], Tensor, Tensor]] = {}
#: What the ops can do after the product, and how oneDNN calls it.
ACTIVATIONS = {"none": "none", "relu": "relu", "relu6": "hardtanh", "silu": "swish"}


def _prepacked(
    weight: Tensor, scale: Tensor, key: tuple[Any, ...], shape: torch.Size
) -> tuple[Tensor, Tensor]:
    """Return the weight as oneDNN wants it, made at the first call for images of that call's shape.

    Other shapes give the same results. Without any shape oneDNN may choose a layout that it has to change at each call.
    """
    key = (weight._version, *key)
    entry = _packed.get(id(weight))
    if entry is not None and entry[0]() is weight and entry[1] == key:
        return entry[2], entry[3]
    plain = weight.unsqueeze(2) if weight.dim() == 3 else weight
    dims = plain.dim() - 2
    op, (*_, stride, _, dilation, groups) = "int8_conv", key
    check(weight.dtype == torch.int8, op, "weight", "have dtype int8", weight.dtype)
    check(dims in (2, 3) and weight.numel() > 0, op, "weight", "be 3-D to 5-D", list(weight.shape))
    fits = groups > 0 and weight.shape[0] % groups == 0
    check(fits, op, "groups", f"be a divisor of {weight.shape[0]}", groups)
    known = len(stride) == len(dilation) == dims and min(*stride, *dilation) > 0
    check(known, op, "stride and dilation", f"be {dims} positive numbers", [stride, dilation])
    packed = torch.ops.onednn.qconv_prepack(plain, scale, *key[1:], list(shape))
    zeros = torch.zeros(weight.shape[0], dtype=torch.int64)
    place = id(weight)

    def forget(reference: weakref.ref[Tensor]) -> None:
        if place in _packed and _packed[place][0] is reference:
            del _packed[place]

    _packed[place] = (weakref.ref(weight, forget), key, packed, zeros)
    return packed, zeros


def quantize(x: Tensor, scale: float, zero: int) -> Tensor:
    """Return uint8 codes in the memory format of ``x``."""
    if x.dim() in (4, 5) and not x.is_contiguous():
        forth = (0, *range(2, x.dim()), 1)
        rows = x.permute(forth)
        if rows.is_contiguous():
            back = (0, x.dim() - 1, *range(1, x.dim() - 1))
            return quantize(rows, scale, zero).permute(back)
    one = torch.tensor(scale, dtype=torch.float32, device=x.device)
    by = torch.tensor([zero], dtype=torch.int32, device=x.device)
    codes: Tensor = torch.ops.ipex.quantize_per_tensor(x, one, by, False)[0]
    return codes


def _dequantize(x: Tensor, scale: float, zero: int, dtype: torch.dtype) -> Tensor:
    return ((x.float() - zero) * scale).to(dtype)


def _run(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    x_scale: float,
    x_zero: int,
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    activation: str,
    dtype: torch.dtype,
    output_scale: float,
    output_zero: int,
    residual: Tensor | None,
    residual_scale: float,
    residual_zero: int,
    *,
    free: bool = False,
) -> Tensor:
    window = (stride, padding, dilation)
    if residual is not None and list(residual.shape) != _sizes(x, weight, *window):
        # oneDNN adds only what has the size of its result.
        given = (x, weight, weight_scale, x_scale, x_zero, bias)
        total = _run(*given, *window, groups, *_FLOAT_RESULT)
        if residual.dtype == torch.uint8:
            residual = _dequantize(residual, residual_scale, residual_zero, torch.float32)
        total = total + residual
        if activation != "none":
            total = getattr(functional, activation)(total)
        if dtype == torch.uint8:
            return quantize(total, output_scale, output_zero)
        return total.to(dtype)
    one_d = weight.dim() == 3
    if one_d:  # oneDNN fuses more after two dimensions than after one
        x, stride, padding, dilation = x.unsqueeze(-2), [1, *stride], [0, *padding], [1, *dilation]
        residual = None if residual is None else residual.unsqueeze(-2)
    single = x.dim() == len(stride) + 1  # an image
    codes = x if x.dtype == torch.uint8 else quantize(x, x_scale, x_zero)
    if single:
        codes = codes.unsqueeze(0)
        residual = None if residual is None else residual.unsqueeze(0)
    one_place = weight.shape[2:].numel() == 1 and max(stride) > 1 and not any(padding)
    if one_place and codes.shape[1] % 16:
        # oneDNN copies what such windows see to a buffer, which its threads share where channels are not in sixteens.
        seen: Any = (..., *(slice(None, None, step) for step in stride))
        codes = codes[seen]
        codes = codes.contiguous(memory_format=CHANNELS_LAST[codes.dim()])
        stride = [1] * len(stride)
    if codes.dim() == 4:
        codes = codes.contiguous(memory_format=torch.channels_last)
    geometry = (x_scale, x_zero, stride, padding, dilation, groups)
    rows = list(weight.shape[:1])
    # oneDNN reads as many as there are channels.
    for name, value in (("weight_scale", weight_scale), ("bias", bias)):
        if value is not None:
            fits = value.dtype == torch.float32 and list(value.shape) == rows
            got = f"{value.dtype} {list(value.shape)}" if not fits else None
            check(fits, "int8_conv", name, f"be float32 of shape {rows}", got)
    packed, zeros = _prepacked(weight, weight_scale, geometry, codes.shape)
    head = (codes, x_scale, x_zero, packed, weight_scale, zeros)
    tail = (bias, stride, padding, dilation, groups)
    output = (output_scale, output_zero, dtype)
    if len(stride) == 2:
        if residual is None:
            limits = [0.0, 6.0] if activation == "relu6" else []
            rest: tuple[Any, ...] = (*output, ACTIVATIONS[activation], limits, "")
            y: Tensor = torch.ops.onednn.qconv_pointwise(*head, *tail, *rest)
        else:
            added = (residual, residual_scale, residual_zero)
            y = _plus_residual(head, tail, output, added, activation, free)
    elif residual is None and activation != "silu":
        y = torch.ops.onednn.qconv_pointwise(*head, *tail, *output, "none", [], "")
        _clamp(y, activation, output_scale, output_zero)
    else:
        # oneDNN's op has none of this after three dimensions.
        y = torch.ops.onednn.qconv_pointwise(*head, *tail, 1.0, 0, torch.float32, "none", [], "")
        if residual is not None:
            if residual.dtype == torch.uint8:
                residual = _dequantize(residual, residual_scale, residual_zero, torch.float32)
            y += residual
        if activation == "silu":
            functional.silu(y, inplace=True)
        else:
            _clamp(y, activation, 1.0, 0)
        y = quantize(y, output_scale, output_zero) if dtype == torch.uint8 else y.to(dtype)
    y = y.squeeze(0) if single else y
    return y.squeeze(-2) if one_d else y


#: From the activation on, what gives the plain convolution as float32.
_FLOAT_RESULT: tuple[Any, ...] = ("none", torch.float32, 1.0, 0, None, 1.0, 0)


def _sizes(
    x: Tensor, weight: Tensor, stride: list[int], padding: list[int], dilation: list[int]
) -> list[int]:
    """Return the sizes of the result of a convolution."""
    dims = len(stride)
    window = zip(x.shape[-dims:], weight.shape[2:], stride, padding, dilation, strict=False)
    places = [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in window]
    return [*x.shape[: -dims - 1], weight.shape[0], *places]


def _plus_residual(
    head: tuple[Any, ...],
    tail: tuple[Any, ...],
    output: tuple[float, int, torch.dtype],
    added: tuple[Tensor, float, int],
    activation: str,
    free: bool,
) -> Tensor:
    """Return the activation of a convolution in two dimensions and a residual, which may be overwritten if ``free``."""
    (scale, zero, dtype), (residual, step, shift) = output, added
    if dtype != torch.uint8 and residual.dtype == torch.uint8:
        residual = _dequantize(residual, step, shift, dtype)
    to_float = dtype == torch.uint8 and residual.dtype != torch.uint8
    result = (1.0, 0, torch.float32) if to_float else output
    # oneDNN adds to what it is given: a copy, if others may read the residual.
    total = residual.to(result[2])
    if total is residual and not free:
        total = total.clone()
    total = total.contiguous(memory_format=torch.channels_last)
    scales = (step, shift) if result[2] == torch.uint8 else (1.0, 0)
    rest: tuple[Any, ...] = (*result, *scales, "sum", None, activation, [], "")
    y: Tensor = torch.ops.onednn.qconv2d_pointwise.binary(*head, total, *tail, *rest)
    return quantize(y, scale, zero) if to_float else y


def _clamp(y: Tensor, activation: str, scale: float, zero: int) -> None:
    """Apply relu or relu6 to a result, codes or not; on codes it is as exact as before rounding."""
    if activation == "none":
        return
    low, high = 0.0, 6.0 if activation == "relu6" else None
    if y.dtype == torch.uint8:
        low, high = zero, None if high is None else min(round(high / scale) + zero, 255)
    y.clamp_(low, high)


def _in_layout(y: Tensor, dims: int) -> Tensor:
    """Return a batch of images, with as many dimensions as their weight, with the channels last."""
    last = CHANNELS_LAST.get(dims)
    return y if last is None or y.dim() != dims else y.contiguous(memory_format=last)


def _on_device(*args: Any) -> Tensor:
    """Compute the same in ops of a device: sums of codes in float32, which are exact up to 2**24."""
    a = bind("int8_conv", _SCHEMA, args, {})
    operand = a.x if a.x.dtype == torch.uint8 else quantize(a.x, a.x_scale, a.x_zero)
    convolve = (functional.conv1d, functional.conv2d, functional.conv3d)[a.weight.dim() - 3]
    geometry = (a.stride, a.padding, a.dilation, a.groups)
    y = convolve(operand.float() - a.x_zero, a.weight.float(), None, *geometry)
    channels = (-1, *[1] * (a.weight.dim() - 2))
    y = y * (a.weight_scale * a.x_scale).view(channels)
    if a.bias is not None:
        y = y + a.bias.view(channels)
    if a.residual is not None:
        by_scale = a.residual.dtype == torch.uint8
        step: tuple[float, int] = (a.residual_scale, a.residual_zero) if by_scale else (1.0, 0)
        y = y + _dequantize(a.residual, *step, torch.float32)
    if a.activation != "none":
        y = getattr(functional, a.activation)(y)
    y = quantize(y, a.output_scale, a.output_zero) if a.dtype == torch.uint8 else y.to(a.dtype)
    return _in_layout(y, a.weight.dim())


def _fake_conv(x: Tensor, weight: Tensor, *args: Any) -> Tensor:
    result = x.new_empty(_sizes(x, weight, *args[4:7]), dtype=args[9])
    if weight.dim() == result.dim() == 3:
        return result.transpose(1, 2).contiguous().transpose(1, 2)
    return _in_layout(result, weight.dim())


_SCHEMA = schema_of(_run).replace(", bool free=False", "")
for _name, _kind, _kernel in (
    ("int8_conv", "Tensor?", _run),
    ("int8_conv_sum_", "Tensor(a!)", functools.partial(_run, free=True)),
):
    _arguments = _SCHEMA.replace("Tensor? residual", f"{_kind} residual")
    if define(_name + _arguments, _LIBRARY):  # otherwise it has the kernel of libipex_cpp.so
        _LIBRARY.impl(_name, _kernel, "CPU")
    _LIBRARY.impl(_name, _on_device, "XPU")
    torch.library.register_fake(f"ipex_quant::{_name}", _fake_conv, lib=_LIBRARY)

int8_conv = torch.ops.ipex_quant.int8_conv.default
int8_conv_sum_ = torch.ops.ipex_quant.int8_conv_sum_.default


@functools.cache
def _inductor_finds_convolutions() -> bool:
    """Return whether Inductor finds convolutions between dequantize and quantize, as it does before torch 2.14."""
    from torch._inductor.fx_passes import quantization

    return hasattr(quantization, "_register_qconv_weight_prepack_pass")


@functools.cache
def _register_fake_prepack() -> torch.library.Library | None:
    """Let graphs record oneDNN's weight packing, which Inductor then runs once, when it freezes the graph."""
    if torch._C._dispatch_has_kernel_for_dispatch_key("onednn::qconv_prepack", "Meta"):
        return None
    library = torch.library.Library("onednn", "IMPL", "Meta")
    library.impl("qconv_prepack", lambda weight, *args: torch.empty_like(weight))
    return library


def _codes(value: Tensor, scale: float, zero: int) -> Tensor:
    """Return uint8 codes, by an op that Inductor fuses with its neighbors."""
    ops: Any = torch.ops.quantized_decomposed
    result: Tensor = ops.quantize_per_tensor.default(value, scale, zero, 0, 255, torch.uint8)
    return result


def _real(value: Tensor, scale: float, zero: int) -> Tensor:
    """Return float32 values of codes or of floating-point values, by an op that Inductor fuses with its neighbors."""
    if value.dtype != torch.uint8:
        return value.float()
    ops: Any = torch.ops.quantized_decomposed
    result: Tensor = ops.dequantize_per_tensor.default(value, scale, zero, 0, 255, torch.uint8)
    return result


def _portable(*args: Any) -> Tensor:
    """Compute the same with ops that C++ has: oneDNN's, or those that Inductor turns into oneDNN's."""
    import torch.ao.quantization.fx._decomposed  # (defines the ops)

    a = bind("int8_conv", _SCHEMA, args, {})
    operand = a.x if a.x.dtype == torch.uint8 else _codes(a.x.float(), a.x_scale, a.x_zero)
    geometry = (a.stride, a.padding, a.dilation, a.groups)
    quantized = (operand, a.weight, a.weight_scale, a.x_scale, a.x_zero, a.bias, geometry)
    if _inductor_finds_convolutions():
        y = _pattern(*quantized)
    elif a.residual is None and (a.activation == "none" or len(a.stride) == 2):
        return _onednn(*quantized, a.activation, (a.output_scale, a.output_zero, a.dtype))
    else:
        y = _onednn(*quantized, "none", (1.0, 0, torch.float32))
    if a.residual is not None:
        y = y + _real(a.residual, a.residual_scale, a.residual_zero)
    if a.activation != "none":
        y = getattr(functional, a.activation)(y)
    y = _codes(y, a.output_scale, a.output_zero) if a.dtype == torch.uint8 else y.to(a.dtype)
    return _in_layout(y, a.weight.dim())


def _pattern(
    operand: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    x_scale: float,
    x_zero: int,
    bias: Tensor | None,
    geometry: tuple[Any, ...],
) -> Tensor:
    """Return a convolution of dequantized operands, the form that Inductor looks for before torch 2.14."""
    ops: Any = torch.ops.quantized_decomposed
    zeros = torch.zeros(weight.shape[0], dtype=torch.int64)
    plain = ops.dequantize_per_channel.default(
        weight, weight_scale, zeros, 0, -128, 127, torch.int8
    )
    convolve = (functional.conv1d, functional.conv2d, functional.conv3d)[weight.dim() - 3]
    y: Tensor = convolve(_real(operand, x_scale, x_zero), plain, bias, *geometry)
    return y


def _onednn(
    operand: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    x_scale: float,
    x_zero: int,
    bias: Tensor | None,
    geometry: tuple[Any, ...],
    activation: str,
    output: tuple[float, int, torch.dtype],
) -> Tensor:
    """Return oneDNN's convolution with its weight packing in the graph."""
    _register_fake_prepack()
    stride, padding, dilation, groups = geometry
    one_d = weight.dim() == 3
    if one_d:  # as in `_run`
        operand, weight = operand.unsqueeze(-2), weight.unsqueeze(2)
        stride, padding, dilation = [1, *stride], [0, *padding], [1, *dilation]
    single = operand.dim() == weight.dim() - 1  # an image
    if single:
        operand = operand.unsqueeze(0)
    if operand.dim() == 4:
        operand = operand.contiguous(memory_format=torch.channels_last)
    shape = list(operand.shape)
    # Sizes that vary are no argument of the packing: it then chooses the layout without them.
    known = shape if all(type(size) is int for size in shape) else None
    rest = (stride, padding, dilation, groups)
    packed = torch.ops.onednn.qconv_prepack(weight, weight_scale, x_scale, x_zero, *rest, known)
    zeros = torch.zeros(weight.shape[0], dtype=torch.int64)
    limits = [0.0, 6.0] if activation == "relu6" else []
    y: Tensor = torch.ops.onednn.qconv_pointwise(
        *(operand, x_scale, x_zero, packed, weight_scale, zeros, bias),
        *(*rest, *output, ACTIVATIONS[activation], limits, ""),
    )
    y = y.squeeze(0) if single else y
    return y.squeeze(-2) if one_d else y


PORTABLE[int8_conv] = _portable
FUNCTIONAL[int8_conv_sum_] = int8_conv


# --- embedding bags ---------------------------------------------------------------------------------------------------

_BAG_SCHEMA = (
    "int8_embedding_bag(Tensor weight, Tensor indices, Tensor offsets, Tensor? per_sample_weights,"
    " bool include_last_offset) -> Tensor"
)
#: Scale and least number of a row, which follow its codes.
TAIL = 8


def embedding_bag(
    weight: Tensor, indices: Tensor, offsets: Tensor, weights: Tensor | None, last: bool
) -> Tensor:
    """Return the sums of the bags, float32 ``[bags, D]``."""
    op = torch.ops.quantized.embedding_bag_byte_rowwise_offsets
    y: Tensor = op(weight, indices, offsets, False, 0, False, weights, None, last)
    return y


def _fake_bag(
    weight: Tensor, indices: Tensor, offsets: Tensor, weights: Tensor | None, last: bool
) -> Tensor:
    shape = (offsets.shape[0] - last, weight.shape[1] - TAIL)
    return weight.new_empty(shape, dtype=torch.float32)


if define(_BAG_SCHEMA, _LIBRARY):  # otherwise it has the kernel of libipex_cpp.so
    _LIBRARY.impl("int8_embedding_bag", embedding_bag, "CPU")
torch.library.register_fake("ipex_quant::int8_embedding_bag", _fake_bag, lib=_LIBRARY)
PORTABLE[torch.ops.ipex_quant.int8_embedding_bag.default] = embedding_bag
