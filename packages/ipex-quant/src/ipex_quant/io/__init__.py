# SPDX-License-Identifier: Apache-2.0
"""Quantized models in folders: save and load."""

from __future__ import annotations

import contextlib
import importlib
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ipex_core.errors import OpArgumentError
from ipex_core.library.spec import check
from ipex_quant.int8.serialize import describe, rebuild, restore_records
from ipex_quant.qconfig.weight_only import (
    QConfigWoq,
    WoqActQuantMode,
    WoqLowpMode,
    WoqWeightDtype,
    woq_qconfig,
)
from ipex_quant.util.folders import replacing
from ipex_quant.util.modules import replace_module
from ipex_quant.util.safetensors import (
    DAMAGE,
    CheckpointError,
    ShardWriter,
    mapped,
    read_config,
    weight_files,
)
from ipex_quant.weight_only.build import building, check_fits
from ipex_quant.weight_only.checkpoint import quantized_names
from ipex_quant.weight_only.linear import WoqLinearModule
from ipex_quant.weight_only.replace import (
    assign,
    finish_meta,
    load_rest,
    replace_linears_from_checkpoint,
)
from ipex_quant.weight_only.saving import (
    FORMATS,
    UNREADABLE,
    UNREADABLE_HINT,
    VERSION,
    Kinds,
    about,
    entries,
    identity,
    markers,
    model_config,
    modules,
    whole,
    without_markers,
    write_json,
)

__all__ = ["is_saved", "load", "no_init", "save"]

# --- save -------------------------------------------------------------------------------------------------------------


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


# --- load -------------------------------------------------------------------------------------------------------------


#: Called as ``progress(done, total, name)`` after each layer.
Progress = Callable[[int, int, str], None]


def load(
    folder: str | os.PathLike[str],
    model: nn.Module | None = None,
    *,
    progress: Progress | None = None,
    trust_remote_code: bool = False,
) -> nn.Module:
    """Read a model that `save` wrote.

    Args:
        folder: The folder.
        model: A float model of the same structure, with any weights or on the meta device; it is changed in place.
            None for models of transformers, whose class ``config.json`` names.
        progress: Called with the number of quantized layers done, of all, and the name of the last one.
        trust_remote_code: Run the Python code that ``config.json`` names (``auto_map``) as the model's class or
            configuration. There is no prompt: without it such a folder is an error.

    Returns:
        The model, in evaluation mode, with the tensors and dtypes that were saved.

    Raises:
        TypeError: ``model`` is not a module.
        CheckpointError: A file is missing, cut off or damaged.
        OpArgumentError: The folder is of another kind or version, or does not fit the model.
    """
    op = "load"
    if model is not None and not isinstance(model, nn.Module):
        raise TypeError(
            f"{op}: model must be a torch.nn.Module or None, got {type(model).__name__}"
        )
    place = Path(folder)
    config = read_config(place)
    what = "be a folder that ipex.quantization.save wrote"
    given = config.get("quantization_config")
    if isinstance(given, dict) and given.get("format") == UNREADABLE:
        check(False, op, "folder", what, f"{place}, {UNREADABLE_HINT}")
    check(is_saved(config), op, "folder", what, f"{place} without its quantization_config")
    about = config["quantization_config"]
    method = about.get("quant_method")
    check(method == "ipex", op, f"quant_method of {place}", "be 'ipex'", method)
    version = about.get("version")
    check(version == VERSION, op, f"version of {place}", f"be {VERSION}", version)
    try:
        return _load(op, place, config, model, progress, trust_remote_code)
    except (OpArgumentError, CheckpointError):
        raise
    except DAMAGE as error:
        # Numbers and names of config.json lead everywhere: what has been changed shows only there.
        what = "be as ipex.quantization.save wrote it and fit the model"
        got = f"{type(error).__name__}: {error}"
        raise OpArgumentError(f"{op}: {place} must {what}, got {got}") from error


def _load(
    op: str,
    place: Path,
    config: Mapping[str, Any],
    model: nn.Module | None,
    progress: Progress | None,
    trust_remote_code: bool,
) -> nn.Module:
    about = config["quantization_config"]
    layers = _layers(op, about)
    state: dict[str, Tensor] = {}
    for path in weight_files(place):
        state |= mapped(path)
    state = without_markers(state, layers)
    if model is None:
        model = _make(op, place, config, trust_remote_code)
    int8: tuple[str, ...] = ()
    if "int8" in about:
        int8 = rebuild(op, model, about["int8"], state, progress)
        state = without_markers(state, int8)
    names = set(quantized_names(state)) if layers or not int8 else set()
    strangers = sorted(names ^ set(layers))
    check(not strangers, op, "folder", "have the layers of its config.json", strangers[:3])
    shared, tied = about.get("shared", {}), about.get("tied", {})
    if layers or not int8:
        done = replace_linears_from_checkpoint(
            model, state, about, layers, exact=True, progress=progress
        )
        loaded, unused = done.loaded, done.unused
    else:
        loaded, unused = load_rest(model, state, exact=True)
    check(not unused, op, "model", f"have a place for all tensors of {place}", unused[:3])
    for name, value in about["layers"].items():
        layer: Any = model.get_submodule(name)
        dtype = getattr(torch, str(value.get("weight", "float32")), None)
        what = "be the name of a dtype"
        check(isinstance(dtype, torch.dtype), op, f"weight of {name}", what, value["weight"])
        layer._float_dtype = dtype
    for name, first in shared.items():
        replace_module(model, name, model.get_submodule(first))
    _tie(model, tied)
    finish_meta(model)
    inner = {f"{name}.{part}" for name in (*layers, *shared) for part in ("bias", "weight")}
    known = {*loaded, *tied, *inner}
    absent = [name for name, _ in model.named_parameters() if name not in known]
    check(not absent, op, "folder", "have all weights of the model", f"no {', '.join(absent[:3])}")
    restore_records(op, model, about)
    return model.eval()


