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

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ipex_core.library.spec import check
from ipex_core.module_swap.derive import original_class
from ipex_quant.int8.serialize import describe, is_int8, records, saved
from ipex_quant.util.folders import replacing
from ipex_quant.util.safetensors import NAMES, ShardWriter, read_config
from ipex_quant.weight_only.linear import WoqLinearModule

__all__ = [
    "VERSION",
    "Kinds",
    "about",
    "entries",
    "identity",
    "is_saved",
    "model_config",
    "modules",
    "save",
    "ties",
    "write_json",
]

Tensor = torch.Tensor
Kinds = dict[str, tuple[torch.dtype, tuple[int, ...]]]

#: Version of what ``quantization_config`` says.
VERSION = 1
_FORMATS = ("woq", "int8")


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
        description.update(format=_FORMATS[1], int8=int8)
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
    return isinstance(about, dict) and about.get("format") in _FORMATS


def modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that have tensors of their own, each once; quantized layers have nothing below them."""
    inside: set[int] = set()
    for name, module in model.named_modules():
        if id(module) in inside:
            continue
        if _whole(module):
            inside.update(id(m) for m in module.modules())
        yield name, module


def _whole(module: nn.Module) -> bool:
    """Return whether a module is written as a whole, in a form that is made for it."""
    return isinstance(module, WoqLinearModule) or is_int8(module)


def entries(op: str, name: str, module: nn.Module) -> dict[str, Tensor]:
    """Return what a module alone adds to a state dict."""
    prefix = f"{name}." if name else ""
    if is_int8(module):
        return {prefix + key: value for key, value in saved(module)[1].items()}
    found: Any = {}
    for before in module._state_dict_pre_hooks.values():
        before(module, prefix, False)
    module._save_to_state_dict(found, prefix, False)
    for after in module._state_dict_hooks.values():
        after(module, found, prefix, {})
    for key, value in found.items():
        check(isinstance(value, Tensor), op, key, "be a tensor", type(value).__name__)
        check(value.dtype in NAMES, op, key, "have a dtype of safetensors", value.dtype)
        check(not value.is_meta, op, key, "have values", "a tensor on the meta device")
        other = key.endswith(".woq") and not isinstance(module, WoqLinearModule)
        check(not other, op, "model", "have no quantized layers but linear ones", name)
    return found  # type: ignore[no-any-return]


def identity(value: Tensor) -> tuple[Any, ...]:
    """Return what tells that two tensors are one."""
    return value.data_ptr(), value.dtype, tuple(value.shape), value.stride()


def ties(op: str, model: nn.Module) -> dict[str, str]:
    """Return which names of tensors that are not quantized share the tensor of another."""
    seen: dict[tuple[Any, ...], str] = {}
    tied: dict[str, str] = {}
    for name, module in modules(model):
        if _whole(module):
            continue
        for key, value in entries(op, name, module).items():
            if value.numel() and (first := seen.setdefault(identity(value), key)) != key:
                tied[key] = first
    return tied


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
            own = not _whole(module) and value.numel() > 0
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
    return shards, tied


def about(
    model: nn.Module, layers: Mapping[str, WoqLinearModule], tied: Mapping[str, str]
) -> dict[str, Any]:
    """Return the ``quantization_config``."""
    first = {id(module): name for name, module in layers.items()}
    every = model.named_modules(remove_duplicate=False)
    shared = {n: first[id(m)] for n, m in every if id(m) in first and first[id(m)] != n}
    return {
        "quant_method": "ipex",
        "format": _FORMATS[0],
        "version": VERSION,
        "layers": {
            name: {
                "lowp_mode": module.lowp_mode.name,
                "act_quant_mode": module.act_quant_mode.name,
                "cache_weight_for_large_batch": module.cache_weight_for_large_batch,
                "weight": str(module._float_dtype).removeprefix("torch."),
            }
            for name, module in layers.items()
        },
        "shared": shared,
        "tied": dict(tied),
        **records(model),
    }


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


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a file and wait until the disk has it."""
    with path.open("w", encoding="utf-8") as file:
        json.dump(value, file, indent=2, default=str)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())


def model_config(model: nn.Module) -> dict[str, Any]:
    """Return the configuration of a model of transformers, with the name of its class."""
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "to_dict"):
        return {}
    kind = original_class(model)
    found = {**config.to_dict(), "architectures": [kind.__name__]}
    # Old releases of transformers write that they have chosen the attention; who reads that stays with eager.
    found.pop("_attn_implementation_autoset", None)
    return found
