# SPDX-License-Identifier: Apache-2.0
"""Reading the quantized linear layers of checkpoints that other tools made.

=====================  ==============================================================================================
``quant_method``       tensors of a layer
=====================  ==============================================================================================
gptq, auto-round       ``qweight``, ``scales``, ``qzeros``, ``g_idx`` (act-order); 2, 3, 4 and 8 bits; both versions
awq, rtn, auto-round   ``qweight``, ``scales``, ``qzeros``; 4 bits
int8                   ``weight``, ``weight_scale``
fp8                    ``weight``, ``weight_scale_inv`` for blocks of 128 x 128 or others; ``weight_scale``
compressed-tensors     ``pack-quantized`` (2, 3, 4, 8 bits), ``int-quantized``, ``float-quantized``,
                       ``mxfp4-pack-quantized``
ipex                   as compressed-tensors, and ``nf4-pack-quantized``; what ``state_dict`` of a quantized layer has
bitsandbytes           ``weight`` with ``weight.quant_state.bitsandbytes__nf4`` (or ``fp4``), ``weight.absmax``, also
                       nested; int8 ``weight`` with ``SCB``
gguf                   ``gguf_blocks`` and ``gguf_type``, which `read_gguf` makes
=====================  ==============================================================================================

Scales of activations are not used: activations keep their dtype, or are rounded as ``lowp_mode`` says.

Example:
    >>> import torch
    >>> from ipex_quant.weight_only.checkpoint import read_checkpoint
    >>> state_dict = {"up.weight": torch.ones(4, 16).to(torch.int8), "up.weight_scale": torch.full((4,), 0.5)}
    >>> for weight in read_checkpoint(state_dict, {"quant_method": "int8"}):
    ...     print(weight.name, weight.format, weight.dequantize()[0, 0].item())
    up int8 0.5
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn

from ipex_core.library.spec import check
from ipex_quant.formats.bitsandbytes import PARTS, bnb_weight
from ipex_quant.formats.gguf import blocks_weight
from ipex_quant.formats.schemes import (
    LayerScheme,
    codebook_weight,
    fp8_weight,
    int8_weight,
    method_of,
    packed_weight,
    scheme_of,
)
from ipex_quant.qconfig.weight_only import QConfigWoq, WoqLowpMode
from ipex_quant.weight.layouts import awq_weight, gptq_weight
from ipex_quant.weight.tensor import QuantizedWeight, absent_keys, is_integer, saved_weight
from ipex_quant.weight_only.linear import WeightOnlyQuantizedLinear

__all__ = ["linear_from", "quantized_names", "read_checkpoint", "read_linear"]

log = logging.getLogger("ipex")

#: What tells that a layer is quantized.
_MARKS = (
    *("qweight", "weight_packed", "weight_scale_inv", "weight_scale"),
    *("gguf_blocks", "SCB", "absmax"),
)
#: Everything that belongs to a quantized layer.
_PARTS = (
    *("qweight", "scales", "qzeros", "g_idx", "bias", "weight", "weight_scale", "weight_scale_inv"),
    *("weight_packed", "weight_shape", "weight_zero_point", "weight_g_idx"),
    *("input_scale", "input_zero_point", "output_scale", "perm"),
    *("zeros", "woq", "gguf_blocks", "gguf_type", *PARTS),
)
_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def quantized_names(state_dict: Mapping[str, Tensor]) -> list[str]:
    """Return the names of the quantized linear layers, in the order of the state dict."""
    names: dict[str, None] = {}
    for key in state_dict:
        name, _, last = key.rpartition(".")
        if last == "absmax":  # bitsandbytes hangs its tensors on the weight
            name = name.removesuffix(".weight")
        if last in _MARKS and name:
            names[name] = None
    return list(names)


def read_checkpoint(
    state_dict: Mapping[str, Tensor],
    quant_config: Mapping[str, Any] | None = None,
    *,
    take: bool = False,
) -> Iterator[QuantizedWeight]:
    """Yield the quantized linear layers of a checkpoint, one at a time.

    Args:
        state_dict: All tensors of the checkpoint.
        quant_config: The ``quantization_config`` of its ``config.json``; None for GPTQ with 4 bits whose groups follow
            from the shapes.
        take: Remove what has been read from ``state_dict``, so that its memory is freed.

    Raises:
        OpArgumentError: The method is unknown, there is no quantized layer, or tensors do not fit the configuration;
            the message names the key.
    """
    op = "read_checkpoint"
    method = method_of(op, quant_config)
    names = quantized_names(state_dict)
    check(bool(names), op, "state_dict", f"have quantized layers for method {method}", "none")
    for name in names:
        yield read_linear(state_dict, name, quant_config)
        if take:
            assert isinstance(state_dict, MutableMapping)
            for part in _PARTS:
                state_dict.pop(f"{name}.{part}", None)


def read_linear(
    state_dict: Mapping[str, Tensor], name: str, quant_config: Mapping[str, Any] | None = None
) -> QuantizedWeight:
    """Return the quantized weight of one layer, with its bias.

    Args:
        state_dict: Tensors of the checkpoint; the tensors of this layer are enough.
        name: The layer's name.
        quant_config: As for `read_checkpoint`.

    Raises:
        OpArgumentError: As for `read_checkpoint`.
    """
    _check_parts(state_dict, name)
    if f"{name}.woq" in state_dict:  # a layer of ours
        absent = absent_keys(state_dict, f"{name}.")
        check(not absent, "read_linear", "state_dict", f"have {', '.join(absent)}", "none")
        return saved_weight(state_dict, f"{name}.")
    scheme = scheme_of("read_linear", quant_config, name)
    parts = {part: state_dict.get(f"{name}.{part}") for part in _PARTS}
    read = {
        "gptq": _read_words,
        "awq": _read_words,
        "rtn": _read_words,
        "auto-round": _read_words,
        "int8": _read_bytes,
        "fp8": _read_bytes,
        "bitsandbytes": _read_bnb,
        "gguf": _read_gguf,
    }.get(scheme.method, _read_compressed)
    return read(parts, scheme, name)


def _check_parts(state_dict: Mapping[str, Tensor], name: str) -> None:
    """Check what holds for the tensors of a layer in all formats: pickles have tensors that no reader can look into."""
    for part in _PARTS:
        value = state_dict.get(f"{name}.{part}")
        if value is None:
            continue
        key = f"{name}.{part}"
        kind = type(value).__name__
        check(isinstance(value, Tensor), key, part, "be a tensor", kind)
        layout = "the meta device" if value.is_meta else value.layout
        plain = not value.is_meta and value.layout == torch.strided
        check(plain, key, part, "have values in the layout torch.strided", layout)
        if part in ("g_idx", "weight_g_idx"):
            check(is_integer(value), key, part, "have integers", value.dtype)
    bias = state_dict.get(f"{name}.bias")
    if bias is not None:
        key = f"{name}.bias"
        check(bias.is_floating_point(), key, "bias", "be floating point", bias.dtype)
        check(bool(bias.float().isfinite().all()), key, "bias", "be finite", "NaN or infinity")


def linear_from(
    weight: QuantizedWeight,
    qconfig: QConfigWoq | None = None,
    dtype: torch.dtype = torch.float32,
    later: bool = False,
) -> nn.Module:
    """Return a layer that computes with a weight.

    What the packed format cannot hold (groups of fewer than 16 features, parts of an act-order weight whose groups have
    become of different sizes) becomes an ordinary linear layer, and a warning is logged.

    Args:
        weight: A quantized weight.
        qconfig: How to compute, or None: in the dtype of the input.
        dtype: The dtype of an ordinary layer, and the one that ``weight`` of a quantized one shows.
        later: Pack the weight when it is needed.
    """
    reason = weight.not_packable()
    if reason is not None:
        log.warning("%s: dequantized to %s, since %s", weight.name or "linear", dtype, reason)
        linear = nn.Linear(weight.in_features, weight.out_features, bias=False, device="meta")
        linear.weight = nn.Parameter(weight.dequantize(dtype), requires_grad=False)
        if weight.bias is not None:
            linear.bias = nn.Parameter(weight.bias.detach().to(dtype, copy=True), False)
        return linear.eval()
    if qconfig is not None and qconfig.lowp_mode is WoqLowpMode.INT8:
        key = weight.name or "linear_from"
        fits = not weight.format.startswith("fp8")
        check(fits, key, "lowp_mode", "be NONE, FP16 or BF16 for fp8 weights", "INT8")
    result = WeightOnlyQuantizedLinear.from_quantized(weight, qconfig, later)
    result._float_dtype = dtype
    return result.eval()


Parts = dict[str, Tensor | None]


def _need(parts: Parts, name: str, part: str) -> Tensor:
    value = parts[part]
    check(value is not None, "read_linear", "state_dict", f"have {name}.{part}", "none")
    assert value is not None
    return value


def _read_words(parts: Parts, scheme: LayerScheme, name: str) -> QuantizedWeight:
    qweight, scales = _need(parts, name, "qweight"), _need(parts, name, "scales")
    qzeros, g_idx, bias = parts["qzeros"], parts["g_idx"], parts["bias"]
    if g_idx is not None and not g_idx.numel():
        g_idx = None
    if not scheme.symmetric:
        qzeros = _need(parts, name, "qzeros")
    awq = scheme.layout == "awq"
    if scheme.layout == "any":
        # Words of GPTQ lie along K, words of AWQ along N.
        awq = qweight.dim() == 2 and scales.dim() == 2 and qweight.shape[1] != scales.shape[1]
    group = scheme.group_size
    if group is None:  # no configuration says it
        k = qweight.shape[0] if awq else qweight.shape[0] * 32 // scheme.bits
        group = -1 if scales.shape[0] == 1 else -(-k // scales.shape[0])
    if awq:
        check(scheme.bits == 4, f"{name}.qweight", "bits", "be 4 for AWQ", scheme.bits)
        return awq_weight(qweight, scales, qzeros, g_idx, group_size=group, bias=bias, name=name)
    return gptq_weight(
        qweight,
        scales,
        qzeros,
        g_idx,
        bits=scheme.bits,
        group_size=group,
        symmetric=scheme.symmetric,
        offset=scheme.offset,
        in_features=_in_features(qweight, scheme.bits, g_idx),
        bias=bias,
        name=name,
    )


def _in_features(qweight: Tensor, bits: int, g_idx: Tensor | None) -> int | None:
    """Return K where it is not a whole number of words: g_idx has one entry for each feature."""
    if g_idx is None or qweight.dim() != 2:
        return None
    return g_idx.numel() if -(-g_idx.numel() * bits // 32) == qweight.shape[0] else None


def _read_bnb(parts: Parts, scheme: LayerScheme, name: str) -> QuantizedWeight:
    return bnb_weight(parts, name)


def _read_gguf(parts: Parts, scheme: LayerScheme, name: str) -> QuantizedWeight:
    blocks, kind = _need(parts, name, "gguf_blocks"), _need(parts, name, "gguf_type")
    return blocks_weight(blocks, int(kind), parts["bias"], name)


def _read_bytes(parts: Parts, scheme: LayerScheme, name: str) -> QuantizedWeight:
    weight, bias = _need(parts, name, "weight"), parts["bias"]
    key = f"{name}.weight"
    check(weight.dim() == 2, key, "weight", "be 2-D", list(weight.shape))
    inverse = parts["weight_scale_inv"]
    scales = inverse if inverse is not None else _need(parts, name, "weight_scale")
    check(scales.is_floating_point(), f"{key}_scale", "scales", "be floating point", scales.dtype)
    if weight.dtype in _FLOAT8:
        block = scheme.block
        if block is None and inverse is not None:
            block = (128, 128)
        return fp8_weight(weight, scales, block, scheme.group_size, bias, name)
    wanted = "float8_e4m3fn or float8_e5m2" if scheme.method == "fp8" else "int8"
    fits = weight.dtype == torch.int8 and scheme.method != "fp8"
    check(fits, key, "weight", f"have dtype {wanted}", weight.dtype)
    return int8_weight(weight, scales, parts["weight_zero_point"], scheme.group_size, bias, name)


def _read_compressed(parts: Parts, scheme: LayerScheme, name: str) -> QuantizedWeight:
    words = parts["weight_packed"]
    if words is None:
        return _read_bytes(parts, dataclasses.replace(scheme, method="int8"), name)
    scales, bias = _need(parts, name, "weight_scale"), parts["bias"]
    check(words.dim() == 2, f"{name}.weight_packed", "weight_packed", "be 2-D", list(words.shape))
    stated = _stated_shape(parts["weight_shape"], name)
    if scheme.layout in ("fp4", "nf4"):
        k = words.shape[1] * 2 if stated is None else stated[1]
        return codebook_weight(words, scales, k, scheme.layout, scheme.group_size, bias, name)
    shape = stated or (words.shape[0], words.shape[1] * 32 // scheme.bits)
    group = -1 if scheme.group_size is None else scheme.group_size
    zeros = None if scheme.symmetric else _need(parts, name, "weight_zero_point")
    g_idx = parts["weight_g_idx"]
    return packed_weight(words, scales, zeros, shape, scheme.bits, group, g_idx, bias, name)


def _stated_shape(stated: Tensor | None, name: str) -> tuple[int, int] | None:
    """Return the shape that a layer says that its weight has, or None."""
    if stated is None:
        return None
    key = f"{name}.weight_shape"
    plain = is_integer(stated) and list(stated.shape) == [2]
    check(plain, key, "weight_shape", "be 2 integers", f"{stated.dtype} {list(stated.shape)}")
    n, k = stated.tolist()
    check(n > 0 and k > 0, key, "weight_shape", "be positive", [n, k])
    return n, k
