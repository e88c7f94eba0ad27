# SPDX-License-Identifier: Apache-2.0
"""What the quantization configuration of a checkpoint says about one of its layers, and the weights that it names.

These have one code per byte, or are of compressed-tensors; they are read into `QuantizedWeight`.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ipex_core.errors import OpArgumentError
from ipex_core.library.spec import check
from ipex_quant.formats.patterns import match
from ipex_quant.weight.layouts import stored_weight, unpack_words, unsigned_weight
from ipex_quant.weight.tensor import QuantizedWeight, is_integer, movable

#: Spellings of methods -> the name used here.
METHODS = {
    "gptq": "gptq",
    "gptq_v2": "gptq",
    "awq": "awq",
    "rtn": "rtn",
    "auto-round": "auto-round",
    "autoround": "auto-round",
    "auto_round": "auto-round",
    "intel/auto-round": "auto-round",
    "int8": "int8",
    "fp8": "fp8",
    "compressed-tensors": "compressed-tensors",
    "ipex": "compressed-tensors",
    "bitsandbytes": "bitsandbytes",
    "gguf": "gguf",
}
_FORMATS = {
    "pack-quantized": "words",
    "int-quantized": "bytes",
    "naive-quantized": "bytes",
    "float-quantized": "bytes",
    "mxfp4-pack-quantized": "fp4",
    "nf4-pack-quantized": "nf4",
}


@dataclasses.dataclass(frozen=True, slots=True)
class LayerScheme:
    """How one layer is stored.

    Attributes:
        method: One of the values of `METHODS`.
        bits: Bits of a code.
        group_size: Input features that share a scale, -1 for all, None if it follows from the shapes.
        symmetric: There are no zero points, or they are all alike.
        layout: ``"gptq"``, ``"awq"``, ``"any"`` (the shapes tell which), ``"words"``, ``"bytes"``, ``"fp4"`` or
            ``"nf4"``.
        offset: GPTQ's zero points are stored less one.
        block: Rows and columns that share a scale, or None.
    """

    method: str
    bits: int = 8
    group_size: int | None = None
    symmetric: bool = False
    layout: str = "bytes"
    offset: bool = True
    block: tuple[int, int] | None = None


def method_of(op: str, config: Mapping[str, Any] | None) -> str:
    """Return the quantization method that a configuration names."""
    if config is None:
        return "gptq"
    kind = type(config).__name__
    check(isinstance(config, Mapping), op, "quant_config", "be a mapping or None", kind)
    name = config.get("quant_method")
    if name is None and "config_groups" in config:
        name = "compressed-tensors"
    if name is None and "bits" in config:  # quantize_config.json of AutoGPTQ has none
        name = "gptq"
    known = isinstance(name, str) and name.lower() in METHODS
    check(known, op, "quant_method", f"be one of {', '.join(sorted(METHODS))}", name)
    return METHODS[str(name).lower()]


def scheme_of(op: str, config: Mapping[str, Any] | None, name: str) -> LayerScheme:
    """Return how the layer ``name`` is stored.

    Raises:
        OpArgumentError: The configuration names a method or has a value that is not supported.
    """
    method = method_of(op, config)
    if config is None:
        return LayerScheme("gptq", 4, None, False, "gptq")
    try:
        return _scheme(op, method, config, name)
    except (AttributeError, KeyError, TypeError, re.error) as error:
        what = f"be what {method} documents"
        got = f"{type(error).__name__}: {error}"
        raise OpArgumentError(f"{op}: quant_config must {what}, got {got}") from error


def _scheme(op: str, method: str, config: Mapping[str, Any], name: str) -> LayerScheme:
    if method == "compressed-tensors":
        return _compressed(op, config, name)
    if method in ("bitsandbytes", "gguf"):  # each tensor says all by itself
        return LayerScheme(method)
    if method in ("int8", "fp8"):
        return LayerScheme(method, block=_block(op, config.get("weight_block_size")))
    values = {**config, **_override(op, config, name)}
    bits = values.get("bits", values.get("w_bit", 4))
    group = values.get("group_size", values.get("q_group_size"))
    _check_numbers(op, name, bits, group)
    if method == "awq":
        version = str(values.get("version", "gemm")).lower()
        check(version == "gemm", op, "version", "be gemm for AWQ checkpoints", version)
        check(bits == 4, op, "bits", "be 4 for AWQ checkpoints", bits)
        symmetric = not values.get("zero_point", True)
        return LayerScheme(method, bits, group, symmetric, "awq")
    packing = str(values.get("packing_format", values.get("backend", ""))).lower()
    version = str(values.get("checkpoint_format", packing)).lower()
    layout = "gptq"
    if method != "gptq":
        layout = "awq" if "awq" in packing else "any"
    second = "v2" in version or "gptqmodel" in version or config.get("quant_method") == "gptq_v2"
    stated = values.get("checkpoint_format", "gptq")
    check(stated in ("gptq", "gptq_v2"), op, "checkpoint_format", "be gptq or gptq_v2", stated)
    symmetric = bool(values.get("sym", False))
    return LayerScheme(method, bits, group, symmetric, layout, not second)


def _check_numbers(op: str, name: str, bits: Any, group: Any) -> None:
    """Check the bits of a code and how many weights share a scale, which come from a file: no 4.0, no text."""
    known = type(bits) is int and bits in (2, 3, 4, 8)
    check(known, op, f"bits of {name}", "be one of 2, 3, 4, 8", bits)
    fits = group is None or (type(group) is int and (group > 0 or group == -1))
    check(fits, op, f"group_size of {name}", "be -1 or positive", group)


def _override(op: str, config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return what a configuration says about single layers: by name (AutoRound) or pattern (GPTQModel)."""
    extra = config.get("extra_config") or {}
    found: dict[str, Any] = dict(extra.get(name) or {})
    for pattern, values in extra.items():
        if pattern != name and any(c in pattern for c in "*[(|\\") and _matches(op, pattern, name):
            found = {**values, **found}
    for pattern, values in (config.get("dynamic") or {}).items():
        if not pattern.startswith("-") and match(op, pattern.removeprefix("+:"), name):
            return {**found, **values}
    return found


