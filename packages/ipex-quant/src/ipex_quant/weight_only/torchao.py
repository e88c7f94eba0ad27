# SPDX-License-Identifier: Apache-2.0
"""Weights that torchao has quantized, read as they are, and written in its form.

torchao hangs a tensor subclass on ``weight``; its kinds are told apart by what they hold. A weight is

- int8 ``qdata`` ``[N, K]`` with ``scale`` and a zero point, or none: ``scale * (qdata - zero_point)``, one scale for
  a block of a row; with ``target_dtype`` (``IntxUnpackedToInt8Tensor``) codes have that many bits;
- packed int4 ``qdata`` ``[N, K / 2]``, the even column in the low nibble, with ``scale`` and ``zero_point``
  ``[K / group, N]``: ``scale * qdata + zero_point`` (``Int4Tensor``);
- float8 ``qdata`` ``[N, K]``: ``scale * qdata``, one scale for a row or for all.

Where torchao quantizes activations while it runs, int8 and int4 weights are multiplied with activations quantized by
rows as well; a float8 weight is computed in the dtype of the input, which loses less.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ipex_core.errors import OpArgumentError
from ipex_core.packing.quantize import pack_nibbles, unpack_nibbles
from ipex_quant.qconfig.weight_only import (
    QConfigWoq,
    WoqActQuantMode,
    WoqLowpMode,
    WoqWeightDtype,
    woq_qconfig,
)
from ipex_quant.util.modules import replace_module
from ipex_quant.weight.tensor import QuantizedWeight
from ipex_quant.weight_only.checkpoint import linear_from
from ipex_quant.weight_only.linear import WoqLinearModule

_FLOAT8 = {torch.float8_e4m3fn: "fp8_e4m3", torch.float8_e5m2: "fp8_e5m2"}
_FOUR_BITS = ("int4", "uint4", "int3", "uint3", "int2", "uint2", "int1", "uint1")


def is_torchao(tensor: object) -> bool:
    """Return whether a tensor is a quantized one of torchao."""
    kind = type(tensor)
    return kind.__module__.partition(".")[0] == "torchao" and issubclass(kind, Tensor)


def read_weight(tensor: Tensor, name: str = "weight") -> tuple[QuantizedWeight, QConfigWoq]:
    """Return the codes of a weight of torchao, and how to compute with them. Nothing is dequantized.

    Args:
        tensor: A quantized weight ``[N, K]``.
        name: For messages.

    Raises:
        OpArgumentError: Its kind is not known, or it scales or quantizes activations by numbers of a calibration.
    """
    kind, qdata = type(tensor).__name__, getattr(tensor, "qdata", None)
    scale = getattr(tensor, "scale", None)
    known = isinstance(qdata, Tensor) and isinstance(scale, Tensor) and tensor.dim() == 2
    if not known:
        raise _wrong(name, kind)
    assert qdata is not None and scale is not None
    for part in ("act_pre_scale", "act_quant_scale"):
        if getattr(tensor, part, None) is not None:
            raise OpArgumentError(
                f"{name}: weight must be a tensor of torchao without {part}, got a {kind} with one: quantize the"
                " float model without a calibration of activations, or with ipex.quantization"
            )
    rows, columns = tensor.shape
    block = list(getattr(tensor, "block_size", None) or (1, columns))
    if qdata.dtype in _FLOAT8 and list(qdata.shape) == [rows, columns]:
        weight = _float8(qdata, scale, name, kind)
        dtype = WoqWeightDtype.FP8
    elif qdata.dtype == torch.int8 and list(qdata.shape) == [rows, columns]:
        weight = _int8(tensor, qdata, scale, block, name, kind)
        dtype = WoqWeightDtype.INT4 if weight.format == "int4" else WoqWeightDtype.INT8
    elif qdata.dtype in (torch.int8, torch.uint8) and 2 * qdata.shape[1] == columns:
        weight = _int4(tensor, qdata, scale, block, name, kind)
        dtype = WoqWeightDtype.INT4
    else:
        raise _wrong(name, kind)
    weight.name = name
    mode, act = WoqLowpMode.NONE, WoqActQuantMode.NONE
    if dtype is not WoqWeightDtype.FP8:
        act = _activations(tensor)
        mode = WoqLowpMode.NONE if act is WoqActQuantMode.NONE else WoqLowpMode.INT8
    config = woq_qconfig(
        weight_dtype=dtype, lowp_mode=mode, act_quant_mode=act, group_size=weight.group_size
    )
    return weight, config


def _wrong(name: str, kind: str) -> OpArgumentError:
    return OpArgumentError(
        f"{name}: weight must be an Int8Tensor, IntxUnpackedToInt8Tensor, Int4Tensor or Float8Tensor of torchao of"
        f" two dimensions, got a {kind}: quantize the float model with one of these, or with ipex.quantization"
    )


def _activations(tensor: Any) -> WoqActQuantMode:
    """Return how torchao quantizes the activations for a weight."""
    if getattr(tensor, "activation_quantization", None) is not None:
        return WoqActQuantMode.PER_BATCH
    given = getattr(tensor, "act_quant_kwargs", None)
    if given is None:
        return WoqActQuantMode.NONE
    symmetric = getattr(getattr(given, "mapping_type", None), "name", "SYMMETRIC") != "ASYMMETRIC"
    return WoqActQuantMode.PER_BATCH_SYM if symmetric else WoqActQuantMode.PER_BATCH


def _group(block: list[int], shape: tuple[int, int], name: str, kind: str) -> int:
    """Return the group size that a block stands for; -1: one scale for a row, or for all."""
    rows, columns = shape
    if block[-1] == columns and block[0] in (1, rows):
        return -1
    if len(block) == 2 and block[0] == 1 and columns % block[1] == 0:
        return block[1]
    raise OpArgumentError(
        f"{name}: weight must have blocks within one row, or of all rows, got a {kind} with block_size {block}"
    )


def _by_rows(values: Tensor, rows: int) -> Tensor:
    """Return scales or zero points as ``[N, G]``."""
    if values.numel() == 1:
        return values.reshape(1, 1).expand(rows, 1).contiguous()
    return values.reshape(rows, -1).contiguous()


def _float8(qdata: Tensor, scale: Tensor, name: str, kind: str) -> QuantizedWeight:
    rows, columns = qdata.shape
    if scale.numel() not in (1, rows):
        raise OpArgumentError(
            f"{name}: weight must have one scale for a row or for all, got a {kind} with scales of shape"
            f" {list(scale.shape)}"
        )
    scales = _by_rows(scale, rows)
    scales = scales if scales.dtype.itemsize > 1 else scales.float()
    return QuantizedWeight(_FLOAT8[qdata.dtype], columns, qdata, scales)


def _int8(
    tensor: Any, qdata: Tensor, scale: Tensor, block: list[int], name: str, kind: str
) -> QuantizedWeight:
    rows, columns = qdata.shape
    group = _group(block, (rows, columns), name, kind)
    scales = _by_rows(scale, rows)
    zero = getattr(tensor, "zero_point", None)
    zeros = None
    if zero is not None and bool(zero.any()):
        zeros = _by_rows(zero, rows).float()
    target = str(getattr(tensor, "target_dtype", torch.int8)).rpartition(".")[2]
    if target not in _FOUR_BITS:
        return QuantizedWeight("int8", columns, qdata, scales, zeros, group)
    codes = pack_nibbles((qdata + 8).view(torch.uint8))
    return QuantizedWeight(
        "int4", columns, codes, scales, None if zeros is None else zeros + 8.0, group
    )


def _int4(
    tensor: Any, qdata: Tensor, scale: Tensor, block: list[int], name: str, kind: str
) -> QuantizedWeight:
    rows, columns = tensor.shape
    group = _group(block, (rows, columns), name, kind)
    # Nibbles of two's complement become 0 to 15.
    codes = qdata.view(torch.uint8) ^ 0x88
    scales = scale.t().contiguous()
    zero = getattr(tensor, "zero_point", None)
    zeros = None
    if zero is not None and bool(zero.any()):
        if bool((scale == 0).any()):
            raise OpArgumentError(
                f"{name}: weight must have scales other than 0, got a {kind} with a scale of 0"
            )
        zeros = (8.0 - zero.float() / scale.float()).t().contiguous()
    return QuantizedWeight("int4", columns, codes, scales, zeros, group)


# --- models -----------------------------------------------------------------------------------------------------------


def replace_torchao(model: nn.Module) -> tuple[str, ...]:
    """Replace the linear layers of a model whose weights torchao has quantized, in place; return their names.

    Args:
        model: A model that ``torchao.quantization.quantize_`` has changed, or that transformers has loaded with a
            ``TorchAoConfig``. Codes and scales are packed as they are.

    Raises:
        OpArgumentError: A weight is of a kind that is not known.
    """
    found: dict[int, nn.Module] = {}
    names = []
    for name, module in list(model.named_modules(remove_duplicate=False)):
        weight = module._parameters.get("weight")
        if not isinstance(module, nn.Linear) or not is_torchao(weight):
            continue
        if id(module) not in found:
            assert weight is not None
            quantized, config = read_weight(weight.detach(), name)
            quantized.bias = None if module.bias is None else module.bias.detach()
            layer = linear_from(quantized, config, weight.dtype)
            found[id(module)] = layer.train(module.training)
        replace_module(model, name, found[id(module)])
        names.append(name)
    return tuple(names)


def torchao_weight(weight: QuantizedWeight, dtype: torch.dtype, name: str = "weight") -> Tensor:
    """Return a quantized weight as a tensor of torchao: int8, int4 (in bytes) or float8.

    Args:
        weight: Codes and scales.
        dtype: The dtype that the tensor shows.
        name: For messages.

    Raises:
        OpArgumentError: torchao has no such format.
        ModuleNotFoundError: torchao is not installed.
    """
    from torchao.quantization import Float8Tensor, IntxUnpackedToInt8Tensor

    if weight.g_idx is not None or weight.format in ("nf4", "fp4"):
        got = "groups in another order" if weight.g_idx is not None else weight.format
        raise OpArgumentError(
            f"save_torchao: {name} must be int8, int4 or fp8 with groups of neighbors, got {got}: save it with"
            " ipex.quantization.save"
        )
    rows, columns = weight.out_features, weight.in_features
    group = columns if weight.group_size == -1 else weight.group_size
    scales = weight.scales if weight.scales.dtype.itemsize > 1 else weight.scales.float()
    if columns % group:
        raise OpArgumentError(
            f"save_torchao: {name} must have input features that are a multiple of the group size {group}, got"
            f" {columns}: save it with ipex.quantization.save"
        )
    if weight.format.startswith("fp8"):
        if weight.scales.shape != (rows, 1):
            raise OpArgumentError(
                f"save_torchao: {name} must have one scale for a row, got scales of shape {list(scales.shape)}"
            )
        return Float8Tensor(weight.codes, scales.float(), block_size=[1, columns], dtype=dtype)
    zeros = weight.zeros
    if weight.format == "int8":
        target: Any = torch.int8
        codes, shift = weight.codes, 0
    else:
        codes = unpack_nibbles(weight.codes, columns).to(torch.int8) - 8
        target, shift = torch.int4, 8  # type: ignore[attr-defined]
    points = torch.zeros(scales.shape, dtype=torch.int8)
    if zeros is not None:
        moved = zeros.float() - shift
        if bool((moved != moved.round()).any()):
            raise OpArgumentError(
                f"save_torchao: {name} must have zero points that are integers, got others: save it with"
                " ipex.quantization.save"
            )
        points = moved.to(torch.int8)
    return IntxUnpackedToInt8Tensor(codes, scales, points, target, (1, group), dtype, None)


def _tensors(model: nn.Module, dtype: torch.dtype) -> Iterator[tuple[str, Tensor, str, int]]:
    """Yield name, tensor, format and group size (of quantized weights) of what is saved of a model."""
    layers = {
        name: module
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, WoqLinearModule)
    }
    for name, layer in layers.items():
        weight = layer.quantized_weight()
        tensor = torchao_weight(weight, dtype, f"{name}.weight")
        yield f"{name}.weight", tensor, weight.format, weight.group_size
        if layer.bias is not None:
            yield f"{name}.bias", layer.bias.detach().to(dtype), "", 0
    for key, value in model.state_dict().items():
        if not any(key.startswith(f"{name}.") for name in layers):
            yield key, value.detach(), "", 0


def save_torchao(model: nn.Module, folder: str | Path) -> None:
    """Save a model with weight-only quantized layers in torchao's safetensors form, which transformers loads.

    Int4 codes take a byte each, as torchao's kernels for processors read them. The folder has ``model.safetensors``
    and ``config.json`` with a ``TorchAoConfig``; ``AutoModel...from_pretrained(folder)`` needs torchao.

    Args:
        model: A model of transformers with layers of `ipex_quant`, optimized or not.
        folder: Is made if it is not there.

    Raises:
        OpArgumentError: The model has no quantized layers, no ``config``, or layers that torchao has no format for.
        ModuleNotFoundError: torchao is not installed.
    """
    from safetensors.torch import save_file
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict

    config: Any = getattr(model, "config", None)
    if config is None or not hasattr(config, "to_dict"):
        raise OpArgumentError(
            f"save_torchao: model must be a model of transformers, got a {type(model).__name__} without config"
        )
    floats = (p.dtype for p in model.parameters() if p.is_floating_point() and p.dtype.itemsize > 1)
    dtype = next(floats, torch.float32)
    every = list(_tensors(model, dtype))
    kinds = {(form, group) for _, _, form, group in every if form}
    if not kinds:
        raise OpArgumentError(
            "save_torchao: model must have weight-only quantized layers, got none: quantize it with"
            " ipex.llm.optimize(model, quantization_config=...) first"
        )
    tensors: dict[str, Tensor] = {}
    seen: dict[int, str] = {}
    for name, tensor, form, _ in every:
        place = tensor.data_ptr() if not form and tensor.numel() else 0
        if place and place in seen:  # a tied weight is written once
            continue
        if place:
            seen[place] = name
        tensors[name] = tensor if form else tensor.contiguous()
    flat, metadata = flatten_tensor_state_dict(tensors)
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: one.contiguous() for name, one in flat.items()},
        target / "model.safetensors",
        metadata={**metadata, "format": "pt"},
    )
    content = config.to_dict()
    content["quantization_config"] = _config(*sorted(kinds)[0])
    content["architectures"] = [type(model).__name__]
    content["dtype"] = str(dtype).rpartition(".")[2]
    text = json.dumps(content, indent=2, sort_keys=True, default=str)
    (target / "config.json").write_text(text + "\n", encoding="utf-8")


def _config(form: str, group: int) -> dict[str, Any]:
    """Return the ``quantization_config`` of a folder; what is in the tensors themselves says all."""
    from torchao.quantization import (
        Float8WeightOnlyConfig,
        IntxWeightOnlyConfig,
        PerAxis,
        PerGroup,
    )
    from transformers import TorchAoConfig

    if form.startswith("fp8"):
        kind: Any = Float8WeightOnlyConfig()
    else:
        bits = torch.int8 if form == "int8" else torch.int4  # type: ignore[attr-defined]
        grain = PerAxis(0) if group == -1 else PerGroup(group)
        kind = IntxWeightOnlyConfig(weight_dtype=bits, granularity=grain)
    found: dict[str, Any] = TorchAoConfig(quant_type=kind).to_dict()
    return found
