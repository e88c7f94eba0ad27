# SPDX-License-Identifier: Apache-2.0
"""Quantized models in folders: safetensors and JSON, written module by module, complete or not there at all.

===================================  =================================================================================
file                                 content
===================================  =================================================================================
``model.safetensors``, or shards     all tensors by the names of ``model.state_dict()``; a quantized layer has
with ``model.safetensors.index...``  codes, scales and zero points, and not the packed form
``config.json``                      the model's configuration, if it has one; ``quantization_config`` says how each
                                     quantized layer computes, what shares its weight, and what else of the model
                                     static quantization changed
``generation_config.json``           as ``transformers`` writes it, if the model has one
===================================  =================================================================================

Example:
    >>> import torch
    >>> from ipex_quant import load, quantize_linears, save, woq_qconfig
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 8)).eval()
    >>> _ = quantize_linears(model, woq_qconfig(weight_dtype=2, group_size=32))
    >>> _ = save(model, "quantized")  # doctest: +SKIP
    >>> again = load("quantized", model=torch.nn.Sequential(...))  # doctest: +SKIP
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ipex_core.library.spec import check
from ipex_quant.int8.serialize import describe
from ipex_quant.util.folders import replacing
from ipex_quant.util.safetensors import ShardWriter, read_config
from ipex_quant.weight_only.linear import WoqLinearModule
from ipex_quant.weight_only.saving import (
    FORMATS,
    Kinds,
    about,
    entries,
    identity,
    markers,
    model_config,
    modules,
    whole,
    write_json,
)

__all__ = ["is_saved", "save"]

Tensor = torch.Tensor


def save(
    model: nn.Module, folder: str | os.PathLike[str], *, shard_bytes: int = 4 << 30
) -> tuple[str, ...]:
    """Write a model with weight-only quantized or INT8 layers to a folder.

    What is written does not depend on the processor. One module at a time is unpacked. The folder appears when all is
    written; until then an older one of the same name stays as it is, and after an error or a kill too. What a killed
    process left beside the folder (``.NAME.PID....partial``) is removed by the next call.

    Args:
        model: The model.
        folder: Must not exist, be empty, or be one that this function wrote.
        shard_bytes: Most bytes of a file.

    Returns:
        The names of the quantized layers, INT8 ones last.

    Raises:
        OpArgumentError: The model has no quantized layer, or something that safetensors cannot hold.
        FileExistsError: The folder has other things in it.
        OSError: Writing failed, for instance because the disk is full.
    """
    op = "save"
    check(isinstance(model, nn.Module), op, "model", "be a module", type(model).__name__)
    check(shard_bytes > 0, op, "shard_bytes", "be positive", shard_bytes)
    target = Path(folder).absolute()
    if target.is_symlink():
        target = target.resolve()
    _check_target(target)
    names = {n: m for n, m in model.named_modules() if isinstance(m, WoqLinearModule)}
    int8 = describe(model)
    known = bool(names) or int8 is not None
    check(known, op, "model", "have quantized layers", type(model).__name__)
    shards, tied = _plan(op, model, shard_bytes)
    description = about(model, names, tied)
    if int8 is not None:
        description.update(format=FORMATS[1], int8=int8)
    with replacing(target) as work:
        _write(work, model, shards, description)
    return (*names, *(int8["modules"] if int8 is not None else ()))


def _check_target(target: Path) -> None:
    if target.is_dir() and (not any(target.iterdir()) or is_saved(_config_or_none(target))):
        return
    if target.exists():
        raise FileExistsError(
            f"save: folder must be new, empty or one that save wrote, got {target}"
        )


def _config_or_none(folder: Path) -> Mapping[str, Any] | None:
    try:
        return read_config(folder)
    except ValueError:
        return None


def is_saved(config: Mapping[str, Any] | None) -> bool:
    """Return whether a ``config.json`` is of a folder that `save` wrote."""
    about = None if config is None else config.get("quantization_config")
    return isinstance(about, dict) and about.get("format") in FORMATS


def _plan(
    op: str, model: nn.Module, most: int
) -> tuple[list[tuple[list[str], Kinds]], dict[str, str]]:
    """Return the modules and tensors of each file, and which names share the tensor of another."""
    shards: list[tuple[list[str], Kinds]] = [([], {})]
    seen: dict[tuple[Any, ...], str] = {}
    tied: dict[str, str] = {}
    size = 0
    for name, module in modules(model):
        kinds: Kinds = {}
        for key, value in entries(op, name, module).items():
            own = not whole(module) and value.numel() > 0
            first = seen.setdefault(identity(value), key) if own else key
            if first != key:
                tied[key] = first
            else:
                kinds[key] = value.dtype, tuple(value.shape)
        more = sum(math.prod(shape) * dtype.itemsize for dtype, shape in kinds.values())
        if shards[-1][1] and size + more > most:
            shards.append(([], {}))
            size = 0
        shards[-1][0].append(name)
        shards[-1][1].update(kinds)
        size += more
    for key, value in markers(model).items():  # they have no bytes to write
        shards[-1][1].setdefault(key, (value.dtype, (0,)))
    return shards, tied


def _write(
    work: Path, model: nn.Module, shards: list[tuple[list[str], Kinds]], about: dict[str, Any]
) -> None:
    places = dict(model.named_modules())
    table: dict[str, str] = {}
    for i, (names, kinds) in enumerate(shards, 1):
        file = "model.safetensors"
        if len(shards) > 1:
            file = f"model-{i:05}-of-{len(shards):05}.safetensors"
        table.update(dict.fromkeys(kinds, file))
        writer = ShardWriter(work / file, kinds)
        with writer.writing():
            for name in names:
                for key, value in entries("save", name, places[name]).items():
                    if key in kinds:
                        writer.write(value)
    if len(shards) > 1:
        size = sum(math.prod(s) * d.itemsize for _, kinds in shards for d, s in kinds.values())
        index = {"metadata": {"total_size": size}, "weight_map": table}
        write_json(work / "model.safetensors.index.json", index)
    write_json(work / "config.json", {**model_config(model), "quantization_config": about})
    generation: Any = getattr(model, "generation_config", None)
    if hasattr(generation, "save_pretrained"):
        generation.save_pretrained(work)