def _matches(op: str, pattern: str, name: str) -> bool:
    try:
        return match(op, pattern, name, whole=True)
    except re.error:
        return False


def _block(op: str, block: Any) -> tuple[int, int] | None:
    if block is None:
        return None
    known = isinstance(block, (list, tuple)) and len(block) == 2
    known = known and all(isinstance(size, int) and size > 0 for size in block)
    check(known, op, "weight_block_size", "be two positive numbers", block)
    return block[0], block[1]


def _compressed(op: str, config: Mapping[str, Any], name: str) -> LayerScheme:
    groups = config.get("config_groups") or {}
    check(bool(groups), op, "config_groups", "have a group", groups)
    group = _target(op, groups, name)
    weights = group.get("weights") or {}
    form = group.get("format") or config.get("format") or "pack-quantized"
    check(form in _FORMATS, op, "format", f"be one of {', '.join(_FORMATS)}", form)
    bits = weights.get("num_bits", 8)
    kind = weights.get("type", "int")
    check(kind in ("int", "float"), op, f"type of {name}", "be int or float", kind)
    size = weights.get("group_size")
    _check_numbers(op, name, bits, size)
    strategy = weights.get("strategy") or ("channel" if size is None else "group")
    usual = ("tensor", "channel", "group", "block")
    check(strategy in usual, op, f"strategy of {name}", f"be one of {', '.join(usual)}", strategy)
    block = None
    if strategy == "block":
        block = _block(op, weights.get("block_structure"))
    return LayerScheme(
        "compressed-tensors",
        bits,
        size if strategy == "group" else -1,
        bool(weights.get("symmetric", True)),
        _FORMATS[form],
        block=block,
    )


