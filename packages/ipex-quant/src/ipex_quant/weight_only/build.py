# SPDX-License-Identifier: Apache-2.0
"""Whether a configuration asks for a model that its weight files can fill, before memory is taken for it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ipex_core.errors import IpexError
from ipex_core.library.spec import FLOATS, check
from ipex_core.module_swap.state_dict import plain_weight
from ipex_quant.qconfig.weight_only import (
    QConfigWoq,
    WoqLowpMode,
    WoqWeightDtype,
    WoqWeightQScheme,
    _member,
    weight_format,
    woq_qconfig,
)
from ipex_quant.util.safetensors import CheckpointError, read_header, weight_files
from ipex_quant.weight.layouts import unpack_words
from ipex_quant.weight.primitives import quantize_in_parts, quantize_per_block
from ipex_quant.weight.tensor import QuantizedWeight

#: Weights that a byte of a file can stand for: codes have two bits at least.
_PER_BYTE = 4
#: Numbers that no file needs to have: tables that are computed, heads that start from nothing.
_SPARE = 1 << 24
#: So many layers and experts are built without a question.
_COUNT = 4096


@contextlib.contextmanager
def building(folder: Path) -> Iterator[None]:
    """Turn what a wrong number or name in a config.json leads to into a `CheckpointError`."""
    try:
        yield
    except IpexError:
        raise
    except MemoryError as error:
        raise CheckpointError(f"{folder} must fit the memory, got {error}") from error
    except (
        Exception
    ) as error:  # the checks of transformers and its libraries have errors of their own
        text = str(error).strip().splitlines()
        got = f"{type(error).__name__}: {text[0][:300] if text else ''}"
        raise CheckpointError(
            f"{folder} must have a config.json that fits transformers and its weights, got {got}"
        ) from error


def check_fits(
    folder: Path, config: Mapping[str, Any], make: Callable[[], nn.Module], quantized: bool
) -> None:
    """Check that the files of a folder have at least about as many weights as the model of its config.json.

    Args:
        folder: The folder.
        config: What its config.json has.
        make: Makes the model; called on the meta device.
        quantized: Whether weights may have fewer bits than a byte.

    Raises:
        CheckpointError: They have far fewer, or the model cannot be made.
    """
    entries = [e for path in weight_files(folder) for e in read_header(path).values()]
    _check_counts(folder, config, len(entries))
    with building(folder), torch.device("meta"):
        model = make()
    if quantized:
        most = _PER_BYTE * sum(entry.size for entry in entries)
    else:
        most = 2 * sum(entry.size // entry.dtype.itemsize for entry in entries)
    needed = sum(tensor.numel() for tensor in (*model.parameters(), *model.buffers()))
    if needed > most + _SPARE:
        raise CheckpointError(
            f"{folder} must have the weights of its config.json, {needed:,} numbers, got files with at most {most:,}"
        )


def _check_counts(folder: Path, config: Any, tensors: int, depth: int = 0) -> None:
    """Check numbers of modules: they cost time and memory before any of them has a weight."""
    if not isinstance(config, Mapping) or depth > 4:
        return
    for name, value in config.items():
        counted = "layer" in name or "expert" in name or "block" in name
        if counted and isinstance(value, int) and value > max(_COUNT, tensors):
            raise CheckpointError(
                f"{folder} must have the weights of its config.json, {name} = {value}, got {tensors} tensors"
            )
        _check_counts(folder, value, tensors, depth + 1)


# --- from arguments to a quantized weight -----------------------------------------------------------------------------


def dtype_of(weight: QuantizedWeight) -> WoqWeightDtype:
    """Return the weight dtype that a quantized weight has."""
    if weight.format == "fp4":
        power = weight.scales.dtype in (torch.float8_e8m0fnu, torch.uint8)
        return WoqWeightDtype.MXFP4 if power else WoqWeightDtype.FP4
    names = {"int8": "INT8", "int4": "INT4", "nf4": "NF4"}
    return WoqWeightDtype[names.get(weight.format, "FP8")]


def features_of(op: str, mod: nn.Module) -> tuple[int, int]:
    """Return in_features and out_features of a layer."""
    found = []
    for name in ("in_features", "out_features"):
        value = getattr(mod, name, None)
        check(isinstance(value, int), op, f"mod.{name}", "be an int", value)
        assert isinstance(value, int)
        found.append(value)
    return found[0], found[1]


def as_qconfig(op: str, qconfig: Any, name: str = "qconfig") -> QConfigWoq:
    """Return a configuration from itself, a mapping or None; ``name`` names the argument in messages."""
    if qconfig is None:
        return woq_qconfig(weight_dtype=WoqWeightDtype.INT4, lowp_mode=WoqLowpMode.BF16)
    qconfig = getattr(qconfig, "global_qconfig", qconfig)
    text = "be a QConfigWoq, a mapping with one as global, or None"
    check(isinstance(qconfig, QConfigWoq), op, name, text, type(qconfig).__name__)
    assert isinstance(qconfig, QConfigWoq)
    return qconfig


def quantized(
    op: str,
    source: Tensor,
    qconfig: QConfigWoq,
    scales: Tensor | None,
    zeros: Tensor | None,
    scale_dtype: torch.dtype,
) -> QuantizedWeight:
    """Quantize a float weight as configured."""
    dtype = qconfig.weight_dtype
    form = weight_format(dtype)
    symmetric = qconfig.weight_qscheme is WoqWeightQScheme.SYMMETRIC
    source = plain_weight(source)
    if scales is None:
        floats = FLOATS
        check(scale_dtype in floats, op, "scale_dtype", "be a float dtype", scale_dtype)
        if dtype is WoqWeightDtype.MXFP4:
            scale_dtype = torch.float8_e8m0fnu
        codes, found, points = quantize_in_parts(
            source, form, qconfig.group_size, symmetric, scale_dtype
        )
    else:
        codes, found, points = quantize_per_block(
            source, dtype, qconfig.group_size, scales, zeros, symmetric
        )
        points = None if points is None else _zeros(points)
    finite = found.dtype.itemsize == 1 or bool(found.isfinite().all())
    check(finite, op, "mod.weight", "be finite", "NaN or infinity")
    return QuantizedWeight(form, source.shape[1], codes, found, points, qconfig.group_size)


def _zeros(zeros: Tensor) -> Tensor:
    """Return zero points in the smallest dtype that holds them."""
    small = zeros.to(torch.int8)
    return small if bool((small == zeros).all()) else zeros.float()


def plain_codes(
    op: str,
    qweight: Tensor,
    dtype: Any,
    scales: Tensor,
    zeros: Tensor | None,
    in_features: int,
    group_size: int,
    g_idx: Tensor | None,
    bias: Tensor | None,
) -> QuantizedWeight:
    """Return a weight from codes in the plain layout."""
    kind = _member(op, "dtype", WoqWeightDtype, dtype)
    form = weight_format(kind)
    scales = scales.unsqueeze(1) if scales.dim() == 1 else scales
    if zeros is not None:
        zeros = zeros.unsqueeze(1) if zeros.dim() == 1 else zeros
        groups = scales.shape[-1]
        if form == "int4" and zeros.dtype == torch.int32 and zeros.shape[-1] == -(-groups // 8):
            # Eight in a word. Of one group's the word is the zero point itself.
            zeros = unpack_words(zeros.t().contiguous(), 4, groups).t().contiguous()
        zeros = _zeros(zeros)
    g_idx = None if g_idx is None else g_idx.to(torch.int32)
    return QuantizedWeight(form, in_features, qweight, scales, zeros, group_size, g_idx, bias, op)