def _layers(op: str, about: Mapping[str, Any]) -> dict[str, QConfigWoq]:
    """Return how each layer computes."""
    found = {}
    rows = about.get("layers")
    check(isinstance(rows, dict), op, "layers", "be in quantization_config", rows)
    assert isinstance(rows, dict)
    for name, row in rows.items():
        values: dict[str, Any] = {}
        for key, kind in (("lowp_mode", WoqLowpMode), ("act_quant_mode", WoqActQuantMode)):
            listed = kind.__members__
            what = f"be one of {', '.join(listed)}"
            check(row.get(key) in listed, op, f"{key} of {name}", what, row.get(key))
            values[key] = kind[row[key]]
        cache = bool(row.get("cache_weight_for_large_batch", False))
        # Of the weight's dtype nothing is needed but that it has all modes.
        found[name] = woq_qconfig(
            weight_dtype=WoqWeightDtype.INT4, cache_weight_for_large_batch=cache, **values
        )
    return found


def _tie(model: nn.Module, tied: Mapping[str, str]) -> None:
    for name, first in tied.items():
        parent, _, last = first.rpartition(".")
        source = model.get_submodule(parent)
        owner, _, key = name.rpartition(".")
        target = model.get_submodule(owner)
        for kind in ("_parameters", "_buffers"):
            if last in getattr(source, kind) and key in getattr(target, kind):
                getattr(target, kind)[key] = getattr(source, kind)[last]
                break
        else:
            assign(model, name, model.state_dict()[first].clone())


def _make(op: str, folder: Path, config: Mapping[str, Any], trusted: bool) -> nn.Module:
    """Return a model of transformers with weights of any value."""
    names = config.get("architectures") or []
    known = bool(names) and "model_type" in config
    check(
        known, op, "model", f"be given, since {folder} does not name a model of transformers", None
    )
    transformers = importlib.import_module("transformers")
    kind: Any = getattr(transformers, str(names[0]), None)
    if kind is None and trusted:
        kind = _own_class(folder, config, str(names[0]))
    # The name comes from a file: a class of models, and nothing else that transformers has.
    known = isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)
    why = f"transformers has no {names[0]}" + (" that is a model" if kind is not None else "")
    check(known, op, "model", f"be given, since {why}", None)
    try:
        # Explicit: without a value transformers asks on standard input, and a "y" there runs code of the folder.
        settings: Any = transformers.AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=trusted
        )
    except (ImportError, OSError, ValueError) as error:
        what = "have a configuration that transformers reads"
        hint = "; trust_remote_code=True runs its code" if config.get("auto_map") else ""
        raise OpArgumentError(f"{op}: {folder} must {what}, got {error}{hint}") from error
    if hasattr(settings, "quantization_config"):
        del settings.quantization_config
    with no_init():
        check_fits(folder, config, lambda: kind(settings), quantized=True)
    # Not on the meta device: buffers that no file has (of rotary embeddings) must be computed. Without initialization
    # the weights that are replaced are never touched, so they take no memory.
    with no_init(), building(folder):
        model: Any = kind(settings).eval()
    model.tie_weights()
    if (folder / "generation_config.json").is_file() and hasattr(model, "generation_config"):
        model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    return model  # type: ignore[no-any-return]


def _own_class(folder: Path, config: Mapping[str, Any], name: str) -> Any:
    """Return the class of models that a trusted folder brings as Python code, or None."""
    places = config.get("auto_map")
    for key, place in places.items() if isinstance(places, dict) else ():
        if key.startswith("AutoModel") and str(place).rpartition(".")[2] == name:
            module = importlib.import_module("transformers.dynamic_module_utils")
            return module.get_class_from_dynamic_module(place, folder, local_files_only=True)
    return None


def no_init() -> contextlib.AbstractContextManager[Any]:
    """Return the context of transformers in which new models have weights of any value."""
    try:
        module = importlib.import_module("transformers.initialization")  # 5.x
    except ImportError:
        module = importlib.import_module("transformers.modeling_utils")
    return module.no_init_weights()  # type: ignore[no-any-return]