def _target(op: str, groups: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return the group of settings that a layer belongs to: by name, by pattern, or as a linear layer."""
    usual: Mapping[str, Any] | None = None
    for group in groups.values():
        for target in group.get("targets") or ["Linear"]:
            pattern = target.startswith("re:") and match(op, target[3:], name)
            if target == name or name.endswith(f".{target}") or pattern:
                return group  # type: ignore[no-any-return]
            if target == "Linear" and usual is None:
                usual = group
    return next(iter(groups.values())) if usual is None else usual


# --- weights ----------------------------------------------------------------------------------------------------------


_BLOCK = 128
_FP8 = {torch.float8_e4m3fn: "fp8_e4m3", torch.float8_e5m2: "fp8_e5m2"}


def _scale_groups(
    scales: Tensor, n: int, k: int, group_size: int | None, name: str
) -> tuple[Tensor, int]:
    """Return ``[N, G]`` scales and the group size for ``[N, G]``, ``[N]`` or a single one.

    Without a known group size (None) all groups are alike.
    """
    shape = list(scales.shape)
    if group_size not in (None, -1):
        assert group_size is not None
        wanted = [n, -(-k // group_size)]
        what = f"have shape {wanted} for groups of {group_size}"
        check(shape == wanted, name, "scales", what, shape)
        return scales, group_size
    if scales.numel() == 1:
        return scales.reshape(1, 1).expand(n, 1).contiguous(), -1
    if shape == [n]:
        return scales.reshape(n, 1), -1
    fits = len(shape) == 2 and shape[0] == n and 0 < shape[1] <= k
    check(fits, name, "scales", f"have shape [{n}, G], [{n}] or [1]", shape)
    if shape[1] == 1:
        return scales, -1
    check(k % shape[1] == 0, name, "scales", f"have a divisor of {k} groups", shape[1])
    return scales, k // shape[1]


def int8_weight(
    weight: Tensor,
    scales: Tensor,
    zeros: Tensor | None = None,
    group_size: int | None = None,
    bias: Tensor | None = None,
    name: str = "",
) -> QuantizedWeight:
    """Read int8 codes ``[N, K]`` with scales (and zero points) ``[N, G]``, ``[N]`` or ``[1]``."""
    n, k = weight.shape
    scales, group = _scale_groups(scales, n, k, group_size, f"{name}.weight_scale")
    if zeros is not None:
        key = f"{name}.weight_zero_point"
        zeros, _ = _scale_groups(zeros, n, k, group_size, key)
        small = is_integer(zeros) and bool((zeros.to(torch.int8) == zeros).all())
        check(small, key, "zero points", "be integers from -128 to 127", zeros.dtype)
        zeros = zeros.to(torch.int8) if bool(zeros.any()) else None
    return QuantizedWeight("int8", k, weight, scales, zeros, group, None, bias, name)


def fp8_weight(
    weight: Tensor,
    scales: Tensor,
    block: tuple[int, int] | None = None,
    group_size: int | None = None,
    bias: Tensor | None = None,
    name: str = "",
) -> QuantizedWeight:
    """Read 8-bit floats ``[N, K]`` with a factor for each block, output feature, group, or all of them.

    Args:
        weight: float8_e4m3fn or float8_e5m2.
        scales: What codes are multiplied by: ``[ceil(N / rows), ceil(K / columns)]`` with a block, otherwise
            ``[N, G]``, ``[N]`` or ``[1]``.
        block: Rows and columns that share a factor, or None.
        group_size: Input features that share a factor, -1 for all, None if it follows from the shapes.
        bias: ``[N]``, or None.
        name: The module's name, for messages.
    """
    n, k = weight.shape
    form = _FP8[weight.dtype]
    if block is not None and scales.numel() > 1:
        rows, group = block
        wanted = [-(-n // rows), -(-k // group)]
        got = list(scales.shape)
        what = f"have shape {wanted} for blocks of {rows} x {group}"
        check(got == wanted, f"{name}.weight_scale_inv", "scales", what, got)
        if block != (_BLOCK, _BLOCK):
            scales = _repeat_rows(scales, rows, n)
    else:
        scales, group = _scale_groups(scales, n, k, group_size, f"{name}.weight_scale")
    return QuantizedWeight(form, k, weight, scales, None, group, None, bias, name)


def _repeat_rows(scales: Tensor, times: int, n: int) -> Tensor:
    return movable(scales).repeat_interleave(times, dim=0)[:n].view(scales.dtype)


def packed_weight(
    words: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    shape: tuple[int, int],
    bits: int,
    group_size: int,
    g_idx: Tensor | None = None,
    bias: Tensor | None = None,
    name: str = "",
) -> QuantizedWeight:
    """Read a weight of compressed-tensors' format ``pack-quantized``.

    Args:
        words: int32 ``[N, ceil(K * bits / 32)]``, the first code in the lowest bits.
        scales: ``[N, G]``.
        zeros: int32 ``[ceil(N * bits / 32), G]``, packed along N, or int8 ``[N, G]``, or None for symmetric codes.
        shape: ``(N, K)``.
        bits: 2, 3, 4 or 8.
        group_size: Input features that share a scale, or -1.
        g_idx: ``[K]``, or None.
        bias: ``[N]``, or None.
        name: The module's name, for messages.
    """
    n, k = shape
    key = f"{name}.weight_packed"
    wanted = [n, -(-k * bits // 32)]
    check(words.dtype == torch.int32, key, "weight_packed", "have dtype int32", words.dtype)
    got = list(words.shape)
    check(got == wanted, key, "weight_packed", f"have shape {wanted} for {bits} bits", got)
    groups = 1 if group_size == -1 else -(-k // group_size)
    got = list(scales.shape)
    check(got == [n, groups], f"{name}.weight_scale", "scales", f"have shape {[n, groups]}", got)
    unsigned: Tensor | None = None
    if zeros is not None:
        unsigned = _zeros(zeros, n, groups, bits, name)
    if g_idx is not None and bool((g_idx < 0).any()):
        g_idx = None  # filled with -1 where it is not used
    if bits == 4 and k % 2 == 0 and sys.byteorder == "little":
        # The bytes of the words are the codes as they are needed: a file that is mapped is not copied.
        stored = words.contiguous().view(torch.uint8)[:, : k // 2].contiguous()
        return stored_weight(stored, k, unsigned, scales, bits, group_size, g_idx, bias, name)
    codes = unpack_words(words.t().contiguous(), bits, k).t().contiguous()
    return unsigned_weight(codes, unsigned, scales, bits, group_size, g_idx, bias, name)


def _zeros(zeros: Tensor, n: int, groups: int, bits: int, name: str) -> Tensor:
    """Return zero points as unsigned numbers, like the codes."""
    key = f"{name}.weight_zero_point"
    got = list(zeros.shape)
    if zeros.dtype == torch.int32:
        packed = [-(-n * bits // 32), groups]
        check(got == packed, key, "zero points", f"have shape {packed}", got)
        return unpack_words(zeros.contiguous(), bits, n)
    check(got == [n, groups], key, "zero points", f"have shape {[n, groups]}", got)
    check(zeros.dtype == torch.int8, key, "zero points", "be int32 or int8", zeros.dtype)
    return zeros.int() + (1 << (bits - 1))


def codebook_weight(
    codes: Tensor,
    scales: Tensor,
    in_features: int,
    form: str,
    group_size: int | None = None,
    bias: Tensor | None = None,
    name: str = "",
) -> QuantizedWeight:
    """Read indices of 4 bits, ``[N, ceil(K / 2)]`` with the even column in the low nibble.

    Args:
        codes: uint8.
        scales: ``[N, G]``; uint8 are exponents of two with bias 127.
        in_features: K.
        form: ``"nf4"`` or ``"fp4"``.
        group_size: Input features that share a scale, -1 for all, None if it follows from the shapes.
        bias: ``[N]``, or None.
        name: The module's name, for messages.
    """
    key = f"{name}.weight_packed"
    check(codes.dtype == torch.uint8, key, "weight_packed", "have dtype uint8", codes.dtype)
    n = codes.shape[0]
    scales, group = _scale_groups(scales, n, in_features, group_size, f"{name}.weight_scale")
    if scales.dtype == torch.uint8:
        scales = scales.view(torch.float8_e8m0fnu)
    return QuantizedWeight(form, in_features, codes, scales, None, group, None, bias, name)
